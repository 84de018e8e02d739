"""How the steps of a run came about within a window: what the trainer waited for, for whom, and how busy replicas were. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from shared.history.activity import ActivitySpan, laid_over
from shared.history.flow_history import FlowHistory, StepRecord
from shared.history.intervals import Interval, union
from shared.history.wait_causes import ADMISSION, GENERATION, PUSHING, QUEUE, GroupPassage, wait_causes
from shared.live.bottleneck import MOST_OF_WAIT, SLOW, Workload

GENERATING = "generating"
"""What a replica does while it is busy."""

OF_ROLLOUT = {ADMISSION, QUEUE, GENERATION}
"""Causes of a wait for the rollout services."""


def causes_of(history: FlowHistory, step: StepRecord) -> list[tuple[str, Interval]]:
    """Returns the parts of the wait before a step, each with its cause; none where that wait is not known."""
    if step.wait_from is None or step.wait_from >= step.started:
        return []
    told = history.metrics.get(step.step, {})
    saving, stall = (told.get(f"perf/train_{what}_time", 0.0) for what in ("save", "push"))
    wait = (step.wait_from, step.started)
    return wait_causes(wait, step.last, saving, stall, history.back_at(wait))


def workload(history: FlowHistory, window: Interval, blocked: str = "") -> Workload:
    """Returns how the steps that ended within a window came about."""
    steps = [step for step in history.steps_in(window) if step.wait_from is not None]
    parts = [(step, cause, end - begin) for step in steps for cause, (begin, end) in causes_of(history, step)]
    for_rollout = [(step.last, spent) for step, cause, spent in parts if step.last is not None and cause in OF_ROLLOUT]
    since = min((step.wait_from or 0.0 for step in steps), default=window[0])
    return Workload(
        steps=len(steps),
        waits=_waits(history, window, steps, [(cause, spent) for _, cause, spent in parts]),
        awaited=(awaited := _most(sums((last.replica, spent) for last, spent in for_rollout))),
        replicas=_busy(history, (since, window[1])),
        queued=_queued(last for last, _ in for_rollout),
        slow=_slow(history, (since, window[1]), awaited),
        lost_tokens=_lost(history),
        blocked=blocked,
    )


def _waits(history: FlowHistory, window: Interval, steps: Sequence[StepRecord], parts: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Returns the causes' shares of the time of these steps. A push that a step itself stood still for counts as a wait."""
    stalls = [(PUSHING, push.stall) for push in history.pushes if window[0] <= push.at <= window[1] and push.stall > 0]
    total = sum(step.ended - (step.wait_from or 0.0) for step in steps)
    return {cause: min(1.0, spent / total) for cause, spent in sums([*parts, *stalls]).items()} if total > 0 else {}


def _queued(awaited: Iterable[GroupPassage]) -> float:
    """Returns the part of the way of these groups, as far as it is known from their admission on, before a replica took them."""
    ways = [(max(0.0, last.started - last.admitted), max(0.0, last.generated - last.admitted)) for last in awaited if last.admitted]
    whole = sum(way for _, way in ways)
    return sum(min(queue, way) for queue, way in ways) / whole if whole else 0.0


def sums(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Returns the sum of each name, the largest first."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, value in parts:
        found[name] += value
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _most(waits: Mapping[str, float]) -> list[str]:
    """Returns the names that make up most of a wait, of a sum by name with the largest first."""
    found, spent, whole = [], 0.0, sum(waits.values())
    for name, wait in waits.items():
        if spent >= MOST_OF_WAIT * whole:
            break
        found.append(name)
        spent += wait
    return found


def _slow(history: FlowHistory, window: Interval, awaited: Collection[str]) -> dict[str, float]:
    """Returns the awaited replicas that take much longer for a group than the others do, and how many times as long."""
    spent = {
        replica: statistics.median(lengths)
        for replica, spans in history.generated.items()
        if (lengths := [end - begin for begin, end in spans if window[0] <= end <= window[1]])
    }
    others = [seconds for replica, seconds in spent.items() if replica not in awaited]
    usual = statistics.median(others) if others else 0.0
    return {name: spent[name] / usual for name in awaited if usual > 0 and spent.get(name, 0.0) >= SLOW * usual}


def _busy(history: FlowHistory, window: Interval) -> dict[str, float]:
    """Returns the share of a window in which each replica generated, of those that did."""
    length = max(window[1] - window[0], 1e-9)
    found = {}
    for replica in history.generated:
        spans = laid_over([generating(history, replica)], window)
        found[replica] = sum(span.end - span.begin for span in spans) / length
    return {replica: share for replica, share in found.items() if share}


def generating(history: FlowHistory, replica: str) -> list[ActivitySpan]:
    """Returns when a replica generated: by groups that came back, and by what it was seen to do."""
    seen = [(span.begin, span.end) for span in history.looks.get(replica, ()) if span.activity == GENERATING]
    return [ActivitySpan(GENERATING, *interval) for interval in union([*history.generated.get(replica, ()), *seen])]


def _lost(history: FlowHistory) -> float:
    """Returns the share of generated tokens that were not trained."""
    lost = sum(item.dropped + item.masked for item in history.lengths.values())
    whole = lost + sum(item.trained for item in history.lengths.values())
    return lost / whole if whole else 0.0
