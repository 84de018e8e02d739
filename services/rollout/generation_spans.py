"""The spans of a replica's work on tasks: one for each time that it had one. Pure."""

from shared.runtime.traces import Attributes, TraceSpan
from shared.schema.messages import Discarded, Failed, Generated, Interrupted, Outcome, Task

GENERATE = "generate"


def generation_span(task: Task, message: Generated | Outcome, replica: str, started: float, ended: float) -> TraceSpan | None:
    """Returns the span of work on a task that ended with ``message``; None where it has not ended. Times are seconds since the epoch."""
    error = ""
    known: Attributes = {}
    match message:
        case Generated(samples=samples, aborted=aborted):
            versions = [version for sample in samples for version in (sample.oldest, sample.newest) if sample.trained]
            known = {"samples": len(samples), "tokens": sum(sample.tokens for sample in samples), "aborted_rollouts": aborted}
            known |= {"oldest_version": min(versions, default=None), "newest_version": max(versions, default=None)}
        case Interrupted(stale=stale):
            known = {"stale": stale}
        case Discarded(reason=reason):
            known = {"reason": reason}
        case Failed(reason=reason):
            error = reason
        case _:
            return None
    return _span(task, replica, started, ended, error, {"outcome": type(message).__name__.lower(), **known})


def handed_back(task: Task, error: Exception, replica: str, started: float, ended: float) -> TraceSpan:
    """Returns the span of work on a task that goes back to the queue."""
    return _span(task, replica, started, ended, str(error), {"outcome": "handed back"})


def _span(task: Task, replica: str, started: float, ended: float, error: str, known: Attributes) -> TraceSpan:
    attributes: Attributes = {
        "group": task.group,
        "attempt": task.attempt,
        "replica": replica,
        "continued": task.partial is not None,
        **known,
    }
    return TraceSpan(trace=task.group, name=GENERATE, started=started, ended=ended, error=error, attributes=attributes)
