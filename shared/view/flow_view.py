"""The pipeline of a run over the last minutes: where groups are, what services do, who waits for whom; and the reader that feeds it."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from shared.bus.registry import ENVIRONMENT
from shared.bus.streams import Entry
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.schema.ledger import LedgerRecord
from shared.schema.service_messages import MetricsWritten, ServiceEvent, ServiceStatus
from shared.schema.weight_messages import WeightsPushed
from shared.view.alarms import AlarmKind
from shared.view.bottleneck import FEW_STEPS, GENERATING, Bottleneck, bottleneck, causes_of, generating, sums, workload
from shared.view.flow_history import (
    ADMISSION,
    ADMITTED,
    GENERATED,
    GENERATION,
    HANDING_OUT,
    PUSHING,
    QUEUE,
    RESTARTING,
    SAVING,
    SCORED,
    SCORING,
    TRAINED,
    ActivitySpan,
    FlowHistory,
    Interval,
    TokensByLength,
    laid_over,
    seconds_of,
    shown_spans,
)
from shared.view.live_services import newest_gauges, shown
from shared.view.stall import TROUBLES, RunSituation, Stall, run_stall

TRAINING, RATING = "training", "scoring"  # What the trainer and a reward service do while they are busy; a replica then is `GENERATING`
BUSY = {TRAINING, GENERATING, RATING}

WORKERS = {"rollout", "reward", "trainer"}

# Services as they are shown, along the way of a group
ORDER = {service: place for place, service in enumerate(("buffer", "rollout", "gateway", "reward", "critic", "trainer"))}

WAITING = "waiting"

AWAY = "not seen"

# What the trainer does while it waits for each cause
WAITS = {
    RESTARTING: "restarting",
    SAVING: "saving",
    PUSHING: "pushing weights",
    ADMISSION: "waiting for rollout",
    QUEUE: "waiting for rollout",
    GENERATION: "waiting for rollout",
    SCORING: "waiting for reward",
    HANDING_OUT: "taking its batch",
}

WINDOWS = (300, 900, 3600)  # The seconds that a display may look back
BUCKETS = 10  # Responses are shown in so many classes of length, each with as many responses


@dataclass(frozen=True)
class Stage:
    """Groups at one place of the pipeline. ``held``: of ``groups``, those in a worker's hands; ``per_minute``: that enter it;
    ``oldest_s``: seconds that the oldest one is there. None: not known."""

    name: str
    groups: float | None
    held: float | None
    per_minute: float
    oldest_s: float | None


@dataclass(frozen=True)
class ServiceTimeline:
    """What a service did within the window. ``doing``: now; ``busy``: share of the time that it was seen, None for one that was
    not, or only answers others; ``shares``: of each activity."""

    service: str
    instance: str
    doing: str
    busy: float | None
    shares: dict[str, float]
    spans: list[ActivitySpan]


@dataclass(frozen=True)
class StepAge:
    """The staleness of a step's trained tokens, in versions."""

    step: int
    mean: float
    largest: int


@dataclass(frozen=True)
class Ages:
    """Staleness against its bound. ``tokens``: trained ones by their age in versions; ``steps``: the newest, oldest first."""

    bound: int
    policy: str
    tokens: dict[int, int]
    steps: list[StepAge]


@dataclass(frozen=True)
class LengthClass:
    """Responses of ``shortest`` to ``longest`` tokens: how many, and what became of their tokens."""

    shortest: int
    longest: int
    samples: int
    trained: int
    masked: int
    dropped: int


@dataclass(frozen=True)
class FlowView:
    """The pipeline. Times are seconds since the epoch; ``live``: services are there now. ``waits``: share of the trainer's time by what it
    waited for. ``parts``: shares of a step's time, in the order of a step. ``dropped``: groups that were dropped, by reason.
    ``waiting_for``: what the next step waits for, ``waiting_since`` then (0: not known); ``stalled``: that is out of the ordinary."""

    at: float
    begin: float
    end: float
    live: bool
    bottleneck: Bottleneck
    waits: dict[str, float]
    parts: dict[str, float]
    stages: list[Stage]
    services: list[ServiceTimeline]
    ages: Ages
    lengths: list[LengthClass]
    dropped: dict[str, int]
    waiting_for: str = ""
    waiting_since: float = 0.0
    stalled: bool = False


def flow_view(
    history: FlowHistory,
    config: RunConfig,
    statuses: Sequence[ServiceStatus],
    now: float,
    window_s: float,
    alarmed: Collection[AlarmKind] = (),
    wait: Stall | None = None,
    cores_awaited: float = 0.0,
) -> FlowView:
    """Returns the pipeline at ``now``, of a run at rest at its last record, looking back ``window_s`` seconds.

    Args:
        statuses: what the registry holds; empty where the run is at rest or the bus away. alarmed: alarms that stand. wait: what the
            run waits for, where the caller knows more than the statuses say. cores_awaited: as `Workload` has it.
    """
    if wait is None and statuses:
        wait = run_stall(RunSituation.of(config, statuses))
    if history.finished:
        wait = None
    statuses = [shown(status) for status in statuses if status.service != ENVIRONMENT]
    live = bool(statuses)
    end = now if live else history.newest
    window = (max(end - window_s, min(history.oldest or end, end - 1.0)), end)
    load = replace(workload(history, window, _blocked(history, statuses, wait, now)), cores_awaited=cores_awaited if live else 0.0)
    trains = [(TRAINING, max(0.0, 1 - load.waiting))] if load.steps else []
    return FlowView(
        at=now,
        begin=window[0],
        end=end,
        live=live,
        bottleneck=bottleneck(load, config, alarmed),
        waits=sums([*trains, *((WAITS[cause], share) for cause, share in load.waits.items())]),
        parts=step_parts(history, window),
        stages=stages(history, statuses, window),
        services=timelines(history, statuses, window),
        ages=_ages(history, config, window),
        lengths=length_classes(history.lengths),
        dropped=dict(history.dropped.most_common()),
        waiting_for=wait.words(now, clock=False) if wait is not None else "",
        waiting_since=wait.since if wait is not None else 0.0,
        stalled=wait is not None and wait.worth_a_line(now),
    )


# A step's parts by their metrics, in its order, in the words of the trainer's timeline
PARTS = {"idle": WAITING, "prepare": "preparing", "log_probs": "log-probs", "gradient": "gradient", "optimizer": "optimizer step"}
PARTS |= {"push": "pushing weights", "save": "saving", "rest": "rest"}


def step_parts(history: FlowHistory, window: Interval) -> dict[str, float]:
    """Returns the share of each part in the time of the steps that ended within a window; none where no step has measured them."""
    measured = [history.metrics.get(step.step, {}) for step in history.steps_in(window)]
    spent = {name: sum(step.get(f"perf/train_{part}_time", 0.0) for step in measured) for part, name in PARTS.items()}
    whole = sum(spent.values())
    return {name: seconds / whole for name, seconds in spent.items() if seconds > 0} if whole > 0 else {}


def doing(status: ServiceStatus) -> str:
    """Returns what a service does, as far as its status says."""
    gauges = status.gauges
    if status.held_back:
        return "held back"
    if status.state != "ready":
        return status.state
    match status.service:
        case "rollout":
            return GENERATING if gauges.get("running_groups", 0) > 0 else WAITING
        case "reward":
            return RATING if gauges.get("scoring", 0) > 0 else WAITING
        case _:
            return "ready"


# --- who waits


def _blocked(history: FlowHistory, statuses: Sequence[ServiceStatus], wait: Stall | None, now: float) -> str:
    """Returns what keeps a live run from continuing; before its first steps, what it waits for."""
    if wait is None:
        return ""
    at_work = {status.service for status in statuses if status.state == "ready" or (status.service == "rollout" and status.version >= 0)}
    begun = len(history.steps) >= FEW_STEPS and at_work >= {"buffer", "rollout", "reward", "trainer"}
    return "" if begun and wait.cause not in TROUBLES else wait.words(now, clock=False)


# --- stages


def stages(history: FlowHistory, statuses: Sequence[ServiceStatus], window: Interval) -> list[Stage]:
    """Returns the places of the pipeline in order."""
    buffer = newest_gauges(statuses, "buffer")
    running = [status.gauges["running_groups"] for status in statuses if "running_groups" in status.gauges]
    end, outstanding, ready = window[1], history.outstanding, history.ready
    waiting, held = buffer.get("queue_generated"), buffer.get("queue_generated_held")
    batched = history.batched

    def rate(what: str) -> float:
        return history.per_minute(what, window)

    def age(since: Iterable[float | None]) -> float | None:
        first = next(iter(since), None)
        return None if not first else max(0.0, end - first)

    return [
        Stage("tasks", buffer.get("queue_task"), None, rate(ADMITTED), age(outstanding)),
        Stage("generating", sum(running) if running else None, None, rate(GENERATED), None),
        Stage("scoring", None if waiting is None else waiting + (held or 0), held, rate(SCORED), None),
        Stage("ready", buffer.get("ready", len(ready)), None, rate(SCORED), age(ready)),
        Stage("training", len(batched), None, rate(TRAINED), age([history.batch_since])),
    ]


# --- services


def timelines(history: FlowHistory, statuses: Sequence[ServiceStatus], window: Interval) -> list[ServiceTimeline]:
    """Returns what every service did that is there or was seen within the window, the trainer last."""
    now = {status.instance: status for status in statuses}
    kinds = dict(history.kinds) | {status.instance: status.service for status in statuses}
    if history.steps and "trainer" not in kinds.values():
        kinds["trainer"] = "trainer"
    names = sorted(kinds, key=lambda instance: (ORDER.get(kinds[instance], -1), instance))
    found = [_timeline(history, kinds[instance], instance, now.get(instance), window) for instance in names]
    return [line for line in found if line.spans or line.instance in now]


def _timeline(history: FlowHistory, service: str, instance: str, status: ServiceStatus | None, window: Interval) -> ServiceTimeline:
    spans = laid_over(_layers(history, service, instance, window, live=status is not None), window)
    seconds = seconds_of(spans)
    seen = sum(seconds.values())
    shares = {activity: spent / seen for activity, spent in seconds.items()}
    newest = doing(status) if status is not None else AWAY
    if newest == "ready" and spans and service == "trainer":
        newest = spans[-1].activity
    busy = sum(share for activity, share in shares.items() if activity in BUSY) if seen and service in WORKERS else None
    return ServiceTimeline(service, instance, newest, busy, shares, shown_spans(spans, window))


def _layers(history: FlowHistory, service: str, instance: str, window: Interval, *, live: bool) -> list[Sequence[ActivitySpan]]:
    looks, absences = history.looks.get(instance, ()), history.absences(instance)
    if service == "rollout":
        pauses, back = history.pauses.get(instance, ()), history.generated.get(instance, ())
        # from its first group to its last: what it did not generate in, it waited
        between = [ActivitySpan(WAITING, min(begin for begin, _ in back), max(end for _, end in back))] if back else []
        return [between, absences, list(looks), generating(history, instance), list(pauses)]
    if service == "trainer":
        trainer = []
        for step in history.steps_in((window[0], float("inf"))):
            trainer += [ActivitySpan(WAITS[cause], *interval) for cause, interval in causes_of(history, step)]
            trainer.append(ActivitySpan(TRAINING, step.started, step.ended))
        if live and history.trained_until is not None:
            since = history.batch_since
            begin = max(since, history.trained_until) if since is not None else history.trained_until
            trainer.append(ActivitySpan("waiting for its batch", history.trained_until, begin if since is not None else window[1]))
            trainer += [ActivitySpan(TRAINING, begin, window[1])] if since is not None else []
        return [list(looks), trainer, absences, [span for span in looks if span.activity != "ready"]]
    return [absences, list(looks)]


# --- staleness and lengths


def _ages(history: FlowHistory, config: RunConfig, window: Interval) -> Ages:
    tokens: Counter[int] = Counter()
    steps = []
    for step in history.steps_in(window):
        tokens.update(step.ages)
        if count := sum(step.ages.values()):
            steps.append(StepAge(step.step, sum(age * number for age, number in step.ages.items()) / count, max(step.ages)))
    return Ages(config.rollout.max_staleness, config.rollout.staleness_policy, dict(sorted(tokens.items())), steps)


def length_classes(lengths: dict[int, TokensByLength]) -> list[LengthClass]:
    """Returns responses in at most `BUCKETS` classes of length, about as many in each; all of one length are in one class."""
    whole, taken = sum(item.samples for item in lengths.values()), 0
    classes: dict[int, list[int]] = {}
    for length in sorted(lengths):
        classes.setdefault(min(BUCKETS - 1, taken * BUCKETS // max(whole, 1)), []).append(length)
        taken += lengths[length].samples
    found = []
    for members in classes.values():
        items = [lengths[length] for length in members]
        sums = (sum(getattr(item, name) for item in items) for name in ("samples", "trained", "masked", "dropped"))
        found.append(LengthClass(members[0], members[-1], *sums))
    return found


LEDGER = ">"  # All records of the ledger
TAIL = 20_000  # The newest records of a ledger that are read


class StreamReader(Protocol):
    """Reads a stream as `shared.bus.streams.read` does."""

    def __call__(
        self, stream: str, model: type[Entry], subject: str = ">", *, after: int = 0, strict: bool = True
    ) -> AsyncIterator[tuple[int, Entry]]: ...


class FlowReader:
    """Reads what is new in a run.

    Args:
        read: reads streams. last: the sequence of the ledger's newest record when the reading begins. take: is given each record, too.
    """

    def __init__(self, run: str, read: StreamReader, last: int, take: Callable[[LedgerRecord], None] | None = None) -> None:
        self.history, self._take = FlowHistory(), take
        self._names, self._read = Subjects(run), read
        self._seen = {LEDGER: max(0, last - TAIL)}

    @property
    def sequence(self) -> int:
        """Returns the sequence of the newest record of the ledger that was read."""
        return self._seen[LEDGER]

    async def catch_up(self) -> bool:
        """Reads on to the streams' present ends; returns whether there was anything new."""
        history, names, before = self.history, self._names, dict(self._seen)
        async for record in self._new(LEDGER, names.ledger_stream, LedgerRecord):
            history.apply(record)
            if self._take is not None:
                self._take(record)
        async for pushed in self._new(names.event("weights", "pushed"), names.events_stream, WeightsPushed):
            history.push(pushed)
        async for event in self._new(names.event("service", "*"), names.events_stream, ServiceEvent):
            history.service_event(event)
        async for written in self._new(names.event("trainer", "metrics"), names.events_stream, MetricsWritten):
            history.metric(written)
        history.forget()
        return before != self._seen

    async def _new(self, subject: str, stream: str, model: type[Entry]) -> AsyncIterator[Entry]:
        """Yields what a subject of a stream holds beyond what was read. Of events, those that cannot be decoded are left out."""
        async for sequence, entry in self._read(stream, model, subject, after=self._seen.get(subject, 0), strict=subject == LEDGER):
            yield entry
            self._seen[subject] = sequence

    def observe(self, statuses: Sequence[ServiceStatus], now: float) -> None:
        """Takes the statuses of the services as they are at ``now``, seconds since the epoch."""
        for status in statuses:
            self.history.observe(status.service, status.instance, doing(status), now)
