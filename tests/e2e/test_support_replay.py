"""Whole runs that sample from a nucleus: they train over the tokens that were kept, so that engine and trainer agree."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.launched import LaunchedRun

RUN_SECONDS = 900
FUNCTION = ("--custom-generate-function-path", "slime.rollout.sglang_rollout:generate", "--support-replay", "on")
AGENT = ("--agent", "examples.agents.openai_calculator:run")


@pytest.mark.extra
@pytest.mark.timeout(RUN_SECONDS + 300)
@pytest.mark.parametrize("flags", [(), FUNCTION, AGENT], ids=["engine", "function", "agent"])
def test_a_run_trains_over_the_tokens_that_were_kept(small_run: Callable[..., Path], tmp_path: Path, flags: tuple[str, ...]) -> None:
    root = tmp_path / "runs" / "kept"
    config = small_run("kept", steps=2, staleness=1)
    with LaunchedRun(config, root, "kept", ["--rollout-top-p", "0.8", "--rollout-max-response-len", "12", *flags]) as run:
        assert run.wait(RUN_SECONDS) == 0, run.said()
        summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", 2)
    assert summary["mean_abs_logprob_diff"] < 1e-3  # type: ignore[operator]
    events = EventAccumulator(str(root / "tensorboard"))
    events.Reload()
    assert all(scalar.value > 1 for scalar in events.Scalars("rollout/kept_tokens"))
    assert "train/support_mismatch" not in events.Tags()["scalars"]
