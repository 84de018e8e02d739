"""An agent over OpenAI's SDK trains a policy, in a whole run on a real engine; its gateway is killed meanwhile."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.schema.service_messages import ServiceStatus
from tests.e2e.launched import LaunchedRun, gauge

RUN_SECONDS = 900

AGENT = ("--agent", "examples.agents.openai_calculator:run", "--surplus-rollouts", "1", "--eval-interval", "5")


@pytest.mark.extra
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_an_agent_trains_and_its_gateway_is_killed_meanwhile(small_run: Callable[..., Path], tmp_path: Path) -> None:
    steps = 10
    config = small_run("agents", steps=steps, staleness=1)
    with LaunchedRun(config, tmp_path / "runs" / "agents", "agents", AGENT) as run:
        for step in (2, 4):
            run.until(f"step {step}", lambda cards, step=step: trained(cards) >= step, RUN_SECONDS)
            run.kill(run.child("services.gateway"))
        assert run.wait(RUN_SECONDS) == 0, run.said()
        summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", steps)
    assert summary["groups"]["trained"] == 4 * steps  # type: ignore[index]
    assert summary["max_staleness_seen"] <= 1  # type: ignore[operator]


def trained(cards: list[ServiceStatus]) -> float:
    return gauge(cards, "buffer", "trained_steps")
