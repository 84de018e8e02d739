"""An agent over OpenAI's SDK trains a policy, in a whole run on real engines; gateways and replicas come and go meanwhile."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.schema.service_messages import ServiceStatus
from tests.e2e.launched import LaunchedRun, gauge

RUN_SECONDS = 900

FLAGS = ("--agent", "examples.agents.openai_calculator:run", "--surplus-rollouts", "1", "--eval-interval", "5", "--rollout-replicas", "2")

GOING = (("services.gateway", signal.SIGKILL), ("services.rollout", signal.SIGTERM)) * 2 + (("services.rollout", signal.SIGKILL),)
"""Who goes, and how: a replica that is asked to go leaves in order, and another one comes."""


@pytest.mark.extra
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_an_agent_trains_while_gateways_and_replicas_come_and_go(small_run: Callable[..., Path], tmp_path: Path) -> None:
    steps = 2 * len(GOING) + 2
    config = small_run("agents", steps=steps, staleness=1)
    with LaunchedRun(config, tmp_path / "runs" / "agents", "agents", FLAGS) as run:
        for number, (program, word) in enumerate(GOING):
            run.until("a step", lambda cards, step=2 * number + 1: trained(cards) >= step, RUN_SECONDS)
            os.kill(run.child(program), word)
        assert run.wait(RUN_SECONDS) == 0, run.said()
        summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", steps)
    assert summary["groups"]["trained"] == 4 * steps  # type: ignore[index]
    assert summary["max_staleness_seen"] <= 1  # type: ignore[operator]


def trained(cards: list[ServiceStatus]) -> float:
    return gauge(cards, "buffer", "trained_steps")
