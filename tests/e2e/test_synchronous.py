"""max_staleness = 0: a synchronous run, the same first batch each time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from shared import replay
from shared.bus import Bus
from shared.embedded import EmbeddedNats
from shared.ledger import BatchFormed, GroupsScored, LedgerRecord
from shared.subjects import Subjects
from tests.e2e.launched import LaunchedRun

RUN_SECONDS = 900


@pytest.mark.timeout(2 * RUN_SECONDS + 300)
def test_without_staleness_a_run_is_synchronous_and_repeatable(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """Same seed, same config: the first batch has the same groups, and greedy sampling makes the same samples and rewards of them.

    (An engine on a CPU has no per-request seed, so sampled tokens may differ from run to run; which prompts they answer may not.)
    """
    first_batches = []
    for name in ("sync-a", "sync-b"):
        config = small_run(name, steps=2, staleness=0, temperature=0.0)
        root = tmp_path / "runs" / name
        with LaunchedRun(config, root, name) as run:
            assert run.wait(RUN_SECONDS) == 0, run.said()
            summary = run.summary()
        assert summary["audit"] == "ok"
        assert summary["max_staleness_seen"] == 0
        assert summary["steps"] == 2
        first_batches.append(asyncio.run(first_batch(root, name)))
    assert first_batches[0] == first_batches[1]


async def first_batch(root: Path, name: str) -> list[tuple[str, list[float], list[int]]]:
    """(group, rewards, response lengths) of the groups of step 0, from the finished run's ledger."""
    server = EmbeddedNats(root / "nats")
    server.start()
    try:
        bus = await Bus.connect(server.url, "test")
        scored, chosen = {}, None
        async for _, record in replay.read(bus, Subjects(name).ledger_stream, LedgerRecord):
            if isinstance(record, GroupsScored):
                scored |= {group.group: group for group in record.groups}
            if isinstance(record, BatchFormed) and record.step == 0:
                chosen = record.groups
        await bus.close()
    finally:
        server.stop()
    assert chosen is not None
    return [(name, scored[name].rewards, [sample.tokens for sample in scored[name].samples]) for name in chosen]
