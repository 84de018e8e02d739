"""The spans of groups and evaluations, from the records of the ledger: the root of each trace, and what a group waited for. Pure.

A group's trace has besides what the other services did with it: they derive its ids from its name (`shared.runtime.traces`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shared.runtime.traces import Attributes, TraceSpan, step_trace
from shared.schema import ledger
from shared.schema.ledger import LedgerRecord, group_id
from shared.schema.messages import ScoredGroup

TRAINED, DROPPED, DEAD = "trained", "dropped", "dead"


@dataclass(slots=True)
class _OpenGroup:
    """A group in flight. ``since``: when it came to where it is now. Times are seconds since the epoch."""

    admitted: float
    version: int
    since: float
    attempt: int = 0
    mean_reward: float | None = None
    events: list[tuple[str, float]] = field(default_factory=list)


@dataclass
class GroupSpans:
    """The fold of the ledger into spans. It holds what is in flight."""

    _open: dict[str, _OpenGroup] = field(default_factory=dict)
    _batches: dict[int, list[str]] = field(default_factory=dict)
    _evaluations: dict[tuple[str, int], float] = field(default_factory=dict)

    def apply(self, record: LedgerRecord) -> Iterator[TraceSpan]:
        """Yields the spans that a record ends; records come in the ledger's order."""
        match record:
            case ledger.GroupsAdmitted(first=first, count=count, version=version, at=at):
                self._open |= {group_id(number): _OpenGroup(at, version, at) for number in range(first, first + count)}
            case ledger.GroupsScored(groups=groups):
                for group in groups:
                    yield from self._scored(group, record.at)
            case ledger.GroupRequeued():
                self._requeued(record)
            case ledger.BatchFormed(step=step, groups=names):
                yield from self._batched(step, names, record.at)
            case ledger.BatchAmended(step=step, removed=removed, added=names):
                self._batches[step] = [name for name in self._batches.get(step, []) if name not in removed]
                yield from self._batched(step, names, record.at)
            case ledger.BatchTrained():
                yield from self._trained(record)
            case ledger.GroupsDropped(groups=names, reason=reason):
                for name in names:
                    yield from self._ended(name, record.at, DROPPED, {"reason": reason})
            case ledger.GroupDead(group=name, reason=reason):
                yield from self._ended(name, record.at, DEAD, error=reason)
            case ledger.EvalStarted() | ledger.EvalScored() | ledger.EvalEnded():
                yield from self._evaluation(record)

    def _scored(self, scored: ScoredGroup, at: float) -> Iterator[TraceSpan]:
        if (group := self._open.get(scored.group)) is not None:
            yield TraceSpan(trace=scored.group, name="wait for a replica", started=group.since, ended=scored.started)
            group.since, group.attempt = at, scored.attempt
            group.mean_reward = sum(scored.rewards) / len(scored.rewards) if scored.rewards else None

    def _requeued(self, record: ledger.GroupRequeued) -> None:
        if (group := self._open.get(record.group)) is not None:
            group.since, group.attempt, group.mean_reward = record.at, record.attempt, None
            group.events.append((f"requeued: {record.reason}", record.at))

    def _batched(self, step: int, names: Sequence[str], at: float) -> Iterator[TraceSpan]:
        self._batches.setdefault(step, []).extend(names)
        for name in names:
            if (group := self._open.get(name)) is not None:
                yield TraceSpan(trace=name, name="wait for a batch", started=group.since, ended=at, attributes={"step": step})
                group.since = at

    def _trained(self, record: ledger.BatchTrained) -> Iterator[TraceSpan]:
        for name in self._batches.pop(record.step, []):
            if (group := self._open.get(name)) is not None:
                yield TraceSpan(trace=name, name="wait for the trainer", started=group.since, ended=record.started)
            attributes: Attributes = {"step": record.step, "trained_version": record.version}
            yield from self._ended(name, record.ended, TRAINED, attributes, links=(step_trace(record.step),))

    def _ended(
        self, name: str, at: float, end: str, attributes: Attributes | None = None, error: str = "", links: tuple[str, ...] = ()
    ) -> Iterator[TraceSpan]:
        if (group := self._open.pop(name, None)) is None:
            return  # it has been trained, and the trainer has lost that
        known: Attributes = {"group": name, "end": end, "admitted_version": group.version, "attempts": group.attempt + 1}
        yield TraceSpan(
            trace=name,
            name="group",
            started=group.admitted,
            ended=at,
            root=True,
            error=error,
            links=links,
            events=tuple(group.events),
            attributes={**known, "mean_reward": group.mean_reward, **(attributes or {})},
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
