"""``/api/weights``: the answers of the page *Weights*: who serves which version, how it got there, and what failed on the way."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from services.console.run_histories import EventHistory
from services.console.run_source import RunSource
from shared.schema.service_messages import ServiceStatus
from shared.schema.weight_messages import ReplicaPush, WeightsPushed
from shared.view.metric_history import CAUGHT_UP, PushHistory, VersionHistory, gb_per_s


class ReplicaNow(BaseModel):
    """A live replica. ``version``: the weights that it serves (-1: none); ``behind``: how many versions older than the newest live one."""

    replica: str
    version: int
    behind: int
    state: str
    detail: str


class ReplicaPart(ReplicaPush):
    """A replica's part in a version. ``now``: it serves it now."""

    now: bool


class VersionRow(BaseModel):
    """One version. ``step``: training steps in it; ``at``: when it was first served, or last tried; ``served``: whether any replica has it.

    ``joining``, ``pausing`` (the slowest replica's), ``transfer``, ``check``, ``activation``, ``seconds``, ``stall``: seconds of the push
    that brought it, and ``paused`` the longest pause of a replica; None where it came otherwise, or not at all. ``attempts``: pushes of it;
    ``failure``: why the last one that failed for all did.
    """

    version: int
    step: int
    at: float
    served: bool
    replicas: list[ReplicaPart]
    joining: float | None = None
    pausing: float | None = None
    transfer: float | None = None
    check: float | None = None
    activation: float | None = None
    seconds: float | None = None
    stall: float | None = None
    paused: float | None = None
    bytes: int | None = None
    gb_per_s: float | None = None
    attempts: int
    failure: str


class WeightsNow(BaseModel):
    """``live``: the newest version that replicas serve, or have served; ``trained``: the newest that the trainer tells of; -1: none."""

    live: int
    trained: int
    replicas: list[ReplicaNow]


class Versions(BaseModel):
    """A page of versions, the newest first. ``total``: of all; ``next``: the ``below`` of the page after this one, None at the end."""

    versions: list[VersionRow]
    total: int
    next: int | None


class PushPaceSeries(BaseModel):
    """One figure of the pushes: its value for each version."""

    name: str
    unit: str
    values: list[float | None]


class PushPace(BaseModel):
    """The figures of the newest pushes, by version."""

    versions: list[int]
    series: list[PushPaceSeries]


class WeightEvent(BaseModel):
    """Something about weights that went wrong (``bad``), or a replica that caught up. ``at``: seconds since the epoch."""

    at: float
    who: str
    what: str
    text: str
    bad: bool


class WeightEvents(BaseModel):
    """The newest of these events, the newest first. ``left_out``: older ones that are not in this answer. ``recorded``: whether the
    run's events are at hand; in its directory alone they are not."""

    events: list[WeightEvent]
    left_out: int
    recorded: bool


PACE_NEWEST = 500  # The newest versions whose figures one chart shows


# Figures of a push, in seconds but for ``bytes`` and ``gb_per_s``. None where nothing is known: a push that only metrics report has no
# replicas. ``pausing``: the longest time from the request until a replica's engine was paused; ``check``: comparing what replicas hold with
# what was sent; ``activation``: the commit; ``paused``: the longest pause of a replica.
FIGURES: dict[str, Callable[[WeightsPushed], float | None]] = {
    "joining": lambda push: push.joining if push.replicas else None,
    "pausing": lambda push: max((part.pausing for part in push.replicas if part.pausing is not None), default=None),
    "transfer": lambda push: push.transfer,
    "check": lambda push: push.check if push.replicas else None,
    "activation": lambda push: push.activation if push.replicas else None,
    "seconds": lambda push: push.seconds,
    "stall": lambda push: push.stall,
    "paused": lambda push: max((part.paused for part in push.replicas if part.paused is not None), default=None),
    "bytes": lambda push: push.bytes,
    "gb_per_s": gb_per_s,
}

# The series of the chart: figure, name, unit
PACE = (
    *((name, name, "s") for name in ("transfer", "joining", "pausing", "check", "activation")),
    ("paused", "longest pause", "s"),
    ("stall", "stall of the trainer", "s"),
    ("gb_per_s", "speed", "GB/s"),
)


def weights_now(statuses: Sequence[ServiceStatus], history: PushHistory) -> WeightsNow:
    """Returns who serves what at this moment, by the registry."""
    rollouts = sorted((status for status in statuses if status.service == "rollout"), key=lambda status: status.instance)
    served = [item.version for item in history.versions.values() if item.replicas or item.pushed]
    live = max([-1, *([status.version for status in rollouts if status.version >= 0] or served)])  # a repair may have cut later ones
    trained = max([live, *([status.version for status in statuses if status.service == "trainer"] or history.versions)])
    replicas = [
        ReplicaNow(
            **status.model_dump(include={"version", "state", "detail"}), replica=status.instance, behind=max(0, live - status.version)
        )
        for status in rollouts
    ]
    return WeightsNow(live=live, trained=trained, replicas=replicas)


def version_rows(
    history: PushHistory, statuses: Sequence[ServiceStatus], steps: Callable[[int], int], below: int | None = None, limit: int = 50
) -> Versions:
    """Returns the versions below ``below``, the newest first, at most ``limit``. ``steps``: returns the training steps in a version."""
    serves = {status.instance: status.version for status in statuses if status.service == "rollout"}
    found = [item for item in history.newest_first() if below is None or item.version < below]
    rows = [_row(item, serves, steps(item.version)) for item in found[:limit]]
    return Versions(versions=rows, total=len(history.versions), next=rows[-1].version if len(found) > limit else None)


def _row(item: VersionHistory, serves: Mapping[str, int], step: int) -> VersionRow:
    push = item.pushed
    failed = [tried.failure for tried in item.pushes if tried.failure]
    replicas = _replicas(item, serves)
    row = VersionRow(
        version=item.version,
        step=step,
        at=item.at,
        served=item.pushed is not None or bool(item.replicas) or any(part.now for part in replicas),
        replicas=replicas,
        attempts=len(item.pushes),
        failure=failed[-1] if failed else "",
    )
    if push is not None:
        return row.model_copy(update={name: figure(push) for name, figure in FIGURES.items()})
    if item.live is not None:  # from disk: its seconds are those of writing it
        return row.model_copy(update={"seconds": item.live.seconds, "bytes": item.live.bytes})
    return row


def _replicas(item: VersionHistory, serves: Mapping[str, int]) -> list[ReplicaPart]:
    """Returns who took part in a version, in the order of names: what its last push came to for each, and who else has it."""
    parts = {part.replica: part for push in item.pushes for part in push.replicas}
    now = {name for name, version in serves.items() if version == item.version}
    return [
        ReplicaPart(now=name in now, **(parts.get(name) or ReplicaPush(replica=name)).model_dump())
        for name in sorted(parts.keys() | now | set(item.replicas))
    ]


def pace(history: PushHistory) -> PushPace:
    """Returns the figures of the newest pushes that replicas serve, in the order of versions."""
    pushes = [push for item in history.newest_first()[:PACE_NEWEST] if (push := item.pushed) is not None][::-1]
    series = [PushPaceSeries(name=name, unit=unit, values=[FIGURES[key](push) for push in pushes]) for key, name, unit in PACE]
    return PushPace(versions=[push.version for push in pushes], series=series)


def weight_events(history: PushHistory, limit: int, *, recorded: bool = True) -> WeightEvents:
    """Returns the failures of pushes by name, the events of services about weights, and catch-ups, the newest first."""
    failed = [
        WeightEvent(at=push.at, who=part.replica, what=f"push of version {item.version} failed", text=part.failure, bad=True)
        for item in history.versions.values()
        for push in item.pushes
        for part in push.replicas
        if part.failure
    ]
    told = [
        WeightEvent(at=event.at, who=event.instance, what=event.what.replace("_", " "), text=event.detail, bad=event.what != CAUGHT_UP)
        for event in history.events
    ]
    found = sorted([*failed, *told], key=lambda event: event.at, reverse=True)
    return WeightEvents(events=found[:limit], left_out=max(0, len(found) - limit), recorded=recorded)


# --- routes


def router(source: RunSource) -> APIRouter:
    """Returns the routes."""
    api, history = APIRouter(), source.shared(EventHistory)

    @api.get("/now")
    async def read_now() -> WeightsNow:
        """Who serves which version at this moment."""
        return weights_now(source.statuses, history.pushes)

    @api.get("/versions")
    async def read_versions(
        below: Annotated[int | None, Query(ge=0, description="only versions older than this")] = None,
        limit: Annotated[int, Query(ge=1, le=500)] = 50,
    ) -> Versions:
        """The versions, the newest first, with who has them and what their pushes took."""
        steps = source.config.steps_of_version if source.config is not None else int
        return version_rows(history.pushes, source.statuses, steps, below, limit)

    @api.get("/pace")
    async def read_pace() -> PushPace:
        """Seconds and GB/s of the newest pushes, by version."""
        return pace(history.pushes)

    @api.get("/events")
    async def read_events(limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> WeightEvents:
        """Failures of pushes by name, trouble with snapshots, replicas that caught up: the newest first."""
        return weight_events(history.pushes, limit, recorded=source.live)

    return api
