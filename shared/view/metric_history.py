"""Histories of a run's metrics, of its pushes of weights, and of the marks on its charts."""

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shared.schema.message import LARGEST
from shared.schema.service_messages import VALUES_CHANGED, ServiceEvent
from shared.schema.weight_messages import WeightsLive, WeightsPushed
from shared.view.flow_history import JOINED, LEFT, REWARD
from shared.view.run_view import FAILED, RESTARTED

Floats = NDArray[np.float64]

MOST_TAGS = 4096  # The most metrics of a run that are kept: names of rewards are users', and a run with more has no more use of curves

# Metrics that are written once a step, by which times become steps: the first of them that there is
STEP_TAGS = (REWARD, "train/loss", "sft/loss")


def moving_mean(values: Floats, window: int) -> Floats:
    """Returns the mean of each value and up to ``window`` − 1 before it, of those that are numbers; NaN where none of them is."""
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return _window_sums(np.where(finite, values, 0.0), window) / _window_sums(finite.astype(np.float64), window)


def _window_sums(values: Floats, window: int) -> Floats:
    """Returns the sum of each value and up to ``window`` − 1 before it.

    A window spans at most two blocks of its own length: it is the end of one and the beginning of the next. So no value is added that the
    window does not hold: in a running sum one huge value would spoil all later ones.
    """
    count = len(values)
    blocks = np.zeros((math.ceil((count + window - 1) / window), window))
    blocks.ravel()[window - 1 : window - 1 + count] = values
    begun = np.cumsum(blocks, axis=1).ravel()[window - 1 : window - 1 + count]
    rest = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1].ravel()[:count]
    return np.where(np.arange(count) % window == 0, begun, begun + rest)


@dataclass(slots=True)
class MetricSeries:
    """One metric: its steps, ascending, with the value of each and when it was written, seconds since the epoch."""

    _steps: "array[int]" = field(default_factory=lambda: array("q"))
    _values: "array[float]" = field(default_factory=lambda: array("d"))
    _at: "array[float]" = field(default_factory=lambda: array("d"))

    def put(self, step: int, value: float, at: float) -> bool:
        """Takes a number; returns whether it is new."""
        index = len(self._steps) if not self._steps or step > self._steps[-1] else bisect_left(self._steps, step)
        if index == len(self._steps) or self._steps[index] != step:
            self._steps.insert(index, step)
            self._values.insert(index, value)
            self._at.insert(index, at)
            return True
        if at <= self._at[index]:
            return False
        self._values[index], self._at[index] = value, at
        return True

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def steps(self) -> Floats:
        return np.array(self._steps, dtype=np.float64)

    @property
    def values(self) -> Floats:
        return np.array(self._values)

    @property
    def at(self) -> Floats:
        return np.array(self._at)


@dataclass
class MetricHistory:
    """The metrics of one run, by the names of docs/metrics.md. ``left_out``: how many more of them there are than are kept."""

    series: dict[str, MetricSeries] = field(default_factory=dict)
    _left_out: set[str] = field(default_factory=set)

    def put(self, tag: str, step: int, value: float, at: float) -> bool:
        """Takes a number; returns whether it is new."""
        if not 0 <= step <= LARGEST:
            return False
        if tag not in self.series:
            if len(self.series) >= MOST_TAGS:
                if len(self._left_out) < MOST_TAGS:
                    self._left_out.add(tag)
                return False
            self.series[tag] = MetricSeries()
        return self.series[tag].put(step, value, at)

    @property
    def left_out(self) -> int:
        return len(self._left_out)

    @property
    def clock(self) -> MetricSeries | None:
        """Returns a metric that is written once a step; None before the first step."""
        return next((self.series[tag] for tag in STEP_TAGS if tag in self.series), None)

    @property
    def began(self) -> float | None:
        """Returns when the first number was written, seconds since the epoch."""
        return min((float(series.at.min()) for series in self.series.values() if len(series)), default=None)

    def held_out_sets(self) -> Iterator[str]:
        """Yields the names of the held-out sets that were evaluated."""
        for tag in self.series:
            if tag.startswith("eval/") and tag.endswith("/version"):
                yield tag.removeprefix("eval/").removesuffix("/version")

    def step_at(self, times: Floats) -> Floats:
        """Returns where times (seconds since the epoch) lie on the axis of steps, between the steps written before and after."""
        if (clock := self.clock) is None:
            return np.zeros_like(times)
        return np.interp(times, np.maximum.accumulate(clock.at), clock.steps)


CAUGHT_UP = "caught_up"  # The event of a replica that took a version from another replica or from disk

# Events about weights that did not get where they should
TROUBLES = ("fenced", "snapshot_broken", "snapshot_failed", "peer_weights_differ", "policy_not_exported")

MOST = 20_000  # The newest pushes, versions and events that are kept, of each


@dataclass
class VersionHistory:
    """One version. ``live``: the newest word of who serves it, by push or from disk; ``pushes``: those of it that were tried, in order."""

    version: int
    live: WeightsLive | None = None
    pushes: list[WeightsPushed] = field(default_factory=list)

    @property
    def at(self) -> float:
        """Returns when it was first served, or last tried: seconds since the epoch."""
        served = [push.at for push in self.pushes if not push.failure]
        if served:
            return served[0]
        return self.live.at if self.live is not None else self.pushes[-1].at

    @property
    def replicas(self) -> list[str]:
        """Returns the replicas that were told to serve it, in the order of their names."""
        pushed = {part.replica for push in self.pushes for part in push.replicas if not part.failure}
        return sorted(pushed | set(self.live.replicas if self.live is not None else ()))

    @property
    def pushed(self) -> WeightsPushed | None:
        """Returns the first push that some replica served; None where there is none."""
        return next((push for push in self.pushes if not push.failure), None)


@dataclass
class PushHistory:
    """The fold of the events about weights."""

    versions: dict[int, VersionHistory] = field(default_factory=dict)
    events: list[ServiceEvent] = field(default_factory=list)  # Catch-ups and troubles, in order

    def push(self, pushed: WeightsPushed) -> None:
        """Takes that a push has ended."""
        self._version(pushed.version).pushes.append(pushed)

    def live(self, live: WeightsLive) -> None:
        """Takes that a version is served."""
        self._version(live.version).live = live

    def take(self, event: ServiceEvent) -> bool:
        """Takes an event of a service; returns whether it concerns weights."""
        concerns = event.what == CAUGHT_UP or event.what in TROUBLES
        if concerns:
            self.events.append(event)
            del self.events[:-MOST]
        return concerns

    def newest_first(self) -> Sequence[VersionHistory]:
        """Returns the versions, the newest first."""
        return [self.versions[version] for version in sorted(self.versions, reverse=True)]

    def _version(self, version: int) -> VersionHistory:
        if version not in self.versions and len(self.versions) >= MOST:
            del self.versions[min(self.versions)]
        return self.versions.setdefault(version, VersionHistory(version))


# Figure of a push → the metric that has it, by version
PUSH_METRICS = {
    "seconds": "perf/update_weights_time",
    "transfer": "perf/update_weights_wire_time",
    "stall": "perf/update_weights_stall",
    "bytes": "perf/update_weights_bytes",
}


def pushes_in(metrics: MetricHistory) -> Iterator[WeightsPushed]:
    """Yields the pushes that a run's metrics tell of, for a run without events: their figures, not the replicas."""
    found: dict[int, dict[str, float]] = {}
    for figure, tag in PUSH_METRICS.items():
        if (series := metrics.series.get(tag)) is not None:
            for version, value, at in zip(series.steps.tolist(), series.values.tolist(), series.at.tolist(), strict=True):
                found.setdefault(int(version), {})[figure] = value
                found[int(version)]["at"] = at
    for version, figures in sorted(found.items()):
        if all(map(math.isfinite, figures.values())):
            yield WeightsPushed(version=version, replicas=[], **(figures | {"bytes": int(figures.get("bytes", 0))}))


def gb_per_s(pushed: WeightsPushed) -> float | None:
    """Returns the speed of the transfer in 10⁹ bytes a second; None where nothing was sent."""
    return pushed.bytes / pushed.transfer / 1e9 if pushed.bytes and pushed.transfer > 0 else None


TOOK_OVER = "took_over"  # The event of a buffer that takes another's place
MOST_MARKS = 2000  # The newest marks that are kept: a service that dies again and again makes many


@dataclass(slots=True)
class RunMark:
    """Something that happened to ``instance``. ``at``: seconds since the epoch; ``what``: failed, restarted, took_over; ``text``: why."""

    at: float
    what: str
    instance: str
    text: str


@dataclass
class RunMarks:
    """The fold of the services' events, in the order of the stream."""

    marks: deque[RunMark] = field(default_factory=lambda: deque(maxlen=MOST_MARKS))
    _last: dict[str, RunMark | None] = field(default_factory=dict)  # Instance → its mark since it last joined, of those that have joined

    def take(self, event: ServiceEvent) -> bool:
        """Takes an event; returns whether marks have changed.

        The launcher's word that it started a service again says more than the service's own that it failed, and takes its place.
        """
        instance, known = event.instance, self._last.get(event.instance)
        if event.what == RESTARTED and known is not None and known.what == FAILED:
            known.at, known.what, known.text = event.at, RESTARTED, event.detail or known.text
        elif event.what in (FAILED, RESTARTED, TOOK_OVER, VALUES_CHANGED):
            self._mark(event, event.what, event.detail)
        elif event.what == JOINED:
            again = instance in self._last and known is None
            if again:
                self._mark(event, RESTARTED, "started again")
            self._last[instance] = None
            return again
        else:
            if event.what == LEFT and known is None:
                self._last.pop(instance, None)
            return False
        return True

    def _mark(self, event: ServiceEvent, what: str, text: str) -> None:
        mark = RunMark(event.at, what, event.instance, text)
        self.marks.append(mark)
        if what in (FAILED, RESTARTED):  # what the next joining follows from
            self._last[event.instance] = mark
