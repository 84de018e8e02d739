"""On-policy distillation with a teacher as a service: a run's policy comes near a model that only another engine holds."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.launched import LaunchedRun
from tests.integration.engine.conftest import running_engine
from tests.integration.engine.test_teachers import opened

RUN_SECONDS = 900


@pytest.mark.extra
@pytest.mark.timeout(RUN_SECONDS + 600)
def test_the_policy_comes_near_its_teacher(small_run: Callable[..., Path], tiny_model: Path, tmp_path: Path) -> None:
    """The warm start takes the policy away from the initial weights, which are the teacher's; distillation brings it back."""
    config = small_run("distilled", steps=16, staleness=1)
    flags = ["--sft-steps", "60", "--lr", "3e-3", "--preset", "opd", "--opd-kl-coef", "0.5", "--opd-top-k", "8"]

    async def run_to_its_end() -> LaunchedRun:
        async with opened(engine) as url:
            with LaunchedRun(
                config, tmp_path / "runs" / "distilled", "distilled", [*flags, "--opd-teachers", f"{{'first': '{url}'}}"]
            ) as run:
                assert await asyncio.to_thread(run.wait, RUN_SECONDS) == 0, run.said()
            return run

    with running_engine(tiny_model, tmp_path, {}) as engine:
        run = asyncio.run(run_to_its_end())
    assert run.summary()["audit"] == "ok"
    events = EventAccumulator(str(tmp_path / "runs" / "distilled" / "tensorboard"))
    events.Reload()
    for metric in ("rollout/opd_reverse_kl", "train/opd_top_k_kl"):
        values = [scalar.value for scalar in events.Scalars(metric)]
        assert len(values) == 16
        first, last = sum(values[:3]) / 3, sum(values[-3:]) / 3
        assert first > 0.02, f"{metric}: the warm start did not move the policy: {values}"
        assert last < 0.6 * first, f"{metric}: {values}"
