"""What services did when: disjoint spans of activities, laid over one another, and their shares of a time. Pure."""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shared.history.intervals import Interval

SPANS_SHOWN = 600
"""The most spans of one service in an answer; shorter ones than this part of the window are left out of it, never out of shares."""


class ActivitySpan(NamedTuple):
    """An activity from ``begin`` to ``end``, seconds since the epoch."""

    activity: str
    begin: float
    end: float


def laid_over(layers: Iterable[Sequence[ActivitySpan]], window: Interval) -> list[ActivitySpan]:
    """Returns disjoint spans within the window, in order; where several lie at the same time, that of the last layer is seen."""
    ordered = [span for layer in layers for span in layer if span.end > window[0] and span.begin < window[1]]
    marks = sorted(
        mark
        for height, span in enumerate(ordered)
        if span.end > span.begin
        for mark in ((max(span.begin, window[0]), height), (min(span.end, window[1]), ~height))
    )
    found: list[ActivitySpan] = []
    active: set[int] = set()
    for (at, height), (following, _) in itertools.pairwise(marks):
        if height < 0:
            active.discard(~height)
        else:
            active.add(height)
        if active and following > at:
            _append(found, ActivitySpan(ordered[max(active)].activity, at, following))
    return found


def _append(spans: list[ActivitySpan], span: ActivitySpan) -> None:
    if spans and spans[-1].activity == span.activity and spans[-1].end == span.begin:
        span = ActivitySpan(span.activity, spans.pop().begin, span.end)
    spans.append(span)


def seconds_of(spans: Iterable[ActivitySpan]) -> dict[str, float]:
    """Returns the seconds of each activity, the longest first."""
    found: dict[str, float] = {}
    for activity, begin, end in spans:
        found[activity] = found.get(activity, 0.0) + end - begin
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def shown_spans(spans: Sequence[ActivitySpan], window: Interval) -> list[ActivitySpan]:
    """Returns the spans that a picture of the window can show: no shorter ones, where there are many."""
    if len(spans) <= SPANS_SHOWN:
        return list(spans)
    shortest = (window[1] - window[0]) / SPANS_SHOWN
    return [span for span in spans if span.end - span.begin >= shortest]
