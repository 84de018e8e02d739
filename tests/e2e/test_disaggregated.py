"""A run whose policy prefills on one engine and decodes on another, SGLang's own with keys and values that pass between them."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.schema.service_messages import ServiceStatus
from tests.e2e.launched import LaunchedRun, gauge

RUN_SECONDS, STEPS = 900, 16


def movable() -> bool:
    """Whether Mooncake is installed, and the libraries that it links."""
    try:
        return importlib.util.find_spec("mooncake") is not None and importlib.util.find_spec("mooncake.engine") is not None
    except ImportError:
        return False


needs_mooncake = pytest.mark.skipif(not movable(), reason="mooncake-transfer-engine-non-cuda is not installed")


def engines(statuses: list[ServiceStatus], prefill: bool, least: int = 0) -> list[ServiceStatus]:
    return [
        one
        for one in statuses
        if one.service == "rollout" and bool(one.prefill) == prefill and one.version >= least and one.state == "ready"
    ]


@needs_mooncake
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_prefill_and_decode_engines_get_the_same_pushes_and_are_replaced(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """The engine of either kind is killed in the run and comes back. No group is lost, no sample is of two versions' weights, and the decode
    engine's log-probs are the trainer's."""
    config = small_run("apart", steps=STEPS, staleness=1)
    flags = ["--rollout-replicas", "2", "--prefill-num-servers", "1"]
    with LaunchedRun(config, tmp_path / "runs" / "apart", "apart", flags) as run:
        cards = run.until(
            "both kinds with a pushed version", lambda cards: all(len(engines(cards, kind, 1)) == 1 for kind in (True, False)), RUN_SECONDS
        )
        for prefill in (True, False):
            [engine] = engines(cards, prefill)
            run.kill(run.engine_of(engine.pid))
            cards = run.until(
                "its successor, and both serving",
                lambda cards: (
                    all(len(engines(cards, kind, 2)) == 1 for kind in (True, False))
                    and next(one.incarnation for one in cards if one.instance == engine.instance) != engine.incarnation
                ),  # noqa: B023
                RUN_SECONDS,
            )
        assert gauge(cards, "buffer", "trained_steps") < STEPS, "the run ended before its engines were killed: make it longer"
        assert run.wait(RUN_SECONDS) == 0, run.said()
    summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", STEPS)
    groups, difference = summary["groups"], summary["mean_abs_logprob_diff"]
    assert isinstance(groups, dict) and (groups["dead"], groups["dropped"]) == ({}, {}), groups
    assert isinstance(difference, float) and difference < 1e-4
