"""Trainer and engine share devices and use them by turns; on CPUs nothing needs the room, but the schedule is the same."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from shared.bus import streams
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.data.rollout_files import DIRECTORY
from shared.process.embedded_servers import EmbeddedNats
from shared.schema.ledger import BatchTrained, LedgerRecord
from tests.e2e.launched import LaunchedRun, gauge
from tests.support.rollout_reader import RolloutReader
from tests.support.tables import rare

RUN_SECONDS = 900
MARGIN = 0.05
"""Seconds between a line of the log and what it tells of."""

RISING = ("--level-groups", "2", "--passrate-threshold", "0")
"""Whatever is answered passes: the level rises with every two groups."""


@pytest.mark.timeout(2 * RUN_SECONDS + 300)
@pytest.mark.usefixtures("forked_engines")
@pytest.mark.parametrize(("steps", "killed_after"), [pytest.param(3, None, id="short"), rare(60, 3, id="a trainer's death")])
def test_engines_sleep_while_the_trainer_trains(
    steps: int, killed_after: int | None, small_run: Callable[..., Path], tmp_path: Path
) -> None:
    """Two ranks share a model that is offloaded while the engine generates. In the short run agents play sums whose difficulty rises, and
    their turns wait meanwhile; in the long one the trainer dies and comes back."""
    flags = [
        *("--colocate", "--offload-train", "--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"),
        *("--check-weight-update-equal", "--save-interval", "2"),
    ]
    config, root = small_run("colocate", steps=steps, staleness=1), tmp_path / "runs" / "colocate"
    if killed_after is None:
        flags += [*("--agent", "examples.agents.openai_calculator:run"), *RISING]
        text = config.read_text()
        config.write_text(
            text.replace(f'prompt_data = "{tmp_path}/train.jsonl"', 'data_source = "examples.curriculum.growing_sums:make"', 1)
        )
    with LaunchedRun(config, root, "colocate", flags) as run:
        if killed_after is not None:
            cards = run.until("the step", lambda cards: gauge(cards, "buffer", "trained_steps") >= killed_after, RUN_SECONDS)
            assert gauge(cards, "buffer", "trained_steps") < steps, "the run ended before its trainer was killed: make it longer"
            run.kill(run.child("services.trainer"))
        assert run.wait(RUN_SECONDS) == 0, run.said()
    summary = run.summary()
    assert summary["audit"] == "ok"
    assert summary["steps"] == steps
    difference = summary["mean_abs_logprob_diff"]
    assert isinstance(difference, float)
    assert difference < 1e-3
    if killed_after is None:
        drawn = {record.group: record.metadata["level"] for record in RolloutReader(root / DIRECTORY).records() if record.step is not None}
        assert drawn[min(drawn)] == 0 and max(drawn.values()) > 0, drawn
    naps = asleep(root / "logs" / "rollout-0.log")
    batches = asyncio.run(trained(root, "colocate"))
    assert len({batch.step for batch in batches}) == steps
    for batch in batches:
        assert any(begin - MARGIN < batch.started and batch.ended < end + MARGIN for begin, end in naps), f"{batch} is in none of {naps}"
    pushes = [line for line in lines(root / "logs" / "trainer-0.log") if line["event"] == "weights_pushed"]
    assert pushes
    assert all(push["bytes"] > 0 for push in pushes)
    assert any(line["event"] == "offloaded" and line["bytes"] > 0 for line in lines(root / "logs" / "trainer-0.log"))


@pytest.mark.extra
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_a_lent_engine_generates_while_two_ranks_wait(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """The run's own engine has room for one group at a time, so that others wait in the queue."""
    flags = [
        *("--lend-gpus", "--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2", "--rollout-num-gpus-per-engine", "2"),
        *("--check-weight-update-equal", "--rollout-concurrency", "4", "--rollout-max-response-len", "64"),
    ]
    config, root = small_run("lend", steps=4, staleness=1), tmp_path / "runs" / "lend"
    with LaunchedRun(config, root, "lend", flags) as run:
        summary = run.ended(4, RUN_SECONDS)
    assert isinstance(difference := summary["mean_abs_logprob_diff"], float) and difference < 1e-3
    assert any(line["event"] == "first_tokens" for line in lines(root / "logs" / "rollout-1.log")), run.said()
    naps, log = asleep(root / "logs" / "rollout-1.log"), lines(root / "logs" / "trainer-0.log")
    for batch in asyncio.run(trained(root, "lend")):
        assert any(begin - MARGIN < batch.started for begin, _ in naps), f"{batch} before all of {naps}"
    pushes = [line for line in log if line["event"] == "lent_weights_pushed"]
    assert len({push["version"] for push in pushes}) > 1 and all(push["bytes"] > 0 for push in pushes)
    returned = [line["seconds"] for line in log if line["event"] == "engines_offloaded"]
    assert max(returned) < 10, f"handing back took {returned}"


def lines(log: Path) -> list[dict[str, Any]]:
    """The JSON objects of a service's log. Ranks write into the same one, now and then into each other's lines: those are left out."""
    found = []
    for line in log.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            if line.startswith("{"):
                found.append(json.loads(line))
    return found


def asleep(log: Path) -> list[tuple[float, float]]:
    """From when to when the replica's engine was idle by its own word, and kept so; seconds since the epoch."""
    found: list[tuple[float, float]] = []
    since: float | None = None
    for line in lines(log):
        at = datetime.fromisoformat(line["timestamp"]).timestamp()
        if line["event"] == "asleep":
            since = at
        elif line["event"] == "awake" and since is not None:
            found.append((since, at))
            since = None
    return found


async def trained(root: Path, name: str) -> list[BatchTrained]:
    server = EmbeddedNats(root / "nats")
    server.start()
    try:
        bus = await Bus.connect(server.url, "test")
        records = streams.read(bus, Subjects(name).ledger_stream, LedgerRecord)
        found = [record async for _, record in records if isinstance(record, BatchTrained)]
        await bus.close()
    finally:
        server.stop()
    return found
