"""Curves for charts: a part of a metric's series in as many points as a chart can show, and its moving mean. Pure.

Of many values in one column of pixels the smallest and the largest are kept, so that a spike of one step is seen at any width. Values that
are no numbers leave gaps and are told apart.
"""

import math

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from shared.history.metric_history import Floats, MetricSeries

MOST_UNUSUAL = 200
"""The most values that are no numbers that one curve tells of one by one."""


class UnusualValue(BaseModel):
    """A value that is no number: ``nan``, ``inf`` or ``-inf``."""

    x: float
    step: int
    value: str


class Curve(BaseModel):
    """Points of one metric of one run. ``x``: steps, or hours since the run began, ascending; ``steps``: the step of each.

    ``smoothed``: the mean of the numbers of the last steps up to each point, empty where that is not asked for. ``total``: values in this
    part of the series, the newest of which is ``newest``. ``unusual``: of them those that are no numbers, the newest of
    ``unusual_total``; their points are null.
    """

    run: str
    tag: str
    x: list[float]
    steps: list[int]
    values: list[float | None]
    smoothed: list[float | None]
    total: int
    newest: float | None
    unusual: list[UnusualValue]
    unusual_total: int


def curve(
    run: str,
    tag: str,
    series: MetricSeries,
    *,
    began: float | None = None,
    first: float = -math.inf,
    last: float = math.inf,
    points: int = 500,
    window: int = 1,
    sign: float = 1.0,
) -> Curve:
    """Returns the part of a series from ``first`` to ``last`` on the x axis, in about ``points`` points.

    Args:
        began: x is hours since then; None: x is the step. window: steps of the moving mean. sign: what every value is multiplied by.
    """
    steps, values = series.steps, series.values * sign
    x = steps if began is None else (series.at - began) / 3600
    if np.any(np.diff(x) < 0):  # of two lives of a trainer, the second may have written early steps later than the first the late ones
        order = np.argsort(x, kind="stable")
        steps, values, x = steps[order], values[order], x[order]
    means = moving_mean(values, window) if window > 1 else np.empty(0)
    begin, end = int(np.searchsorted(x, first, "left")), int(np.searchsorted(x, last, "right"))
    chosen = begin + extremes(values[begin:end], points)
    odd = begin + np.flatnonzero(~np.isfinite(values[begin:end]))
    return Curve(
        run=run,
        tag=tag,
        x=x[chosen].tolist(),
        steps=[int(step) for step in steps[chosen]],
        values=finite_or_none(values[chosen]),
        smoothed=finite_or_none(means[chosen]) if window > 1 else [],
        total=max(0, end - begin),
        newest=finite_or_none(values[end - 1 : end])[0] if end > begin else None,
        unusual=[UnusualValue(x=x[index], step=int(steps[index]), value=str(float(values[index]))) for index in odd[-MOST_UNUSUAL:]],
        unusual_total=len(odd),
    )


def extremes(values: Floats, points: int) -> NDArray[np.intp]:
    """Returns the indices of about ``points`` values, ascending: the first and the last, and of each column the least and the greatest."""
    count = len(values)
    if count <= max(points, 4):
        return np.arange(count)
    width = math.ceil(count / max(1, points // 2))
    padded = np.full(math.ceil(count / width) * width, np.nan)
    padded[:count] = np.where(np.isfinite(values), values, np.nan)
    table = padded.reshape(-1, width)
    begins = np.arange(len(table)) * width
    least = begins + np.argmin(np.nan_to_num(table, nan=np.inf), axis=1)
    most = begins + np.argmax(np.nan_to_num(table, nan=-np.inf), axis=1)
    return np.unique(np.concatenate([[0], least, most, [count - 1]]))


def moving_mean(values: Floats, window: int) -> Floats:
    """Returns the mean of each value and up to ``window`` − 1 before it, of those that are numbers; NaN where none of them is."""
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return window_sums(np.where(finite, values, 0.0), window) / window_sums(finite.astype(np.float64), window)


def window_sums(values: Floats, window: int) -> Floats:
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


def finite_or_none(values: Floats) -> list[float | None]:
    """Returns the values for JSON, which has no infinities."""
    return [value if math.isfinite(value) else None for value in values.tolist()]
