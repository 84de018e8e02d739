"""Says why the next batch is not complete: what the groups under way wait for, and what became of those that have ended since. Pure."""

from collections import Counter

from services.buffer.buffer_config import BufferConfig
from services.buffer.state import BufferState
from shared.runtime import failure_summary
from shared.schema.ledger import BatchFormed, GroupDead, GroupsDropped, LedgerRecord


class EndsSinceBatch:
    """Counts the groups that ended without being trained since a batch was last formed."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()
        self._dead, self._reason = 0, ""

    def see(self, record: LedgerRecord) -> None:
        """Takes a record; they come in the ledger's order."""
        match record:
            case BatchFormed():
                self._dropped.clear()
                self._dead, self._reason = 0, ""
            case GroupsDropped(groups=groups, reason=reason):
                self._dropped[reason] += len(groups)
            case GroupDead(reason=reason):
                self._dead, self._reason = self._dead + 1, reason

    def words(self) -> str:
        """Returns what became of them; empty where there are none."""
        parts = [f"{count} dropped ({reason})" for reason, count in self._dropped.most_common(2)]
        parts += [f"{self._dead} died, the last for: {failure_summary.short(self._reason)}"] if self._dead else []
        return f"of the groups since the last batch {' and '.join(parts)}" if parts else ""


def awaited(state: BufferState, limits: BufferConfig, held_back: str, ends: str, source: str = "") -> str:
    """Returns, in words, the reason why the next batch waits.

    Args:
        held_back: why the buffer holds back. ends: as `EndsSinceBatch.words` returns it. source: what gives prompts too slowly.
    """
    if held_back:
        return held_back
    if state.live_version < 0:
        return "a rollout replica that serves weights (none does yet)"
    if source:
        return source
    if state.evaluations:
        evaluation = next(iter(state.evaluations.values()))
        where = f"{evaluation.dataset} under version {evaluation.version}"
        return f"the evaluation of {where} ({len(evaluation.pending)} of {evaluation.prompts} prompts outstanding)"
    if not state.outstanding:
        return "; ".join(filter(None, [_held_by_bound(state, limits), ends]))
    away = f"{len(state.outstanding)} groups with the rollout and reward services"
    return "; ".join(filter(None, [f"{away}; live version {state.live_version}", f"{state.dead} dead so far", ends]))


def _held_by_bound(state: BufferState, limits: BufferConfig) -> str:
    """Returns why no group is under way."""
    if state.formed_steps >= limits.rollout.num_rollout:
        return "no group any more: every batch is formed"
    bound = limits.rollout.max_staleness
    return (
        f"newer weights than version {state.live_version}: the staleness bound (rollout.max_staleness = {bound}) admits no further group "
        "before they are live"
    )
