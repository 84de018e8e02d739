"""The span of a group's scoring. Pure."""

from shared.runtime.traces import Attributes, TraceSpan
from shared.schema.messages import Failed, Generated, Scored


def score_span(group: Generated, outcome: Scored | Failed, started: float, ended: float) -> TraceSpan:
    """Returns the span of scoring that ended with ``outcome``. Times are seconds since the epoch."""
    known: Attributes = {"group": group.group, "attempt": group.attempt, "environment": group.environment}
    error = ""
    if isinstance(outcome, Scored):
        known |= {"rewards": outcome.rewards, "unread": len(outcome.unread), "filtered": outcome.filtered}
    else:
        error = outcome.reason
    return TraceSpan(trace=group.group, name="score", started=started, ended=ended, error=error, attributes=known)
