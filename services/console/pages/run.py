"""``/api/run``: the answers of the page *Run*: which curves there are, their points, and what happened beside them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, HTTPException, Query
from pydantic import BaseModel

from services.console.chart_panels import PANELS, further, panel_series
from services.console.curves import Curve, curve
from services.console.event_history import EventHistory
from services.console.other_runs import OtherRuns
from services.console.run_source import RunSource
from shared.history.metric_history import MetricHistory
from shared.history.push_history import PushHistory, VersionHistory
from shared.history.run_marks import RunMarks

MOST_MARKS_SHOWN = 400
"""The newest marks of one kind that one answer has."""

Axis = Literal["step", "hours"]
"""What x is: the training step, or hours since the run began."""

PUSH, PUSH_FAILED, TRAINER = "push", "push failed", "trainer"


class SeriesPart(BaseModel):
    """A series of a panel. ``negative``: its values are drawn with the other sign."""

    tag: str
    negative: bool
    label: str


class PanelPart(BaseModel):
    """A chart and its series. ``by_batch``: its steps are numbers of batches. ``left_out``: series beside them that are not drawn."""

    panel: str
    title: str
    unit: str
    about: str
    by_batch: bool
    series: list[SeriesPart]
    left_out: int


class Panels(BaseModel):
    """The charts that the runs have values for. ``further``: metrics that no chart draws; ``left_out``: how many more were not kept.

    ``steps``: of this run, first and last; ``hours``: since it began. ``unreadable``: file → why its metrics are not all here.
    """

    run: str
    panels: list[PanelPart]
    further: list[str]
    left_out: int
    steps: tuple[int, int] | None
    hours: float | None
    unreadable: dict[str, str]


class Curves(BaseModel):
    """The curves that were asked for, of those runs that have them."""

    curves: list[Curve]


class MarkPart(BaseModel):
    """Something that happened. ``x``: on the axis that was asked for; ``at``: seconds since the epoch; ``instance``: to which service."""

    x: float
    at: float
    kind: str
    instance: str
    text: str


class Marks(BaseModel):
    """The marks of this run, in the order of time. ``left_out``: older ones that are not in this answer."""

    marks: list[MarkPart]
    left_out: int


def panels(run: str, runs: Sequence[MetricHistory], unreadable: Mapping[str, str]) -> Panels:
    """Returns the charts of ``runs``, the first of which is this one."""
    tags = {tag for history in runs for tag in history.series}
    held_out = sorted({name for history in runs for name in history.held_out_sets()})
    found, shown = [], set[str]()
    for panel in PANELS:
        series, left_out = panel_series(panel, tags, held_out)
        shown |= {item.tag for item in series}
        if series:
            parts = [SeriesPart(tag=item.tag, negative=item.negative, label=item.label) for item in series]
            words = {name: getattr(panel, name) for name in ("panel", "title", "unit", "about", "by_batch")}
            found.append(PanelPart(**words, series=parts, left_out=left_out))
    own = runs[0]
    clock = own.clock
    return Panels(
        run=run,
        panels=found,
        further=further(tags, shown),
        left_out=sum(history.left_out for history in runs),
        steps=None if clock is None else (int(clock.steps[0]), int(clock.steps[-1])),
        hours=None if clock is None or own.began is None else (float(clock.at.max()) - own.began) / 3600,
        unreadable=dict(unreadable),
    )


def curves(
    runs: Mapping[str, MetricHistory], tags: Sequence[str], axis: Axis, first: float, last: float, points: int, window: int
) -> Curves:
    """Returns each run's curve of each tag, where it has one; a tag with a minus before it is drawn with the other sign."""
    found = []
    for tag in dict.fromkeys(tags):
        name = tag.removeprefix("-")
        for run, history in runs.items():
            if (series := history.series.get(name)) is not None:
                began = history.began if axis == "hours" else None
                sign = -1.0 if name != tag else 1.0
                found.append(curve(run, tag, series, began=began, first=first, last=last, points=points, window=window, sign=sign))
    return Curves(curves=found)


def marks(metrics: MetricHistory, pushes: PushHistory, services: RunMarks, axis: Axis, first: float, last: float) -> Marks:
    """Returns what lies between ``first`` and ``last``: failures and restarts of services, and pushes."""
    found = [MarkPart(x=0.0, at=mark.at, kind=mark.what, instance=mark.instance, text=mark.text) for mark in services.marks]
    found = sorted([*found, *(mark for version in pushes.versions.values() for mark in _pushes(version))], key=lambda mark: mark.at)
    times = np.array([mark.at for mark in found])
    places = metrics.step_at(times) if axis == "step" else (times - (metrics.began or 0.0)) / 3600
    inside = [mark.model_copy(update={"x": x}) for mark, x in zip(found, places.tolist(), strict=True) if first <= x <= last]
    kept = [mark for kind in dict.fromkeys(mark.kind for mark in inside) for mark in _of_kind(inside, kind)[-MOST_MARKS_SHOWN:]]
    return Marks(marks=sorted(kept, key=lambda mark: mark.at), left_out=len(inside) - len(kept))


def _pushes(version: VersionHistory) -> Iterator[MarkPart]:
    """Yields the marks of a version: its pushes, or that replicas have read it from disk."""
    for push in version.pushes:
        failed = "; ".join(f"{part.replica}: {part.failure}" for part in push.replicas if part.failure)
        kind = PUSH_FAILED if push.failure or failed else PUSH
        yield MarkPart(x=0.0, at=push.at, kind=kind, instance=TRAINER, text=f"version {push.version} {failed}".strip())
    if not version.pushes:
        yield MarkPart(x=0.0, at=version.at, kind=PUSH, instance=TRAINER, text=f"version {version.version}")


def _of_kind(found: Sequence[MarkPart], kind: str) -> list[MarkPart]:
    return [mark for mark in found if mark.kind == kind]


# --- routes

Runs = Annotated[list[str], Query(alias="run", max_length=7, description="other runs beside this one, drawn over it")]
Tags = Annotated[list[str], Query(alias="tag", min_length=1, max_length=128, description="metrics; with a minus, the negative of one")]
Bound = Annotated[float | None, Query(allow_inf_nan=False, description="of x: the least, or the greatest")]


def router(source: RunSource) -> APIRouter:
    """Returns the routes."""
    api, own, others = APIRouter(), source.shared(EventHistory), source.shared(OtherRuns)

    async def histories(names: Sequence[str]) -> dict[str, MetricHistory]:
        found = {source.run: own.metrics}
        for name in names:
            if (metrics := await others.metrics(name)) is None:
                raise HTTPException(404, f"run: there is no run {name!r} beside this one")
            found[name] = metrics
        return found

    @api.get("/panels")
    async def read_panels(names: Runs = []) -> Panels:  # noqa: B006
        """The charts that there are values for, and the metrics that no chart draws."""
        return panels(source.run, list((await histories(names)).values()), own.files.unreadable if own.files is not None else {})

    @api.get("/curves")
    async def read_curves(
        tags: Tags,
        names: Runs = [],  # noqa: B006
        axis: Axis = "step",
        first: Bound = None,
        last: Bound = None,
        points: Annotated[int, Query(ge=10, le=5000)] = 500,
        window: Annotated[int, Query(ge=1, le=10_000, description="steps of the moving mean; 1: none")] = 1,
    ) -> Curves:
        """Points of metrics, at most about ``points`` each, spikes kept."""
        return curves(await histories(names), tags, axis, _or(first, -math.inf), _or(last, math.inf), points, window)

    @api.get("/marks")
    async def read_marks(axis: Axis = "step", first: Bound = None, last: Bound = None) -> Marks:
        """Failures and restarts of services, and pushes of weights."""
        return marks(own.metrics, own.pushes, own.marks, axis, _or(first, -math.inf), _or(last, math.inf))

    return api


def _or(bound: float | None, otherwise: float) -> float:
    return otherwise if bound is None else bound
