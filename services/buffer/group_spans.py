"""The spans of groups and evaluations, from the records of the ledger: the root of each trace, and what a group waited for. Pure.

A group's trace has besides what the other services did with it: they derive its ids from its name (`shared.runtime.traces`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.runtime.traces import Attributes, TraceSpan, step_trace
from shared.schema import ledger
from shared.schema.ledger import LedgerRecord
from shared.view.group_history import GroupHistory, GroupRecord


@dataclass(slots=True)
class _OpenSpan:
    """A group in flight. ``version``: that admitted it; ``since``: when it came to where it is now, seconds since the epoch."""

    version: int
    since: float
    events: list[tuple[str, float]] = field(default_factory=list)


@dataclass
class GroupSpans:
    """Makes spans of the groups' history. It holds what is in flight."""

    _history: GroupHistory = field(default_factory=GroupHistory)
    _open: dict[str, _OpenSpan] = field(default_factory=dict)
    _evaluations: dict[tuple[str, int], float] = field(default_factory=dict)

    def apply(self, record: LedgerRecord) -> Iterator[TraceSpan]:
        """Yields the spans that a record ends; records come in the ledger's order."""
        for group in self._history.apply(0, record):
            yield from self._group(group, record)
        if isinstance(record, ledger.EvalStarted | ledger.EvalScored | ledger.EvalEnded):
            yield from self._evaluation(record)

    def _group(self, group: GroupRecord, record: LedgerRecord) -> Iterator[TraceSpan]:
        name, at = group.group, record.at
        if isinstance(record, ledger.GroupsAdmitted):
            self._open[name] = _OpenSpan(record.version, at)
        if (known := self._open.get(name)) is None or isinstance(record, ledger.SampleRefused):
            return
        match record:
            case ledger.GroupsScored():
                yield TraceSpan(trace=name, name="wait for a replica", started=known.since, ended=group.started)
            case ledger.GroupRequeued(reason=reason):
                known.events.append((f"requeued: {reason}", at))
            case ledger.BatchFormed(step=step) | ledger.BatchAmended(step=step):
                yield TraceSpan(trace=name, name="wait for a batch", started=known.since, ended=at, attributes={"step": step})
            case ledger.BatchTrained(step=step, version=version):
                yield TraceSpan(trace=name, name="wait for the trainer", started=known.since, ended=record.started)
                yield self._ended(group, record.ended, {"step": step, "trained_version": version}, links=(step_trace(step),))
            case ledger.GroupsDropped(reason=reason):
                yield self._ended(group, at, {"reason": reason})
            case ledger.GroupDead(reason=reason):
                yield self._ended(group, at, {}, error=reason)
        known.since = at

    def _ended(self, group: GroupRecord, at: float, attributes: Attributes, error: str = "", links: tuple[str, ...] = ()) -> TraceSpan:
        open_span = self._open.pop(group.group)
        known: Attributes = {"group": group.group, "end": group.status, "admitted_version": open_span.version}
        return TraceSpan(
            trace=group.group,
            name="group",
            started=group.admitted,
            ended=at,
            root=True,
            error=error,
            links=links,
            events=tuple(open_span.events),
            attributes={**known, "attempts": group.attempt + 1, "mean_reward": group.reward, **attributes},
        )

    def _evaluation(self, record: ledger.EvalStarted | ledger.EvalScored | ledger.EvalEnded) -> Iterator[TraceSpan]:
        key, known = (record.dataset, record.version), Attributes(dataset=record.dataset, version=record.version)
        trace = f"evaluation {record.dataset} {record.version}"
        if isinstance(record, ledger.EvalStarted):
            self._evaluations[key] = record.at
        elif isinstance(record, ledger.EvalEnded):
            started, figures = self._evaluations.pop(key, record.at), Attributes(prompts=record.prompts, mean_reward=record.mean_reward)
            yield TraceSpan(trace=trace, name="evaluation", started=started, ended=record.at, root=True, attributes={**known, **figures})
        else:
            started, mean = self._evaluations.get(key, record.at), sum(record.rewards) / len(record.rewards) if record.rewards else None
            attributes: Attributes = {"group": record.group, **known, "mean_reward": mean}
            error = record.reason if not record.rewards else ""
            yield TraceSpan(
                trace=record.group,
                name="held-out prompt",
                started=started,
                ended=record.at,
                root=True,
                error=error,
                links=(trace,),
                attributes=attributes,
            )
