"""Whole runs beside whose policy another model is at work: PPO's critic, a process of its own, and a teacher as a service."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from services.trainer.actor_critic_exchange import ActorCriticExchange, Kind
from shared.data.metric_files import MetricDirectory
from shared.process.embedded_servers import EmbeddedValkey
from tests.e2e.launched import LaunchedRun, gauge
from tests.integration.engine.conftest import running_engine
from tests.integration.engine.test_teachers import opened

RUN_SECONDS = 1500
SERVERS = ("valkey-server", "nats-server")
ALL = ("critic", "trainer", "rollout", "reward", "buffer", *SERVERS)


@pytest.mark.timeout(RUN_SECONDS + 300)
@pytest.mark.parametrize(
    ("deaths", "run_steps"),
    [
        pytest.param([(2, ("critic", "trainer"))], 12, id="both roles at once", marks=pytest.mark.extra(each=True)),
        pytest.param([(2, ALL)], 12, id="all at once", marks=pytest.mark.extra),
        pytest.param([(2, ("critic",)), (6, ("trainer",))], 12, id="one by one", marks=pytest.mark.extra),
    ],
)
def test_a_run_with_a_critic_survives_deaths(
    deaths: list[tuple[int, tuple[str, ...]]], run_steps: int, small_run: Callable[..., Path], tmp_path: Path
) -> None:
    """The KL in the reward makes each wait for the other in every step; checkpoints at other steps than the deaths make both replay."""
    flags = [
        *("--advantage-estimator", "ppo", "--kl-coef", "0.01", "--critic-lr", "1e-3", "--save-interval", "3"),
        *("--gamma", "0.99", "--lambd", "0.95", "--num-steps-per-rollout", "2", "--num-critic-only-steps", "1"),
    ]
    config = small_run("ppo", steps=run_steps, staleness=1)
    with LaunchedRun(config, tmp_path / "runs" / "ppo", "ppo", flags) as run:
        for steps, parts in deaths:
            cards = run.until(f"{steps} steps", lambda found, steps=steps: gauge(found, "critic", "step") >= steps, RUN_SECONDS)
            assert gauge(cards, "critic", "step") < run_steps, f"the run ended before {parts} were killed: make it longer"
            pids = {card.service: card.pid for card in cards} | {server: run.child(server) for server in SERVERS}
            for part in parts:
                run.kill(pids[part])
        assert run.wait(RUN_SECONDS) == 0, run.said()
    summary = run.summary()
    assert summary["audit"] == "ok"
    assert summary["steps"] == run_steps
    scalars = list(MetricDirectory(tmp_path / "runs" / "ppo" / "tensorboard").read())
    rewards, times, losses = (
        {one.step for one in scalars if one.tag == name} for name in ("rollout/raw_reward", "perf/step_time", "train/loss")
    )
    every, trained = set(range(run_steps)), set(range(1, run_steps))  # in the first one the critic learns alone
    assert (rewards, times, losses) == (every, every, trained)
    restarts = summary["restarts"]
    assert isinstance(restarts, dict)
    assert sum(restarts.values()) >= sum(part not in SERVERS for _, parts in deaths for part in parts) - 1
    root = tmp_path / "runs" / "ppo"
    assert (root / "hf" / "model.safetensors").is_file()
    assert list((root / "critic-checkpoints").glob("step_*"))
    assert asyncio.run(left_over(root, run_steps)) == []


async def left_over(root: Path, steps: int) -> list[str]:
    """Steps whose values or KL the finished run has not freed."""
    server = EmbeddedValkey(root / "valkey")
    server.start()
    try:
        exchange = ActorCriticExchange(server.url, "ppo")
        kinds: tuple[Kind, ...] = ("values", "kl")
        found = [f"{kind} {step}" for kind in kinds for step in range(steps) if exchange.complete(kind, step)]
        exchange.close()
        return found
    finally:
        server.stop()


TEACHER_SECONDS = 900


@pytest.mark.extra(each=True)
@pytest.mark.timeout(TEACHER_SECONDS + 600)
def test_the_policy_comes_near_its_teacher(small_run: Callable[..., Path], tiny_model: Path, tmp_path: Path) -> None:
    """The warm start takes the policy away from the initial weights, which are the teacher's; distillation brings it back."""
    config = small_run("distilled", steps=16, staleness=1)
    flags = ["--sft-steps", "60", "--lr", "3e-3", "--preset", "opd", "--opd-kl-coef", "0.5", "--opd-top-k", "8"]

    async def run_to_its_end() -> LaunchedRun:
        async with opened(engine) as url:
            with LaunchedRun(
                config, tmp_path / "runs" / "distilled", "distilled", [*flags, "--opd-teachers", f"{{'first': '{url}'}}"]
            ) as run:
                assert await asyncio.to_thread(run.wait, TEACHER_SECONDS) == 0, run.said()
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
