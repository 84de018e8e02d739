"""A run whose policy prefills on one engine and decodes on another, SGLang's own with keys and values that pass between them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.schema.service_messages import ServiceStatus
from tests.e2e.launched import LaunchedRun, gauge

RUN_SECONDS, STEPS = 900, 16


def engine(statuses: list[ServiceStatus], prefill: bool, least: int = 0) -> ServiceStatus | None:
    found = [one for one in statuses if one.service == "rollout" and bool(one.prefill) == prefill]
    return next((one for one in found if one.version >= least and one.state == "ready"), None)


@pytest.mark.extra(each=True)
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_engines_of_both_kinds_get_the_same_pushes_and_are_replaced(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """The engine of either kind is killed in the run and comes back. No group is lost, and the log-probs are the trainer's: no token was
    sampled after a prompt by other weights."""
    pytest.importorskip("mooncake.engine", reason="mooncake-transfer-engine-non-cuda is not installed", exc_type=ImportError)
    config = small_run("apart", steps=STEPS, staleness=1)
    flags = ["--rollout-replicas", "2", "--prefill-num-servers", "1"]
    with LaunchedRun(config, tmp_path / "runs" / "apart", "apart", flags) as run:
        both = lambda cards: all(engine(cards, kind, 1) for kind in (True, False))  # noqa: E731
        cards = run.until("both kinds with a pushed version", both, RUN_SECONDS)
        for prefill in (True, False):
            killed = engine(cards, prefill)
            assert killed is not None
            run.kill(run.engine_of(killed.pid))
            back = lambda cards, old=killed: (  # noqa: E731
                both(cards) and all(one.incarnation != old.incarnation for one in cards if one.instance == old.instance)
            )
            cards = run.until("its successor, and both serving", back, RUN_SECONDS)
        assert gauge(cards, "buffer", "trained_steps") < STEPS, "the run ended before its engines were killed: make it longer"
        assert run.wait(RUN_SECONDS) == 0, run.said()
    summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", STEPS)
    groups, difference = summary["groups"], summary["mean_abs_logprob_diff"]
    assert isinstance(groups, dict) and (groups["dead"], groups["faults"]) == ({}, {}), groups
    assert isinstance(difference, float) and difference < 1e-5
