"""The samples of a group: whole ones from the store while it has them, else what the run's directory keeps."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from redis.exceptions import RedisError

from services.console.run_index.run_index import RunIndex
from services.console.run_source import RunSource
from shared.history.group_history import GroupRecord
from shared.runtime.errors import MyxoError
from shared.schema import sample as sample_codec
from shared.schema.sample import Sample

STORE_SECONDS = 8.0
"""The deadline for reading a group from the store."""


@dataclass(frozen=True)
class FoundSamples:
    """The samples that were found of a group, and where. absent: why there are none. stale: positions of those too old to train."""

    samples: Sequence[Sample]
    source: Literal["store", "kept", "none"]
    absent: str = ""
    stale: tuple[int, ...] = ()


async def find_samples(source: RunSource, index: RunIndex, group: GroupRecord) -> FoundSamples:
    """Returns the samples of a group; never raises for a store that is away or has freed them."""
    absent = index.groups.history.gone(group) if source.live else "only the run's directory is left, which keeps none of this group"
    if absent is None:
        found = await _stored(source, group)
        if not isinstance(found, str):
            return FoundSamples(found, "store")
        absent = found
    record = await index.kept_record(group)
    if record is None or not record.samples:
        return FoundSamples((), "none", absent)
    stale = tuple(position for position, sample in enumerate(record.samples) if sample.stale)
    return FoundSamples(record.decoded(), "kept", stale=stale)


async def _stored(source: RunSource, group: GroupRecord) -> list[Sample] | str:
    """Returns the samples that the store has, or why there are none."""
    if group.payload is None or not group.payload.keys:
        return "the ledger names no payload"
    try:
        blobs = await source.store().read(group.payload, deadline=STORE_SECONDS)
        found = await asyncio.to_thread(sample_codec.decode, blobs)
    except (MyxoError, RedisError) as error:  # away, or freed since the ledger was read, or lost, or overwritten
        return str(error) or type(error).__name__
    there = [entry.index for entry in found]
    if len(there) != len(group.rewards):
        return f"the store holds {len(there)} samples where the ledger names {len(group.rewards)}"
    return found
