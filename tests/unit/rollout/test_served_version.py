"""What a replica serves, where it takes it from, and what becomes of a push as its engine dies."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.engine.receiver_client import ReceiverError
from services.rollout.served_version import NO_WEIGHTS, ServedVersion
from services.rollout.weight_catch_up import CACHE_VARIABLE, Situation, WeightCatchUp, choose, temporary_directory
from services.rollout.weight_receiver import WeightsReceiver
from shared.bus.registry import CATCHING_UP
from shared.bus.subjects import Subjects
from shared.runtime.errors import MyxoError
from shared.schema.messages import Message
from shared.schema.weight_messages import WeightChannelAddress, WeightsPrepare, WeightsReceive
from shared.transfer.weight_checkpoint import BrokenCheckpoint, WeightCheckpoints
from tests.support.run_config import run_config
from tests.support.tables import table
from tests.unit.shared.weights.test_weight_checkpoints import history


@pytest.fixture
def ready() -> ServedVersion:
    """A replica that serves version 3."""
    served = ServedVersion()
    served.engine_started()
    served.serve(3, "03")
    return served


def test_a_new_engine_is_fenced_until_a_version_is_served() -> None:
    served = ServedVersion()
    assert (served.state, served.serving) == ("starting", False)
    served.engine_started()
    assert (served.state, served.serving, served.incarnation) == ("fenced", False, 1)
    served.serve(3, "03")
    assert (served.state, served.serving, served.version, served.digest) == ("ready", True, 3, "03")


def test_nothing_is_served_while_a_version_is_loaded(ready: ServedVersion) -> None:
    ready.begin_update(4)
    assert (ready.state, ready.serving, ready.version, ready.touched) == ("updating", False, 3, False)
    ready.loaded("04")
    assert (ready.received, ready.touched, ready.serving) == ("04", True, False)
    ready.serve(4, "04")
    assert (ready.state, ready.version, ready.target, ready.touched) == ("ready", 4, None, False)


def test_a_check_that_finds_a_difference_takes_the_digest_back(ready: ServedVersion) -> None:
    ready.begin_update(4)
    ready.loaded("04")
    ready.compared("04", differs=False)
    assert ready.received == "04"
    ready.compared("05", differs=True)
    assert ready.received == "" and ready.touched


def test_a_fence_takes_the_weights_and_what_was_reported_of_them(ready: ServedVersion) -> None:
    before = ready.incarnation
    ready.fence()
    assert (ready.state, ready.version, ready.digest) == ("fenced", NO_WEIGHTS, "") and ready.incarnation > before
    ready.engine_died()
    assert ready.state == "starting"


def test_what_was_held_is_served_again_after_sleep_unless_it_went_with_the_memory(ready: ServedVersion) -> None:
    ready.asleep = True
    assert (ready.state, ready.serving) == ("asleep", False)
    ready.asleep = False
    assert ready.serving and ready.version == 3
    ready.asleep = True
    ready.lose_weights()
    ready.asleep = False
    assert (ready.state, ready.serving) == ("fenced", False)


def test_a_newcomer_that_helps_itself_says_so() -> None:
    served = ServedVersion()
    served.engine_started()
    served.catching_up = True
    assert (served.state, served.serving) == (CATCHING_UP, False)


EVENTS = ["engine_started", "engine_died", "fence", "lose_weights", "begin_update", "loaded", "serve", "sleep", "wake"]


@given(st.lists(st.sampled_from(EVENTS)))
def test_only_a_whole_version_of_a_living_engine_is_ever_served(events: list[str]) -> None:
    served, version, incarnation = ServedVersion(), 0, 0
    for event in events:
        match event:
            case "begin_update":
                version += 1
                served.begin_update(version)
            case "loaded":
                served.loaded("d")
            case "serve":
                served.serve(version, "d")
            case "sleep" | "wake":
                served.asleep = event == "sleep"
            case _:
                getattr(served, event)()
        assert served.incarnation >= incarnation
        incarnation = served.incarnation
        if served.serving:
            assert served.state in ("ready", CATCHING_UP) and served.target is None and served.version != NO_WEIGHTS
            assert served.engine_is_up and not served.asleep


# --- where a replica takes weights from, situation by situation

NEW, PUSHES, PULLS = -1, True, False
PEER, DISK = "peer", "disk"

CASES = {
    # join_from, held, live, snapshot, peers, pushes → choice
    "nothing is live yet: the first push comes": ("auto", NEW, -1, -1, (), PUSHES, None),
    "a replica serves what is live": ("auto", NEW, 7, 5, ("a", "b"), PUSHES, PEER),
    "a replica rather than the disk": ("auto", NEW, 7, 7, ("a",), PUSHES, PEER),
    "nobody serves it, but it is on disk": ("auto", NEW, 7, 7, (), PUSHES, DISK),
    "what is on disk is old: a push is as near": ("auto", NEW, 7, 5, (), PUSHES, None),
    "the old one was asked for": ("disk", NEW, 8, 7, ("a",), PUSHES, DISK),
    "only from replicas": ("peer", NEW, 7, 7, (), PUSHES, None),
    "only by pushes": ("trainer", NEW, 7, 7, ("a",), PUSHES, None),
    "who serves an older version gets the next push": ("auto", 5, 7, 7, ("a",), PUSHES, None),
    "without pushes the first version is on disk": ("auto", NEW, -1, 7, (), PULLS, DISK),
    "without pushes every version is": ("auto", 6, 6, 7, (), PULLS, DISK),
    "a replica has read it already": ("auto", NEW, 7, 7, ("a",), PULLS, PEER),
    "replicas serve what is overtaken": ("auto", NEW, 6, 7, ("a",), PULLS, DISK),
    "only from disk": ("disk", NEW, 7, 7, ("a",), PULLS, DISK),
    "for newcomers only": ("peer", 6, 7, 7, ("a",), PULLS, DISK),
    "nobody sends the first one": ("peer", NEW, -1, 7, (), PULLS, DISK),
    "it has the newest": ("auto", 7, 7, 7, ("a",), PULLS, None),
    "versions never fall": ("auto", 8, 7, 7, ("a",), PULLS, None),
}


@table("case", CASES)
def test_where_weights_come_from(case: str) -> None:
    join_from, held, live, snapshot, peers, pushes, choice = CASES[case]
    assert choose(join_from, Situation(held, live, snapshot, peers, pushes)) == choice  # type: ignore[arg-type]


@pytest.mark.parametrize(("trainer", "asked"), [({}, ("rollout-0",)), ({"lora_rank": 8}, ())])
async def test_no_replica_is_asked_for_weights_with_adapters_merged_into_them(
    trainer: dict[str, int], asked: tuple[str, ...], tmp_path: Path
) -> None:
    status = SimpleNamespace(instance="rollout-0", version=7, state="ready", ranks=2)
    registry = SimpleNamespace(alive=AsyncMock(return_value=[status]))
    service = SimpleNamespace(config=run_config(tmp_path, trainer=trainer), instance="rollout-1", ranks=2, registry=registry)
    replica = SimpleNamespace(served=SimpleNamespace(has_weights=False))
    assert await WeightCatchUp(service, replica, lambda: False)._peers(7) == asked  # type: ignore[arg-type]


async def test_a_disk_that_refuses_the_copy_is_named_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path, weights={"update_weight_transport": "disk", "update_weight_mode": "delta"})
    history(WeightCheckpoints.of_run(config).directory, "fd")
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    service = SimpleNamespace(config=config, instance="rollout-1", run=config.run.name)
    catch_up = WeightCatchUp(service, Mock(), lambda: False)  # type: ignore[arg-type]
    with pytest.raises(MyxoError, match=rf"version 1 cannot be put together in {CACHE_VARIABLE} .*Not a directory") as raised:
        await catch_up._pulled(SimpleNamespace(version=1))  # type: ignore[arg-type]
    assert not isinstance(raised.value, BrokenCheckpoint)


def test_the_copies_of_processes_that_were_killed_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = temporary_directory()
    if (child := os.fork()) == 0:
        (temporary_directory() / "model.safetensors").write_bytes(b"x")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "myxo-weights-of-nobody").mkdir()
    other = temporary_directory()
    assert set(tmp_path.iterdir()) == {own, other, tmp_path / "myxo-weights-of-nobody"}


# --- an engine dies while it receives a push: its replica is fenced once, and what is left of that push does not touch its next engine

CHANNEL = WeightChannelAddress(kind="group", name="c", address="127.0.0.1", port=1, secret="ab" * 16, backend="gloo", world_size=2)

Handler = Callable[[Message], Awaitable[Message]]


class Engine:
    """Takes every command, but a push ends with an error, after ``meanwhile``. ``asked``: the commands."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._meanwhile, self.asked = meanwhile, list[str]()
        self.memory = self

    async def receive(self, *_: Any, **__: Any) -> None:
        self._meanwhile()
        raise ReceiverError("the engine", "connection reset by peer", touched=True)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[None]]:
        async def ask(*_: Any, **__: Any) -> None:
            self.asked.append(name)

        return ask


class RecordedReplica:
    """A replica's state, without its engine's process."""

    def __init__(self, engine: Engine) -> None:
        self.served, self.client, self.update_lock = ServedVersion(), engine, asyncio.Lock()
        self.fences, self.further_nodes = list[str](), list[str]()
        self.served.engine_started()

    @property
    def incarnation(self) -> int:
        return self.served.incarnation

    def show(self) -> None:
        pass

    async def fence(self, reason: str) -> None:
        self.fences.append(reason)
        self.served.fence()

    def replace(self, engine: Engine) -> None:
        """What a replica does when its engine has died, up to the next one's start."""
        self.served.engine_died()
        self.client = engine
        self.served.engine_started()


@pytest.mark.parametrize("died", [True, False])
async def test_the_push_of_a_dead_engine_ends_with_it(died: bool, tmp_path: Path) -> None:
    handlers: dict[str, Handler] = {}

    async def serve(subject: str, _: type, handler: Handler) -> None:
        handlers[subject.rpartition(".")[2]] = handler

    following = Engine()
    engine = Engine(lambda: replica.replace(following) if died else None)
    replica: Any = RecordedReplica(engine)
    service: Any = SimpleNamespace(
        bus=SimpleNamespace(serve=serve),
        config=run_config(tmp_path),
        instance="rollout-1",
        spawn=asyncio.create_task,
        subjects=Subjects("run"),
        traces=SimpleNamespace(on=False),
    )
    await WeightsReceiver(service, replica).listen()
    await handlers["prepare"](WeightsPrepare(version=4, channels=[CHANNEL], rank=1, deadline=30))
    with pytest.raises(ReceiverError, match="connection reset"):
        await handlers["receive"](WeightsReceive(version=4, push=1, channels=["c"], deadline=30))
    assert not replica.served.serving and not replica.update_lock.locked()
    if died:  # `Replica.keep_engine` has fenced the dead one
        assert replica.fences == [] and following.asked == [] and not replica.served.touched
    else:
        [fence] = replica.fences
        assert fence.startswith("the push of version 4 failed") and "resume" in engine.asked
