"""Decides which results a ledger record brings for a source of prompts that adapts. Pure.

Every group that ends gives one, when its end is known. A group of a step that is trained again after the trainer's death was told as
trained already; what becomes of it then is not told a second time.
"""

from collections.abc import Iterable

from services.buffer.state import BufferState, GroupState
from shared.data.group_results import GroupResult, ResultLog
from shared.data.rollout_files import DEAD, DROPPED, TRAINED
from shared.schema.ledger import BatchAmended, BatchTrained, GroupDead, GroupsAdmitted, GroupsDropped, LedgerRecord


def follow(log: ResultLog, state: BufferState, record: LedgerRecord) -> None:
    """Puts what a record says into the log. ``state``: before the record is applied."""
    if isinstance(record, GroupsAdmitted):
        log.admit(record.first)
    else:
        log.add(results(state, record))


def results(state: BufferState, record: LedgerRecord) -> list[GroupResult]:
    """Returns the results of the groups that a record ends, in the record's order. ``state``: before the record is applied."""
    match record:
        case BatchTrained(step=step):
            return _results(state.batches[step].groups, TRAINED)
        case BatchAmended(step=step, added=names) if step < state.trained_steps:
            return _results([state.groups[name] for name in names], TRAINED)
        case GroupsDropped(groups=names, reason=reason):
            return _results([state.groups[name] for name in names], DROPPED, reason)
        case GroupDead(group=name, reason=reason) if not _was_trained(state, name):
            return _results([state.groups[name]], DEAD, reason)
        case _:
            return []


def _was_trained(state: BufferState, name: str) -> bool:
    step = state.groups[name].step
    return step is not None and step < state.trained_steps


def _results(groups: Iterable[GroupState], fate: str, reason: str = "") -> list[GroupResult]:
    return [GroupResult(group.number, fate, tuple(group.scored.rewards) if group.scored else (), reason) for group in groups]
