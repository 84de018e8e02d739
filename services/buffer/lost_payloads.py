"""Decides what becomes of groups whose samples the store has lost: they are generated anew from their prompt. Pure.

A store acknowledges what it has not written to its disk yet. What it loses with its process is no group's fault, so none dies of it,
unless it happens to the same one again and again: then something removes payloads, and the run has to say so.
"""

from services.buffer import policy
from services.buffer.state import BufferState, GroupState
from shared.runtime.errors import INFRASTRUCTURE
from shared.schema.ledger import PAYLOAD_LOST, LedgerRecord
from shared.schema.messages import Failed, Outcome

MOST_LOST = 3
"""Losses of one group after which it is not generated again, where somebody gives it up."""


def of_ready(state: BufferState, name: str, now: float) -> list[LedgerRecord]:
    """Has a group generated anew that was scored, and is in no batch yet."""
    group = state.ready.get(name)
    return [policy.requeue(group, PAYLOAD_LOST, now)] if group else []


def of_batched(state: BufferState, group: GroupState, now: float) -> list[LedgerRecord]:
    """Has a group generated anew that the trainer was handed; none where its step was trained before: its batch goes on without it."""
    if group.step is None or group.step < state.trained_steps or group.lost >= MOST_LOST:
        return []
    return [policy.requeue(group, PAYLOAD_LOST, now)]


def of_failed(state: BufferState, message: Outcome, now: float) -> list[LedgerRecord]:
    """Has a group generated anew that was given up before it was scored. None where it ends as any that failed."""
    group = state.groups.get(message.group)
    if group is None or group.scored is not None or group.attempt != message.attempt or group.lost >= MOST_LOST:
        return []
    return [policy.requeue(group, PAYLOAD_LOST, now)]


def suspected(message: Outcome) -> list[str]:
    """Returns the payload keys of a group that was given up perhaps because the store has lost them."""
    if not isinstance(message, Failed) or message.fault != INFRASTRUCTURE or message.payload is None:
        return []
    return message.payload.keys
