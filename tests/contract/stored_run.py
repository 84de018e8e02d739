"""What rollout and trainer leave behind of a finished run: the same for the real services (tests/e2e) and for their stand-ins."""

from itertools import pairwise
from pathlib import Path

from shared.bus import streams
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.process.embedded_servers import EmbeddedNats
from shared.schema.ledger import GroupsScored, LedgerRecord
from shared.schema.messages import Trained
from shared.schema.weight_messages import WeightsLive
from tests.support.rollout_reader import RolloutReader

SHOWN_METRICS = {"agreement_abs_diff", "agreement_tokens"}
"""Metrics of a step that the report of a run is made of."""


async def assert_like_any_run(root: Path, run: str, steps: int, interval: int = 1) -> None:
    """Asserts what services downstream and the command line rely on.

    Args:
        root: the directory of a run that has ended. steps: as many were trained. interval: steps between two weight versions.
    """
    server = EmbeddedNats(root / "nats")
    server.start()
    bus = await Bus.connect(server.url, "test")
    try:
        names = Subjects(run)
        trained = [event async for _, event in streams.read(bus, names.events_stream, Trained, names.event("trainer", "step"))]
        live = [event async for _, event in streams.read(bus, names.events_stream, WeightsLive, names.event("weights", "live"))]
        records = [record async for _, record in streams.read(bus, names.ledger_stream, LedgerRecord)]
    finally:
        await bus.close()
        server.stop()
    assert_steps(trained, steps, interval)
    assert [event.version for event in live] == sorted({event.version for event in live}), "a version went live twice, or an older one"
    assert live[0].version == 0
    assert live[-1].version >= (steps - 1) // interval
    assert_scores(records)
    assert_responses(root)


def assert_steps(trained: list[Trained], steps: int, interval: int) -> None:
    assert [event.step for event in trained] == list(range(steps))
    assert [event.version for event in trained] == [event.step // interval for event in trained]
    for event in trained:
        assert event.metrics.keys() >= SHOWN_METRICS
        assert event.metrics["agreement_tokens"] > 0
        assert event.started <= event.ended
    for before, after in pairwise(trained):
        assert before.started <= after.started


def assert_scores(records: list[LedgerRecord]) -> None:
    groups = [group for record in records if isinstance(record, GroupsScored) for group in record.groups]
    assert groups
    for group in groups:
        assert len(group.rewards) == len(group.samples)
        assert all(sample.tokens > 0 for sample in group.samples)


def assert_responses(root: Path) -> None:
    """The responses of training groups: spans that cover their tokens, in order, of versions that only grow."""
    kept = [record for record in RolloutReader(root / "rollouts").records() if record.dataset is None]
    assert kept
    for sample in (sample for record in kept for sample in record.samples):
        assert sample.segments[0][0] == 0
        assert sample.segments[-1][1] == sample.length > 0
        for (_, end, version), (begin, _, following) in pairwise(sample.segments):
            assert begin == end
            assert version < following
