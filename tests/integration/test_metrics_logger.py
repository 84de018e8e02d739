"""What a training step leaves behind: TensorBoard's files, Prometheus' gauges, the event on the bus; over the real bus."""

import asyncio
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from services.trainer.actor import StepResult
from services.trainer.batch_metrics import empty_table
from services.trainer.batches import TrainBatch
from services.trainer.control_client import ControlClient
from services.trainer.flops import work
from services.trainer.metrics_logger import MetricsLogger, TrainingSpeed
from services.trainer.partition import Partition, partition_batch
from services.trainer.step_profiler import STEP_PARTS
from services.trainer.trainer_hooks import RolloutLog
from services.trainer.weights.push_schedule import PushResult
from shared.bus import runs, streams
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.model.architecture import Architecture, Rope
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.schema.messages import Batch, BatchGroup, EvalFigures, EvaluationsEnded, EvaluationsRequest, Payload, RewardPart, Trained
from shared.schema.service_messages import MetricsWritten, ServiceStatus, WarmStartEnded
from tests.support.run_config import run_config
from tests.support.waiting import until

SPEED = TrainingSpeed(Architecture("qwen3", 2, 64, 96, 8, 2, 16, 128, 512, 1e-6, False, Rope(1e4)), ranks=2, peak=1e12)

SHARED = work([2, 2])
PARTS = dict(zip(STEP_PARTS, (0.5, 0.25, 0.0, 0.5, 0.25, 0.0, 0.25, 0.25), strict=True))
"""Two samples begin with the two tokens of another's prompt."""


def batch(step: int, rewards: list[list[float]]) -> TrainBatch:
    """Groups of samples of 2 prompt tokens and 3, 4, … response tokens, the last of each truncated."""
    groups = []
    for number, values in enumerate(rewards):
        payload = Payload(keys=[f"k{number}"], bytes=1, tokens=tuple(5 + index for index in range(len(values))))
        groups.append(BatchGroup(group=f"g{number}", payload=payload, rewards=values))
    parts = {"is short?": RewardPart(samples=4, mean=0.25 + step, std=0.5, min=0.0, max=1.0)}
    given = Batch(step=step, version=step, groups=groups, parts=parts)
    rows = [(3 + index, 0, 3 + index, index, step, index == len(values) - 1, 0) for values in rewards for index in range(len(values))]
    table = empty_table(len(rows))
    table[:, : len(rows[0])] = rows
    return TrainBatch(partition_batch(given, 1, 1, 1000), table, [])


def result(loss: float) -> StepResult:
    return StepResult(loss, {"loss": loss, "agreement_abs_diff": 1.0, "agreement_tokens": 4.0}, grad_norm=2 * loss, lr=1e-3)


class Log(RolloutLog):
    """Takes over the samples of the third step."""

    def __init__(self) -> None:
        self.waited: list[float] = []

    def wrote(self, partition: Partition, seconds: float) -> bool:
        self.waited.append(seconds)
        return partition.batch.step == 2


def recorded(config: RunConfig, log: Log) -> str:
    """Two steps, a push, and one in which the critic learns alone; returns what Prometheus would read."""
    with ControlClient() as link:
        asyncio.run(until(lambda: len(link.evaluations) == 2, "the evaluations that the buffer has"))
        record = MetricsLogger(link, config, SPEED, log=log)
        record.sft(1, 2, result(4.0))
        assert "sft_seconds_left" not in link.service.metrics.values
        record.sft(2, 2, result(2.0))
        assert link.service.metrics.values["sft_seconds_left"] == 0
        now = time.time()
        first = batch(0, [[1.0, 1.0], [0.0, 1.0]])
        second = replace(batch(1, [[0.0, 0.0], [0.0, 1.0]]), raw=[0.0, 0.0, 0.0, 3.0], rewards=[0.0, 0.0, 0.0, 1.0])
        record.step(first, [result(1.0), result(3.0)], now, now + 2, optimized=1.0, parts=PARTS, token_means={"log_probs": -0.5})
        pushed = {"seconds": 0.5, "wire_seconds": 0.4, "engine_seconds": 0.3, "stall": 0.1}
        record.push(PushResult(version=1, replicas=["rollout-0"], bytes=100, digest="d", **pushed))
        record.step(second, [result(1.0)], now + 3, now + 4, optimized=1.0, parts=PARTS, token_means={}, shared=SHARED)
        record.step(batch(2, [[1.0, 0.0]]), [], now + 6, now + 10, optimized=0.0, parts=PARTS, token_means={})
        with urllib.request.urlopen(f"http://{link.service.status().http}/metrics", timeout=30) as answer:
            text: str = answer.read().decode()
        record.close()
        return text


async def evaluated(bus: Bus, run: str) -> None:
    """Answers as a buffer of which the evaluations of two sets have ended, one of them late and without samples."""
    shared = {"oldest": 0, "newest": 1, "live": 2, "prompts": 4, "failed": 1}
    measured = {"rates": {"pass@1": 0.75, "pass^2": 0.5}, "lengths": {"mean": 7.5, "p90": 9.0}, "truncated": 0.25}
    ended = [
        EvalFigures(dataset="heldout", version=0, samples=6, mean_reward=0.75, **shared, **measured),
        EvalFigures(dataset="late", version=1, samples=0, late=3, mean_reward=0.0, **shared),
    ]

    async def answer(request: EvaluationsRequest) -> EvaluationsEnded:
        return EvaluationsEnded(evaluations=ended[request.known : request.known + 1])

    await bus.serve(Subjects(run).evaluations, EvaluationsRequest, answer)
    gauges = {"evaluations": float(len(ended))}
    while True:
        card = ServiceStatus(service="buffer", instance="b", host="h", pid=1, http="", state="ready", gauges=gauges, at=time.time())
        await Registry(bus, run).renew(card)
        await asyncio.sleep(1)


async def test_a_step_is_written_everywhere(
    nats: EmbeddedNats, valkey: EmbeddedValkey, bus: Bus, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nucleus = {"rollout": {"rollout_top_p": 0.9}, "trainer": {"support_replay": "off"}}
    config = run_config(tmp_path, run={"name": run_name}, monitoring={"log_passrate": True}, **nucleus)
    await runs.create(bus, config, valkey.url)
    monkeypatch.setenv("NATS_URL", nats.url)
    monkeypatch.setenv("MYXO_RUN", run_name)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # a link takes the signals of the process's main thread, which this is not
    buffer = asyncio.create_task(evaluated(bus, run_name))
    log = Log()
    scraped = await asyncio.to_thread(recorded, config, log)
    buffer.cancel()

    events = EventAccumulator(str(config.run.root / "tensorboard"))
    events.Reload()
    written = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert written["train/loss"] == [2.0, 1.0]
    assert written["train/agreement_tokens"] == [8.0, 4.0]
    assert written["train/support_mismatch"] == [1.0, 1.0]
    assert written["sft/loss"] == [4.0, 2.0]
    assert written["train/grad_norm"] == [6.0, 2.0]
    assert written["rollout/raw_reward"] == [0.75, 0.75], "the second batch's as the user's function shows them"
    assert written["rollout/rewards"] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert written["rollout/response_len/max"] == [4.0, 4.0]
    assert written["rollout/truncated_ratio"] == [0.5, 0.5]
    assert written["rollout/repetition_frac"] == [0.0, 0.0]
    assert written["rollout/log_probs"] == [-0.5]
    assert written["rollout/zero_std/count_1"] == [1.0, 0.0]
    assert written["rollout/zero_std/count_0"] == [1.0]
    assert written["rewards/is_short_/mean"] == [0.25, 1.25]
    assert written["rewards/is_short_/max"] == [1.0, 1.0]
    assert written["passrate/pass@1"] == [0.75, 0.25]
    assert written["passrate/pass@2"] == [1.0, 0.5]
    assert written["eval/heldout"] == [0.75]
    assert written["eval/heldout-pass@1"] == [0.75] and written["eval/heldout-pass^2"] == [0.5]
    assert written["eval/heldout-truncated_ratio"] == [0.25]
    assert written["eval/heldout/response_len/mean"] == [7.5] and written["eval/heldout/response_len/p90"] == [9.0]
    labels = {name: written[f"eval/heldout/{name}"] for name in ("version", "newest_version", "lag", "samples", "failed", "late")}
    assert labels == {"version": [0], "newest_version": [1], "lag": [2], "samples": [6], "failed": [1], "late": [0]}
    assert written["eval/late/late"] == [3] and "eval/late" not in written
    assert written["perf/step_time"] == pytest.approx([2.0, 1.0, 4.0])
    assert log.waited == written["perf/train_wait_time"] == pytest.approx([0.0, 1.0, 2.0])
    assert [written[f"perf/train_{part}_time"][0] for part in STEP_PARTS] == [0.0, 0.25, 0.0, 0.5, 0.25, 0.0, 0.0, 0.0], (
        "before it: no step's"
    )
    assert sum(written[f"perf/train_{part}_time"][1] for part in STEP_PARTS) == 2.0
    assert written["perf/wait_time_ratio"] == pytest.approx([0.0, 0.5, 1 / 3])
    assert written["perf/actor_train_tok_per_s"] == pytest.approx([22.0, 22.0])
    assert written["perf/wall_tok_per_s"] == pytest.approx([11.0, 11 / 6]), (
        "from the second step on: 22 tokens in 1 s of waiting and 1 s of work"
    )
    wall = written["perf/train_wait_time"][1] + written["perf/step_time"][1]
    assert written["perf/wall_tok_per_s"][0] * wall == pytest.approx(22), "rate times wall time is what was trained"
    assert written["perf/actor_train_computed_tokens"] == [22.0, 18.0]
    apart, less = SPEED.of_step([5, 6, 5, 6], 1.0), SPEED.of_step([5, 6, 5, 6], 1.0, SHARED)
    assert less["actor_train_tflops"] < 0.9 * apart["actor_train_tflops"]
    for name in ("actor_train_tflops", "actor_train_mfu"):
        assert written[f"perf/{name}"] == pytest.approx([apart[name], less[name]])
    assert written["perf/update_weights_time"] == [0.5]

    assert 'myxo_train_loss{instance="' in scraped and "myxo_rollout_zero_std_count_0{" in scraped
    assert "myxo_passrate_pass_1{" in scraped and "myxo_rewards_is_short__mean{" in scraped
    names = Subjects(run_name)
    steps = streams.read(bus, names.events_stream, Trained, subject=names.event("trainer", "step"))
    told = [event async for _, event in steps]
    ended = streams.read(bus, names.events_stream, WarmStartEnded, subject=names.event("trainer", "warm_start"))
    assert [event async for _, event in ended] == [WarmStartEnded(steps=2, every=1, losses=[4.0, 2.0])]
    assert [event.metrics.get("loss") for event in told] == [2.0, 1.0, None], "in the third the actor does not learn"
    assert told[2].metrics["reward"] == 0.5 and told[2].metrics["step_time"] == pytest.approx(4.0)
    shown: dict[str, list[float]] = {}
    events_of = streams.read(bus, names.events_stream, MetricsWritten, subject=names.event("trainer", "metrics"))
    async for _, event in events_of:
        assert event.role == "actor"
        for tag, value in event.values.items():
            shown.setdefault(tag, []).append(value)
    assert {tag: pytest.approx(values, rel=1e-5) for tag, values in shown.items()} == written, "readers of the bus see what files have"
    assert told[0].metrics["agreement_abs_diff"] == 2.0


def life(config: RunConfig, resumed: int, steps: range, loss: float) -> None:
    """A trainer that resumes, is told of every evaluation, and trains and pushes until it is killed."""
    with ControlClient() as link:
        asyncio.run(until(lambda: len(link.evaluations) == 2, "the evaluations that the buffer has"))
        record = MetricsLogger(link, config, SPEED)
        record.resume(resumed)
        for step in steps:
            record.step(batch(step, [[1.0, 0.0]]), [result(loss)], 2.0 * step, 2.0 * step + 1, optimized=1.0, parts=PARTS, token_means={})
            pushed = {"seconds": loss, "wire_seconds": 0.4, "engine_seconds": 0.3, "stall": 0.1}
            for replica in ("rollout-0", "late"):  # the second push of the version is a late replica's
                record.push(PushResult(version=step + 1, replicas=[replica], bytes=100, digest="d", **pushed))


async def test_after_a_restart_evaluations_and_repeated_steps_stand_once(
    nats: EmbeddedNats, valkey: EmbeddedValkey, bus: Bus, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(tmp_path, run={"name": run_name}, rollout={"num_rollout": 7}, weights={"update_weights_interval": 9})
    await runs.create(bus, config, valkey.url)
    monkeypatch.setenv("NATS_URL", nats.url)
    monkeypatch.setenv("MYXO_RUN", run_name)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    buffer = asyncio.create_task(evaluated(bus, run_name))
    for resumed, steps, loss in ((0, range(5), 1.0), (2, range(2, 6), 2.0), (6, range(6, 7), 3.0)):
        await asyncio.to_thread(life, config, resumed, steps, loss)
    buffer.cancel()
    events = EventAccumulator(str(config.run.root / "tensorboard"))
    events.Reload()
    written = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert [tag for tag, found in written.items() if len({step for step, _ in found}) < len(found)] == []
    assert written["train/loss"] == [(step, 1.0 if step < 2 else 2.0 if step < 6 else 3.0) for step in range(7)]
    assert written["eval/heldout"] == [(0, 0.75)] and written["eval/late/late"] == [(7, 3.0)], "the last version has fewer steps"
    assert written["perf/update_weights_time"] == [(step, 1.0 if step < 6 else 2.0 if step < 7 else 3.0) for step in range(1, 8)]
