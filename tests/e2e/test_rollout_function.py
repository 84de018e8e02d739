"""A fully asynchronous rollout function in slime's manner, unchanged, in whole runs on a real engine; also where its process is killed."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.schema.service_messages import ServiceStatus
from tests.e2e.launched import LaunchedRun, gauge

RUN_SECONDS = 900

FLAGS = (
    "--rollout-function-path",
    "examples.compat.fully_async_rollout.generate_rollout",
    "--custom-rm-path",
    "examples.compat.fully_async_rollout.score",
    "--eval-function-path",
    "slime.rollout.sglang_rollout.generate_rollout",
)


@pytest.mark.extra
@pytest.mark.timeout(2 * RUN_SECONDS)
def test_a_fully_asynchronous_rollout_function_trains_and_its_deaths_lose_no_group(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """kill -9 of the function's process, twice, and of the whole rollout service, while the run trains."""
    steps = 20
    config = small_run("kills", steps=steps, staleness=2)
    with LaunchedRun(config, tmp_path / "runs" / "kills", "kills", (*FLAGS, "--max-deliver", "20")) as run:
        reached = 0.0
        for victim in ("producer_process", "services.rollout", "producer_process"):
            cards = run.until(f"step {reached + 1}", lambda cards, reached=reached: trained(cards) > reached, RUN_SECONDS)
            reached = trained(cards)
            assert reached < steps, "the run ended before: make it longer"
            kill(run, victim)
        assert run.wait(RUN_SECONDS) == 0, run.said()
        summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", steps)
    assert summary["groups"]["trained"] == 4 * steps  # type: ignore[index]
    assert summary["max_staleness_seen"] <= 2  # type: ignore[operator]
    assert any("rollout_function_ended" in log.read_text() for log in (tmp_path / "runs" / "kills" / "logs").glob("rollout*.log"))


def trained(cards: list[ServiceStatus]) -> float:
    return gauge(cards, "buffer", "trained_steps")


def kill(run: LaunchedRun, victim: str) -> None:
    """Kills the process once it is there: it may just be starting again."""
    end = time.monotonic() + RUN_SECONDS
    while True:
        try:
            return run.kill(run.child(victim) if victim.startswith("services") else run.descendant(victim))
        except (AssertionError, ProcessLookupError):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
