"""Decides what becomes of groups that cannot be trained as they are. Pure, as `services.buffer.policy`.

Refusals: after three by the trainer a group leaves its batch, and another takes its place. The counts are in the ledger, so neither the
trainer's deaths nor the buffer's begin them anew.

Lost payloads: a store acknowledges what it has not written to its disk yet. What it loses with its process is no group's fault, so the
group is generated anew from its prompt, unless it happens to the same one again and again: then something removes payloads, and the run has
to say so.
"""

from services.buffer import policy
from services.buffer.buffer_config import BufferConfig
from services.buffer.state import BatchRecord, BufferState, GroupState
from shared.runtime.errors import INFRASTRUCTURE, POLICY
from shared.schema import ledger
from shared.schema.ledger import PAYLOAD_LOST, LedgerRecord, group_number
from shared.schema.messages import BatchRefused, Outcome

MOST_LOST = 3  # Losses of one group after which it is not generated again, where somebody gives it up


def lost_ready(state: BufferState, name: str, now: float) -> list[LedgerRecord]:
    """Has a group generated anew that was scored, and is in no batch yet."""
    group = state.ready.get(name)
    return [policy.requeue(group, PAYLOAD_LOST, now)] if group else []


def lost_failed(state: BufferState, message: Outcome, now: float) -> list[LedgerRecord]:
    """Has a group generated anew that was given up before it was scored. None where it ends as any that failed."""
    group = policy.awaiting(state, message)
    if group is None or group.lost >= MOST_LOST:
        return []
    return [policy.requeue(group, PAYLOAD_LOST, now)]


MOST_REFUSALS = 3  # Refusals after which a group is dead: what a new reading of the payload repairs is over by then


def refused(state: BufferState, message: BatchRefused, now: float, lost: bool = False) -> list[LedgerRecord]:
    """Counts a refusal, and ends the group at the last one. A repeat, and a group that is not in the batch any more, give no record.

    Args:
        lost: whether the store holds the group's samples no more.
    """
    group = state.groups.get(message.group)
    if group is None or group.step != message.step or message.at in group.refused:
        return []
    name = {"step": message.step, "group": message.group, "sample": message.sample, "reason": message.reason}
    records: list[LedgerRecord] = [ledger.SampleRefused(**name, refused=message.at, at=now)]
    if lost and message.step >= state.trained_steps and group.lost < MOST_LOST:  # else its batch continues without it
        records.append(policy.requeue(group, PAYLOAD_LOST, now))
    elif len(group.refused) + 1 >= MOST_REFUSALS:
        reason = f"trainer: sample {message.group}/{message.sample}: {message.reason}"
        records.append(ledger.GroupDead(group=message.group, reason=reason, fault=INFRASTRUCTURE if lost else POLICY, at=now))
    return records


def amended(state: BufferState, limits: BufferConfig, step: int, now: float) -> list[LedgerRecord]:
    """Replaces the groups that the batch of ``step`` has lost, once as many others are ready that it may train.

    Two kinds of steps continue with the groups that are left, if any are: one that is trained again after a death, since what comes
    now is newer than its weights, and one with a critic, which has given its values to the batch as it was.
    """
    batch = state.batches.get(step)
    if batch is None or not batch.lost:
        return []
    goes_on = limits.has_critic or step < state.trained_steps
    added = [] if goes_on else _fitting(state, limits, batch)[: len(batch.lost)]
    if not goes_on and len(added) < len(batch.lost):
        return []
    names = sorted((group.id for group in added), key=group_number)
    return [ledger.BatchAmended(step=step, removed=batch.lost, added=names, at=now)]


def _fitting(state: BufferState, limits: BufferConfig, batch: BatchRecord) -> list[GroupState]:
    fitting = policy.by_decision(state, limits, batch.version - limits.rollout.max_staleness)["fits"]
    return [group for group in fitting if group.scored is not None and max(group.scored.newest, default=0) <= batch.version]
