"""Tiny checkpoints, actors of a world of one, and worlds of several ranks."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import services.trainer.megatron  # noqa: F401  # before megatron.core
from services.trainer.actor import Actor
from services.trainer.parallel import runtime
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.tiny import make_checkpoint
from tests.unit.trainer.megatron.world import World

WORLDS = {size: World(size) for size in (2, 4)}


@pytest.fixture(scope="session")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``hf(kind)``: the directory of a tiny checkpoint, written once."""
    root = tmp_path_factory.mktemp("hf")

    def directory(kind: str) -> Path:
        if not (root / kind).exists():
            make_checkpoint(kind, root / kind)
        return root / kind

    return directory


@pytest.fixture(scope="session")
def make_actor(hf: Callable[[str], Path]) -> Callable[..., Actor]:
    """``make_actor(kind, **config)``: an actor in this process, a world of one that lasts as long as the tests of a module."""
    return lambda kind, **config: rank_steps.actor(hf(kind), **config)


@pytest.fixture(scope="session")
def alone() -> Any:
    """:mod:`rank_steps` in this process."""
    return rank_steps


@pytest.fixture(scope="session")
def once() -> Callable[..., Any]:
    """``once(function, *given)``: what one process does, computed once for all that compare with it, which do not change it."""
    known: dict[tuple[Any, str], Any] = {}

    def computed(function: Callable[..., Any], *given: Any) -> Any:
        key = function, repr(given)
        if key not in known:
            known[key] = function(*given)
        return known[key]

    return computed


@pytest.fixture(autouse=True, scope="session")
def imported_once() -> None:
    """Takes what was imported out of every later garbage collection: leaving a world collects twice, which took longer than most tests."""
    import transformers  # noqa: F401  # the largest import of the tests

    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind() -> Iterator[None]:
    """Frees a module's models with their groups: the threads of each would take time from the tests after it."""
    yield
    runtime.stop()


@pytest.fixture(scope="session")
def two_ranks() -> World:
    return WORLDS[2]


@pytest.fixture(scope="session")
def four_ranks() -> World:
    return WORLDS[4]


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the worlds before the tests of another folder, from which idle ranks would take memory."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        for world in WORLDS.values():
            world.stop()


@pytest.fixture
def fresh_world() -> Iterator[Callable[[int], World]]:
    """``fresh_world(size)``: a world for a test that breaks it."""
    worlds: list[World] = []

    def start(size: int) -> World:
        worlds.append(World(size))
        return worlds[-1]

    yield start
    for world in worlds:
        world.stop()
