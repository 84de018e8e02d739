"""Every part of a run is killed -9 once; the run continues to its last step and the ledger holds."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.schema.service_messages import ServiceStatus
from tests.e2e.launched import LaunchedRun, gauge, trained

STEP_SECONDS = 420
"""For a part to be back at work and the next step made, on a slow and busy machine."""


PAIRS = (("services.buffer", "services.reward"), ("valkey-server", "nats-server"), ("services.trainer", "services.rollout"))
ONE_BY_ONE = tuple((victim,) for pair in PAIRS for victim in pair)


@pytest.mark.timeout(2400)
@pytest.mark.usefixtures("forked_engines")
@pytest.mark.parametrize(
    ("rounds", "steps"),
    [
        pytest.param((sum(PAIRS, ()),), 60, id="all at once"),
        pytest.param(PAIRS, 80, id="in pairs", marks=pytest.mark.extra),
        pytest.param(ONE_BY_ONE, 120, id="one by one", marks=pytest.mark.extra),
    ],
)
def test_a_run_survives_the_death_of_every_part(
    rounds: tuple[tuple[str, ...], ...], steps: int, small_run: Callable[..., Path], tmp_path: Path
) -> None:
    """Buffer, reward, Valkey, NATS, trainer and rollout are killed with SIGKILL, each in the middle of the run: rewards take their time
    until the last one has died."""
    config, hurry = small_run("deaths", steps=steps, staleness=2), tmp_path / "hurry"
    with LaunchedRun(config, tmp_path / "runs" / "deaths", "deaths", ["--custom-rm-path", "tests.support.reward_hooks:unhurried"]) as run:
        run.until("a first step", lambda cards: trained(cards) >= 1, STEP_SECONDS)
        for victims in rounds:
            pids = [run.child(victim) for victim in victims]
            before = trained(run.until("a live buffer", has_buffer, STEP_SECONDS))
            assert before < steps, f"the run ended before {victims} were killed: make it longer"
            for pid in pids:
                run.kill(pid)
            goal = min(before + 1, steps)
            run.until(f"a step after the death of {victims}", lambda cards, goal=goal: trained(cards) >= goal, STEP_SECONDS)
        hurry.touch()
        assert run.wait(STEP_SECONDS * 2) == 0, run.said()
    summary = run.summary()
    assert summary["audit"] == "ok"
    assert summary["steps"] == steps
    groups = summary["groups"]
    assert isinstance(groups, dict)
    assert groups["trained"] == steps * 4
    restarts = summary["restarts"]
    assert isinstance(restarts, dict)
    assert sum(restarts.values()) >= 4


def has_buffer(cards: list[ServiceStatus]) -> bool:
    return gauge(cards, "buffer", "trained_steps") >= 0
