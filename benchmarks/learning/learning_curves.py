"""Aggregates of runs that differ by their seed alone: curves with bands, and what a bound costs. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Run = Mapping[str, Any]

WAY = 0.75
"""The share of the way from the first to the best mean held-out reward of the smallest bound's runs, which is the target of all."""

LAST = 0.25
"""The part of a run's evaluations that its reward "at the end" is the mean of: one evaluation of a hundred prompts scatters by 0.05."""

POINTS = 200
"""Points of a curve over wall time."""


@dataclass(frozen=True)
class Band:
    """A curve: ``mean``, ``low`` and ``high`` over the seeds at each ``x``. float64 [points]."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class LearningRow:
    """What the runs of one bound and objective came to: mean, least and most over seeds.

    Attributes:
        staleness: versions, mean over trained samples. step_seconds: between the ends of steps. start, end: held-out reward of version 0,
            and at the end (`LAST`). over_steps: mean held-out reward over the steps of the run. target_steps, target_seconds: until it
            reached the target; None where a run did not.
    """

    objective: str
    bound: int
    seeds: int
    staleness: float
    step_seconds: float
    start: tuple[float, float, float]
    end: tuple[float, float, float]
    over_steps: tuple[float, float, float]
    target_steps: float | None
    target_seconds: float | None


def grouped(runs: Sequence[Run]) -> dict[tuple[str, int], list[Run]]:
    """Returns the runs with a curve by objective and bound, in order."""
    found: defaultdict[tuple[str, int], list[Run]] = defaultdict(list)
    for run in runs:
        if len(run["evaluations"]) > 1 and run["steps"]:
            found[run["objective"], run["bound"]].append(run)
    return {key: found[key] for key in sorted(found)}


def points(run: Run, axis: str) -> tuple[Floats, Floats]:
    """Returns a run's held-out rewards. ``axis``: ``steps``, at the middle of the versions that drew the responses, or ``seconds``, at
    which the evaluated version was live."""
    rows = run["evaluations"]
    x = [(row["version"] + row["newest"]) / 2 if axis == "steps" else row["seconds"] for row in rows]
    order = np.argsort(x, kind="stable")
    return np.array(x, dtype=np.float64)[order], np.array([row["reward"] for row in rows], dtype=np.float64)[order]


def band(runs: Sequence[Run], axis: str) -> Band:
    """Returns the curve of runs that differ by their seed, as far as all of them reach, linear between their points."""
    curves = [points(run, axis) for run in runs]
    grid = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), POINTS)
    values = np.array([np.interp(grid, x, y) for x, y in curves])
    return Band(grid, values.mean(0), values.min(0), values.max(0))


def target(runs: Sequence[Run]) -> float | None:
    """Returns the reward that all runs are to reach, by those of the smallest bound; None without runs."""
    groups = grouped(runs)
    if not groups:
        return None
    first = groups[min(groups, key=lambda key: (key[1], key[0]))]
    curve = band(first, "steps").mean
    return float(curve[0] + WAY * (curve.max() - curve[0]))


def learning_rows(runs: Sequence[Run]) -> list[LearningRow]:
    """Returns a row for each objective and bound."""
    aim = target(runs)
    return [_row(objective, bound, found, aim or 0.0) for (objective, bound), found in grouped(runs).items()]


def _row(objective: str, bound: int, runs: Sequence[Run], aim: float) -> LearningRow:
    def spread(values: list[float]) -> tuple[float, float, float]:
        return float(np.mean(values)), min(values), max(values)

    curves = [points(run, "steps") for run in runs]
    reached = {axis: [_reached(*points(run, axis), aim) for run in runs] for axis in ("steps", "seconds")}
    steps = [run["steps"] for run in runs]
    return LearningRow(
        objective=objective,
        bound=bound,
        seeds=len(runs),
        staleness=float(np.mean([step["staleness"] for one in steps for step in one if "staleness" in step])),
        step_seconds=float(np.mean([one[-1]["seconds"] / len(one) for one in steps])),
        start=spread([float(y[0]) for _, y in curves]),
        end=spread([float(y[-max(1, round(LAST * len(y))) :].mean()) for _, y in curves]),
        over_steps=spread([float(np.trapezoid(y, x) / (x[-1] - x[0])) if x[-1] > x[0] else float(y.mean()) for x, y in curves]),
        target_steps=_mean(reached["steps"]),
        target_seconds=_mean(reached["seconds"]),
    )


def _reached(x: Floats, y: Floats, aim: float) -> float | None:
    """Returns where the line through the points first reaches ``aim``."""
    at = int(np.argmax(y >= aim))
    if y[at] < aim:
        return None
    if at == 0:
        return float(x[0])
    return float(x[at - 1] + (x[at] - x[at - 1]) * (aim - y[at - 1]) / (y[at] - y[at - 1]))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if len(known) == len(values) else None
