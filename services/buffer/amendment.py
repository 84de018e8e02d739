"""Decides what becomes of a batch that the trainer cannot train: after three refusals a group leaves it, and another takes its place.

A group whose samples the store has lost leaves it at the first one, and is generated anew (`services.buffer.lost_payloads`). The counts are
in the ledger, so neither the trainer's deaths nor the buffer's own begin them anew. Pure, as `services.buffer.policy`.
"""

from services.buffer import lost_payloads, policy
from services.buffer.buffer_config import BufferConfig
from services.buffer.state import BatchRecord, BufferState, GroupState
from shared.runtime.errors import INFRASTRUCTURE, POLICY
from shared.schema import ledger
from shared.schema.ledger import LedgerRecord, group_number
from shared.schema.messages import BatchRefused

MOST_REFUSALS = 3
"""Refusals after which a group is dead: what a new reading of the payload repairs is over by then."""


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
    if anew := lost_payloads.of_batched(state, group, now) if lost else []:
        records += anew
    elif len(group.refused) + 1 >= MOST_REFUSALS:
        reason = f"trainer: sample {message.group}/{message.sample}: {message.reason}"
        records.append(ledger.GroupDead(group=message.group, reason=reason, fault=INFRASTRUCTURE if lost else POLICY, at=now))
    return records


def amended(state: BufferState, limits: BufferConfig, step: int, now: float) -> list[LedgerRecord]:
    """Replaces the groups that the batch of ``step`` has lost, once as many others are ready that it may train.

    Two kinds of steps go on with the groups that are left, if any are: one that is trained again after a death, since what comes
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
    """Returns the ready groups within the bound that the batch was formed with, in the order they came back."""
    fitting = policy.by_decision(state, limits, batch.version - limits.rollout.max_staleness)["fits"]
    return [group for group in fitting if group.scored is not None and max(group.scored.newest) <= batch.version]
