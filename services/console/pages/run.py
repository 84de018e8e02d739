"""The page *Run*: its charts and their curves, marks and summary."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, HTTPException, Query
from numpy.typing import NDArray
from pydantic import BaseModel

from services.console.run_histories import EventHistory, OtherRuns
from services.console.run_source import RunSource
from shared.runtime.telemetry import table_rows
from shared.view.metric_history import Floats, MetricHistory, MetricSeries, PushHistory, RunMarks, VersionHistory, moving_mean

MOST_SERIES = 12  # The most series of one panel: more cannot be told apart


@dataclass(frozen=True)
class ChartPanel:
    """A chart. ``tags``: metrics, or patterns of them (``rewards/*/mean``); with a minus the negative of one. ``labels``: their names in
    the legend, empty for a metric's own.

    ``by_batch``: whether its x is the number of a batch, which the page *Samples* shows.
    """

    panel: str
    title: str
    unit: str
    about: str
    tags: tuple[str, ...]
    labels: tuple[str, ...]

    @property
    def by_batch(self) -> bool:
        return self.panel not in ("held_out", "warm_start")


def chart_panels(table: str) -> Iterator[ChartPanel]:
    """Yields the charts of a table: name, title, unit, description, and the series, each ``metric`` or ``metric = label``."""
    for panel, title, unit, about, series in table_rows(table):
        parts = [item.strip().partition(" = ") for item in series.split(",") if item]
        yield ChartPanel(panel, title, unit, about, tuple(tag for tag, _, _ in parts), tuple(label for _, _, label in parts))


PANELS = tuple(
    chart_panels("""
    reward | Reward | | mean reward of each batch's samples, as they were scored | rollout/raw_reward
    held_out | Held-out sets | mean reward | by the training steps in the weights that were evaluated |
    parts | Rewards by part | mean | each named reward, over the samples that have it | rewards/*/mean
    loss | Loss | | what is minimised, and its policy-gradient part | train/loss = loss, train/pg_loss = pg_loss
    kl | KL | nats | of the policy from the one that began the step, and from the reference where there is one |
        train/ppo_kl = to the step's beginning, train/kl_loss = to the reference (loss), rollout/kl = to the reference (reward),
        rollout/opd_reverse_kl = to the teacher
    entropy | Entropy | nats | of the policy where the loss has it; its estimate is the mean of −log p of the tokens that the engine drew |
        train/entropy_loss = of the policy, -rollout/rollout_log_probs = estimate
    clip | Clip fraction | share of tokens | tokens whose ratio is clipped | train/pg_clipfrac, train/tis_clipfrac
    grad_norm | Gradient norm | | L2 norm before clipping, of the last optimizer step | train/grad_norm
    length | Response length | tokens | of a batch's responses |
        rollout/response_len/mean = mean, rollout/response_len/median = median, rollout/response_len/max = longest
    truncation | Truncation | share of responses | responses that ran into their limit, and those that end in a loop |
        rollout/truncated_ratio = truncated, rollout/repetition_frac = looping
    difference | Engine–trainer difference | nats | mean absolute difference of the log-probs that engine and trainer give the same token |
        train/train_rollout_logprob_abs_diff = mean, train/mismatch_p99 = 99 %, train/mismatch_max = largest
    staleness | Staleness | versions | of a batch's samples: the batch's version less that of the oldest trained token |
        rollout/staleness_mean = mean, rollout/staleness_max = largest
    equal | Groups that teach nothing | share of groups | groups whose rewards are all equal: they have no advantage |
        rollout/zero_std_groups
    weights | Importance weights | ratio | mean of π/π_old, and of the trainer's policy over the engine's |
        train/ois = π/π_old, train/tis = trainer/engine
    lr | Learning rate | | of the last optimizer step | train/lr
    speed | Speed of training | tokens/s | with its waiting, and of computing alone |
        perf/wall_tok_per_s = waiting included, perf/actor_train_tok_per_s = computing
    seconds | Time of a step | s | training, and what the trainer waited between two steps |
        perf/step_time = training, perf/train_wait_time = between two steps
    critic | Critic | | value loss, and the share of values that were clipped |
        critic/value_loss = value loss, critic/value_clipfrac = clipped
    passrate | Pass rate | probability | that one of k samples of a prompt passes | passrate/*
    warm_start | Warm start | nats a token | supervised loss, by the warm start's own steps | sft/loss
""")
)


class PanelSeries(BaseModel):
    """One series of a panel: its metric, whether its values are plotted with the other sign, and its name in the legend."""

    tag: str
    negative: bool
    label: str


def panel_series(panel: ChartPanel, tags: Iterable[str], held_out: Sequence[str]) -> tuple[list[PanelSeries], int]:
    """Returns the series of a panel, and how many more there are than it draws.

    Args:
        tags: all metrics of the runs. held_out: names of held-out sets.
    """
    known = sorted(tags)
    found = []
    if panel.panel == "held_out":
        found = [PanelSeries(tag=f"eval/{name}", negative=False, label=name) for name in held_out if f"eval/{name}" in known]
    for index, pattern in enumerate(panel.tags):
        negative, pattern = pattern.startswith("-"), pattern.removeprefix("-")
        for tag in known if "*" in pattern else [pattern] * (pattern in known):
            if fnmatchcase(tag, pattern):
                label = panel.labels[index] or _short(tag, pattern)
                found.append(PanelSeries(tag=tag, negative=negative, label=label))
    return found[:MOST_SERIES], max(0, len(found) - MOST_SERIES)


def _short(tag: str, pattern: str) -> str:
    """Returns a metric's name without what all that match the pattern have in common."""
    if "*" not in pattern:
        return tag.partition("/")[2]
    before, _, after = pattern.partition("*")
    return tag.removeprefix(before).removesuffix(after)


MOST_UNUSUAL = 200  # The most values that are no numbers that one curve tells of one by one


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


def finite_or_none(values: Floats) -> list[float | None]:
    """Returns the values for JSON, which has no infinities."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


MOST_MARKS_SHOWN = 400  # The newest marks of one kind that one answer has
Axis = Literal["step", "hours"]  # What x is: the training step, or hours since the run began
PUSH, PUSH_FAILED, TRAINER = "push", "push failed", "trainer"


class PanelPart(BaseModel):
    """A chart and its series. ``by_batch``: its steps are numbers of batches. ``left_out``: series beside them that are not drawn."""

    panel: str
    title: str
    unit: str
    about: str
    by_batch: bool
    series: list[PanelSeries]
    left_out: int


class Panels(BaseModel):
    """The charts that the runs have values for. ``further``: metrics that no chart draws; ``left_out``: how many more were not kept.

    ``steps``: of this run, first and last; ``hours``: since it began. ``unreadable``: directory → why its metrics are not here.
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
            words = {name: getattr(panel, name) for name in ("panel", "title", "unit", "about", "by_batch")}
            found.append(PanelPart(**words, series=series, left_out=left_out))
    own = runs[0]
    clock = own.clock
    return Panels(
        run=run,
        panels=found,
        further=sorted(tags - shown),
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
    kept = [
        mark
        for kind in dict.fromkeys(mark.kind for mark in inside)
        for mark in [mark for mark in inside if mark.kind == kind][-MOST_MARKS_SHOWN:]
    ]
    return Marks(marks=sorted(kept, key=lambda mark: mark.at), left_out=len(inside) - len(kept))


def _pushes(version: VersionHistory) -> Iterator[MarkPart]:
    """Yields the marks of a version: its pushes, or that replicas have read it from disk."""
    for push in version.pushes:
        failed = "; ".join(f"{part.replica}: {part.failure}" for part in push.replicas if part.failure)
        kind = PUSH_FAILED if push.failure or failed else PUSH
        yield MarkPart(x=0.0, at=push.at, kind=kind, instance=TRAINER, text=f"version {push.version} {failed}".strip())
    if not version.pushes:
        yield MarkPart(x=0.0, at=version.at, kind=PUSH, instance=TRAINER, text=f"version {version.version}")


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
