"""Every metric of a run over its steps, folded from events or read from files. Pure.

A step that was trained again after a restart was written again: of two numbers of one step the one that was written last counts.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shared.schema.message import LARGEST

Floats = NDArray[np.float64]

MOST_TAGS = 4096
"""The most metrics of a run that are kept: names of rewards are users', and a run with more has no more use of curves."""

STEP_TAGS = ("rollout/raw_reward", "train/loss", "sft/loss")
"""Metrics that are written once a step, by which times become steps: the first of them that there is."""

SFT = "sft/"
"""The prefix of the warm start's metrics, which have steps of their own."""


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
