"""Which groups a ledger record ends, and which of those keep their responses. Pure.

A group's responses are worth keeping once it is known what became of it: at `BatchTrained`, while the store still has the payload, which
is freed behind a checkpoint, and at the records that drop a group, give it up, or score a held-out prompt, which free it at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from services.buffer.state import BatchRecord, BufferState, GroupState
from shared.data import rollout_files
from shared.schema.ledger import BatchTrained, EvalScored, GroupDead, GroupsDropped, LedgerRecord


@dataclass(frozen=True, slots=True)
class EndedGroup:
    """A group that has ended; fields as in `shared.data.rollout_files.RolloutRecord`.

    keys: of its payload, ``size`` bytes in all; none where no samples are to be kept. rewards, parts: of each sample. removed, stale:
    positions of samples that left the loss.
    """

    group: str
    attempt: int
    status: str
    at: float
    reason: str = ""
    dataset: str | None = None
    step: int | None = None
    version: int | None = None
    mask_below: int = 0
    keys: tuple[str, ...] = ()
    size: int = 0
    rewards: tuple[float, ...] = ()
    parts: tuple[dict[str, float], ...] = ()
    removed: tuple[int, ...] = ()
    stale: tuple[int, ...] = ()


def ended(state: BufferState, record: LedgerRecord) -> list[EndedGroup]:
    """The groups that a record ends. ``state`` is that before the record, which makes it forget them."""
    match record:
        case BatchTrained(step=step, at=at):
            return _trained(state.batches[step], at)
        case GroupsDropped(groups=names, reason=reason, at=at):
            return [_ended(state.groups[name], rollout_files.DROPPED, at, reason=reason) for name in names]
        case GroupDead(group=name, reason=reason, at=at):
            return [EndedGroup(name, state.groups[name].attempt, rollout_files.DEAD, at, reason=reason)]
        case EvalScored():
            return [_evaluated(record)]
        case _:
            return []


def trained_not_durable(state: BufferState, now: float) -> list[EndedGroup]:
    """The groups of trained steps whose payload the store still has: a killed buffer may not have come to keep them."""
    batches = (batch for step, batch in state.batches.items() if step < state.trained_steps)
    return [group for batch in batches for group in _trained(batch, now)]


def chosen(groups: Iterable[EndedGroup], share: float) -> list[EndedGroup]:
    """The groups to keep: of training groups a ``share`` from 0 to 1, the same ones in every process, of held-out prompts all.

    A share of 0 keeps nothing at all.
    """
    if share <= 0:
        return []
    return [one for one in groups if share >= 1 or one.dataset is not None or _place(one.group) < share]


def _place(group: str) -> float:
    """Where a group's id falls between 0 and 1, spread evenly over ids."""
    return float(xxhash.xxh3_64_intdigest(group.encode()) / 2**64)


def _trained(batch: BatchRecord, at: float) -> list[EndedGroup]:
    return [
        _ended(group, rollout_files.TRAINED, at, step=batch.step, version=batch.version, mask_below=batch.mask_below)
        for group in batch.groups
    ]


def _ended(
    group: GroupState, status: str, at: float, *, reason: str = "", step: int | None = None, version: int | None = None, mask_below: int = 0
) -> EndedGroup:
    result = group.scored
    if result is None:  # dropped before it came back
        return EndedGroup(group.id, group.attempt, status, at, reason)
    return EndedGroup(
        group=group.id,
        attempt=result.attempt,
        status=status,
        at=at,
        reason=reason,
        step=step,
        version=version,
        mask_below=mask_below,
        keys=result.keys,
        size=result.size,
        rewards=tuple(result.rewards),
        parts=result.parts,
        removed=result.removed,
        stale=result.stale(mask_below),
    )


def _evaluated(record: EvalScored) -> EndedGroup:
    if not record.rewards or record.payload is None:
        status, reason = rollout_files.FAILED, record.reason
        return EndedGroup(record.group, 0, status, record.at, reason, dataset=record.dataset, version=record.version)
    return EndedGroup(
        group=record.group,
        attempt=0,
        status=rollout_files.EVALUATED,
        at=record.at,
        dataset=record.dataset,
        version=record.version,
        keys=tuple(record.payload.keys),
        size=record.payload.bytes,
        rewards=tuple(record.rewards),
        parts=record.parts,
    )
