"""Decides which groups a ledger record ends, and which of those keep their responses. Pure.

A group's responses are kept when its end is known: at `BatchTrained`, while the store still has the payload, which is freed after a
checkpoint, and at the records that drop a group, give it up, or score a held-out prompt, which free it at once. What was generated and
could not be scored is kept without rewards.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from services.buffer.state import BatchRecord, BufferState, GroupState
from shared.data.rollout_files import DEAD, DROPPED, EVALUATED, FAILED, TRAINED, RolloutRecord
from shared.schema.ledger import BatchTrained, EvalScored, GroupDead, GroupsDropped, LedgerRecord
from shared.schema.messages import Payload


@dataclass(frozen=True, slots=True)
class EndedGroup:
    """A group that has ended: its record without prompt and samples, and the ledger's data of its samples.

    payload: None where no samples are to be kept. rewards, parts: of each sample; no rewards of a group that was given up. removed,
    stale: positions of samples that left the loss. again: whether another buffer may have kept it.
    """

    record: RolloutRecord
    payload: Payload | None = None
    rewards: tuple[float, ...] = ()
    parts: tuple[dict[str, float], ...] = ()
    removed: tuple[int, ...] = ()
    stale: tuple[int, ...] = ()
    again: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Returns the keys of its payload."""
        return () if self.payload is None else tuple(self.payload.keys)

    @property
    def size(self) -> int:
        """Returns the bytes of its payload."""
        return 0 if self.payload is None else self.payload.bytes


def ended(state: BufferState, record: LedgerRecord) -> list[EndedGroup]:
    """Returns the groups that a record ends. ``state``: before the record is applied, which removes them."""
    match record:
        case BatchTrained(step=step, at=at):
            return _trained(state.batches[step], at)
        case GroupsDropped(groups=names, reason=reason, at=at):
            return [_ended(state.groups[name], status=DROPPED, at=at, reason=reason) for name in names]
        case GroupDead(group=name, reason=reason, payload=payload, at=at):
            attempt = state.groups[name].attempt
            return [EndedGroup(RolloutRecord.model_construct(group=name, attempt=attempt, status=DEAD, at=at, reason=reason), payload)]
        case EvalScored():
            return [_evaluated(record)]
        case _:
            return []


def trained_not_durable(state: BufferState, now: float) -> list[EndedGroup]:
    """Returns the groups of trained steps whose payload the store still has: a killed buffer may not have kept them yet."""
    batches = (batch for step, batch in state.batches.items() if step < state.trained_steps)
    return [group for batch in batches for group in _trained(batch, now, again=True)]


def perhaps_not_kept(state: BufferState, recent: Iterable[Iterable[EndedGroup]], now: float) -> list[EndedGroup]:
    """Returns what a buffer that takes over is to keep, unless its predecessor did: `trained_not_durable`, and ``recent`` ends."""
    groups = [*(group for groups in recent for group in groups), *trained_not_durable(state, now)]
    return list({(group.record.group, group.record.attempt): replace(group, again=True) for group in groups}.values())


def chosen(groups: Iterable[EndedGroup], share: float) -> list[EndedGroup]:
    """Returns the groups to keep: all held-out prompts, and a ``share`` (0 to 1) of the others, the same ones in every process.

    A share of 0 keeps nothing at all.
    """
    if share <= 0:
        return []
    return [group for group in groups if share >= 1 or group.record.dataset is not None or _fraction(group.record.group) < share]


def _fraction(group: str) -> float:
    """Returns where a group's id falls between 0 and 1, spread evenly over ids."""
    return float(xxhash.xxh3_64_intdigest(group.encode()) / 2**64)


def _trained(batch: BatchRecord, at: float, *, again: bool = False) -> list[EndedGroup]:
    facts = {"status": TRAINED, "at": at, "step": batch.step, "version": batch.version, "mask_below": batch.mask_below}
    return [_ended(group, again=again, **facts) for group in batch.groups]


def _ended(group: GroupState, *, again: bool = False, **facts: Any) -> EndedGroup:
    record = RolloutRecord.model_construct(group=group.id, attempt=group.attempt, **facts)
    result = group.scored
    if result is None:  # dropped before it came back
        return EndedGroup(record)
    stale = result.stale(record.mask_below)
    return EndedGroup(record, result.payload, tuple(result.rewards), result.parts, result.removed, stale, again)


def _evaluated(scored: EvalScored) -> EndedGroup:
    payload = scored.payload
    facts: dict[str, Any] = {"dataset": scored.dataset, "version": scored.version, "reason": scored.reason, "at": scored.at}
    status = EVALUATED if scored.rewards and payload is not None else FAILED
    record = RolloutRecord.model_construct(group=scored.group, attempt=0, status=status, **facts)
    if payload is None:
        return EndedGroup(record)
    return EndedGroup(record, payload, tuple(scored.rewards), scored.parts)
