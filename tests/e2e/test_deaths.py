"""Every part of a run is killed -9 once; the run goes on to its last step and the ledger holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.schema.messages import ServiceStatus
from tests.e2e.launched import LaunchedRun, gauge

STEP_SECONDS = 420
"""For a part to be back at work and the next step made, on a slow and busy machine."""


@pytest.mark.timeout(2400)
def test_a_run_survives_the_death_of_every_part(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """kill -9 of buffer, rollout, reward, trainer, NATS and Valkey, one after the other, each in the middle of the run."""
    steps = 120
    config = small_run("deaths", steps=steps, staleness=2)
    with LaunchedRun(config, tmp_path / "runs" / "deaths", "deaths") as run:
        run.until("a first step", lambda cards: gauge(cards, "buffer", "trained_steps") >= 1, STEP_SECONDS)
        for victim in ("services.buffer", "services.reward", "valkey-server", "nats-server", "services.trainer", "services.rollout"):
            pid = run.child(victim)
            before = gauge(run.until("a live buffer", has_buffer, STEP_SECONDS), "buffer", "trained_steps")
            assert before < steps, f"the run ended before {victim} was killed: make it longer"
            run.kill(pid)
            goal = min(before + 1, steps)
            cards = run.until(f"a step after the death of {victim}", lambda cards, goal=goal: trained(cards) >= goal, STEP_SECONDS)
            assert trained(cards) >= goal
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


def trained(cards: list[ServiceStatus]) -> float:
    return gauge(cards, "buffer", "trained_steps")
