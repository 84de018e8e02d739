"""A fully asynchronous rollout function in slime's manner, unchanged, in whole runs on a real engine; also where its process is killed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.launched import LaunchedRun, gauge

RUN_SECONDS = 900

FLAGS = (
    "--rollout-function-path",
    "examples.compat.fully_async_rollout.generate_rollout",
    "--custom-rm-path",
    "examples.compat.fully_async_rollout.score",
)


@pytest.mark.timeout(RUN_SECONDS + 300)
def test_a_fully_asynchronous_rollout_function_trains(small_run: Callable[..., Path], tmp_path: Path) -> None:
    config = small_run("pool", steps=3, staleness=1)
    with LaunchedRun(config, tmp_path / "runs" / "pool", "pool", FLAGS) as run:
        assert run.wait(RUN_SECONDS) == 0, run.said()
        summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", 3)
    assert summary["groups"]["trained"] == 12  # type: ignore[index]
    assert summary["max_staleness_seen"] <= 1  # type: ignore[operator]
    assert any("rollout_function_ended" in log.read_text() for log in (tmp_path / "runs" / "pool" / "logs").glob("rollout*.log"))


@pytest.mark.timeout(2 * RUN_SECONDS)
def test_its_process_is_killed_and_no_group_is_lost(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """kill -9 of the function's process, twice, and of the whole rollout service, while the run trains."""
    config = small_run("kills", steps=8, staleness=2)
    flags = (*FLAGS, "--max-deliver", "20")
    with LaunchedRun(config, tmp_path / "runs" / "kills", "kills", flags) as run:
        for step, victim in ((1, "producer_process"), (2, "services.rollout"), (4, "producer_process")):
            run.until(f"step {step}", lambda cards, step=step: gauge(cards, "buffer", "trained_steps") >= step, RUN_SECONDS)
            run.kill(run.descendant(victim) if victim == "producer_process" else run.child(victim))
        assert run.wait(RUN_SECONDS) == 0, run.said()
        summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", 8)
    assert summary["groups"]["trained"] == 32  # type: ignore[index]
    assert summary["max_staleness_seen"] <= 2  # type: ignore[operator]
