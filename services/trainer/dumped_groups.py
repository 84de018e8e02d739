"""The groups of a dumped batch, and the batch that is made of them, or of a part of them, to be trained again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shared.runtime.errors import BadMessage
from shared.schema import sample as sample_codec
from shared.schema.digests import reference
from shared.schema.messages import Batch, BatchGroup
from shared.schema.sample import Sample

BLOB_BYTES = 1 << 20


@dataclass(frozen=True)
class DumpedGroup:
    """A group as a dump has it. ``rewards``: of its samples. ``removed``, ``stale``, ``parts``: as in `BatchGroup`."""

    name: str
    samples: Sequence[Sample]
    rewards: Sequence[float]
    removed: Sequence[int] = ()
    stale: Sequence[int] = ()
    parts: Sequence[dict[str, float]] = ()

    def part(self, kept: Sequence[int]) -> "DumpedGroup":
        """Returns the group with the samples at some positions only, ascending; they are renumbered."""
        return DumpedGroup(
            self.name,
            [replace(self.samples[position], index=index) for index, position in enumerate(kept)],
            [self.rewards[position] for position in kept],
            [index for index, position in enumerate(kept) if position in self.removed],
            [index for index, position in enumerate(kept) if position in self.stale],
            [self.parts[position] for position in kept] if self.parts else (),
        )


def subsampled(groups: Sequence[DumpedGroup], share: float) -> list[DumpedGroup]:
    """Returns the first and the last samples of a batch, half of ``share`` each, as slime takes them; groups without any are left out.

    Raises BadMessage where that is no sample at all.
    """
    count = sum(len(group.samples) for group in groups)
    wanted = int(count * share)
    if not wanted:
        raise BadMessage(f"load_debug_rollout_data_subsample = {share:g} leaves none of its {count} samples")
    first, last = wanted // 2, count + (-wanted // 2)  # of an odd number the last half has one more
    found, begin = [], 0
    for group in groups:
        kept = [position for position in range(len(group.samples)) if not first <= begin + position < last]
        found += [group.part(kept)] if kept else []
        begin += len(group.samples)
    return found


def batch_of(step: int, version: int, groups: Sequence[DumpedGroup], mask_below: int = 0) -> tuple[Batch, dict[str, bytes]]:
    """Returns a batch of these groups, and the blobs that its references name."""
    blobs: dict[str, bytes] = {}
    references = []
    for group in groups:
        own = {f"{group.name}.{part}": blob for part, blob in enumerate(sample_codec.encode(group.samples, BLOB_BYTES))}
        references.append(
            BatchGroup(
                group=group.name,
                payload=reference("", own, [sample.length for sample in group.samples]),
                rewards=list(group.rewards),
                removed=tuple(group.removed),
                stale=tuple(group.stale),
                parts=tuple(group.parts) if any(group.parts) else (),
            )
        )
        blobs |= own
    return Batch(step=step, version=version, mask_below=mask_below, groups=references), blobs


def groups_of_blobs(batch: Batch, blobs: dict[str, bytes]) -> Iterator[DumpedGroup]:
    """Yields the groups of a batch whose payloads are there. Raises BadMessage."""
    for group in batch.groups:
        samples = sample_codec.decode(blobs[key] for key in group.payload.keys)
        yield DumpedGroup(group.group, samples, group.rewards, group.removed, group.stale, group.parts)
