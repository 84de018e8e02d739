"""A run whose records are written by a test, and no service."""

from typing import Any

from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.schema import sample
from shared.schema.digests import reference
from shared.schema.ledger import LedgerRecord
from shared.schema.messages import ScoredGroup
from shared.schema.sample import Sample


def scored_group(run: str, made: list[Sample], **fields: Any) -> tuple[ScoredGroup, dict[str, bytes]]:
    """The group of these samples as a ledger has it, and its blobs, which are not stored."""
    group = made[0].group
    blobs = {Subjects(run).payload_key(group, 0, part): blob for part, blob in enumerate(sample.encode(made, 1))}
    payload = reference(run, blobs, [entry.length for entry in made])
    return ScoredGroup(group=group, attempt=0, payload=payload, samples=[entry.meta() for entry in made], **fields), blobs


async def append(bus: Bus, run: str, *records: LedgerRecord) -> None:
    for record in records:
        await bus.publish(Subjects(run).ledger(record.event()), record)
