"""The newest part of a run's ledger and events, folded: steps with why they began no earlier, activities of services, ends of groups. Pure.

A step's batch is complete with the last of its groups to be scored, so that the wait before a step is divided by what this group's way was:
its admission, its place in the queue, its generation, its scoring. What came before is the trainer's own: its restart, checkpoints, and
pushes that it stood still for.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shared.bus.registry import ENGINE_NODE, NODE
from shared.runtime.errors import Fault
from shared.schema.ledger import (
    BatchAmended,
    BatchFormed,
    BatchTrained,
    GroupDead,
    GroupRequeued,
    GroupsAdmitted,
    GroupsDropped,
    GroupsScored,
    LedgerRecord,
    RunFinished,
    group_id,
)
from shared.schema.messages import SampleMeta, ScoredGroup
from shared.schema.service_messages import MetricsWritten, ServiceEvent
from shared.schema.weight_messages import WeightsPushed
from shared.view.run_view import FAILED, RESTARTED, ServiceFailures

Interval = tuple[float, float]  # (start, end) in seconds; one that ends before it starts holds nothing


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the same points as disjoint intervals in ascending order; touching ones become one."""
    merged: list[Interval] = []
    for start, end in sorted(pair for pair in intervals if pair[1] > pair[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def measure(intervals: Iterable[Interval]) -> float:
    """Returns the seconds that the set covers, points in several intervals counted once."""
    return sum(end - start for start, end in union(intervals))


def overlap(left: Iterable[Interval], right: Iterable[Interval]) -> float:
    """Returns the seconds in which both sets have something: |A ∩ B| = |A| + |B| − |A ∪ B|."""
    left, right = union(left), union(right)
    return max(0.0, measure(left) + measure(right) - measure([*left, *right]))


# The most spans of one service in an answer; shorter ones than this part of the window are left out of it, never out of shares
SPANS_SHOWN = 600


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
            activity = ordered[max(active)].activity
            continues = found and (found[-1].activity, found[-1].end) == (activity, at)
            found.append(ActivitySpan(activity, found.pop().begin if continues else at, following))
    return found


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


RESTARTING, SAVING, PUSHING = "restarting", "saving", "pushing"
ADMISSION, QUEUE, GENERATION, SCORING = "admission", "queue", "generation", "scoring"
HANDING_OUT = "handing out"  # From the last group's score to the step's start: forming the batch, and reading it


@dataclass(frozen=True, slots=True)
class GroupPassage:
    """When a group passed where, seconds since the epoch; 0: not known, long ago. ``generated``: its generation on ``replica`` ended."""

    group: str
    replica: str
    admitted: float
    started: float
    generated: float
    scored: float


def wait_causes(
    wait: Interval, last: GroupPassage | None, saving: float = 0.0, stall: float = 0.0, back: float = 0.0
) -> list[tuple[str, Interval]]:
    """Returns the parts of a wait in order, each with its cause; together they are the wait.

    Args:
        last: the group of the batch that was scored last; None: not known. saving, stall: the seconds that a checkpoint and a push of
            weights took of it; both come first. back: when a trainer that had died in it was back, 0 where none had.
    """
    begin, end = wait
    own = max(begin, back)
    marks = [(RESTARTING, back), (SAVING, own + saving), (PUSHING, own + saving + stall)]
    if last is not None:
        marks += [(ADMISSION, last.admitted), (QUEUE, last.started), (GENERATION, last.generated), (SCORING, last.scored)]
    found, now = [], begin
    for cause, until in [*marks, (HANDING_OUT, end)]:
        if (until := min(until, end)) > now:  # the clocks of two machines differ: no part goes back
            found.append((cause, (now, until)))
            now = until
    return found


KEPT_SECONDS = 3600.0  # What ended longer ago than this, by the newest time seen, is forgotten

# What is counted of groups
ADMITTED, GENERATED, SCORED, TRAINED, DROPPED, REQUEUED, DEAD = "admitted", "generated", "scored", "trained", "dropped", "requeued", "dead"
STALE = "stale"  # Why a group is dropped for its age (`services.buffer.policy`); such groups are counted for themselves, too

PAUSED = "paused for a push"  # What a replica does while it takes new weights
ABSENT = "not there"
JOINED, LEFT = "joined", "left"
GONE = (FAILED, LEFT, RESTARTED)  # The event of a service that begins, and those of one that ends
MOST_STEPS = 2000
MOST_TOLD = 500  # The most steps, and the most dead groups and events of services, that are remembered
REWARD = "rollout/raw_reward"  # The metric of a step's mean reward
OF_STEPS = ("train/", "rollout/", "perf/train_")  # The metrics that are kept, by how their names begin
LOOK_GAP_S = 15.0  # Two looks at a service that lie further apart than this say nothing about the time between them


@dataclass(slots=True)
class _OpenGroup:
    """A group in flight. ``scored_at``: None while it is with the rollout and reward services."""

    admitted: float
    group: ScoredGroup | None = None
    scored_at: float | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that was trained. ``wait_from``: the end of the one before, None where it is not known; ``last``: of its groups, the one that
    was scored last; ``ages``: trained tokens by their staleness in versions. Groups teach nothing where all their rewards are equal.
    ``reward``: the samples' mean, ``lowest`` and ``highest`` of them; nan where none is known.
    """

    step: int
    version: int
    wait_from: float | None
    started: float
    ended: float
    last: GroupPassage | None
    ages: dict[int, int]
    masked_tokens: int = 0
    groups: int = 0
    equal_rewards: int = 0
    samples: int = 0
    truncated: int = 0
    unread: int = 0
    reward: float = math.nan
    lowest: float = math.nan
    highest: float = math.nan


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """A group that ended without being trained, at ``at`` (seconds since the epoch), for ``reason``. ``fault``: what was at fault there, if
    it was told."""

    group: str
    reason: str
    at: float
    fault: Fault = ""


@dataclass
class TokensByLength:
    """Tokens of the responses of one length that were trained, masked for their age, and lost with a group that was not trained."""

    samples: int = 0
    trained: int = 0
    masked: int = 0
    dropped: int = 0


@dataclass
class FlowHistory:
    """The fold. Times are seconds since the epoch.

    ``generated``: of each replica, when it generated groups that have come back. ``pauses``: of each, when a push kept it from that.
    ``looks``: of each service, what it was seen to do, and ``kinds`` its kind. ``lengths``: tokens by the length of their response.
    ``metrics``: by step, as the trainer wrote them.
    """

    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    pushes: deque[WeightsPushed] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    generated: dict[str, deque[Interval]] = field(default_factory=dict)
    pauses: dict[str, deque[ActivitySpan]] = field(default_factory=dict)
    looks: dict[str, deque[ActivitySpan]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    lengths: dict[int, TokensByLength] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    dead: deque[DeadGroup] = field(default_factory=lambda: deque(maxlen=MOST_TOLD))
    events: deque[ServiceEvent] = field(default_factory=lambda: deque(maxlen=MOST_TOLD))
    failures: ServiceFailures = field(default_factory=ServiceFailures)
    rewards: dict[int, float] = field(default_factory=dict)  # By step, as the trainer wrote them, however many there are
    newest: float = 0.0
    oldest: float = 0.0  # The times of the last and of the first that was taken
    counted_from: float = 0.0  # The time of the first record, of a ledger whose tail alone is read
    finished: bool = False
    trained_until: float | None = None  # The end of the newest step
    _open: dict[str, _OpenGroup] = field(default_factory=dict)
    _batches: dict[int, BatchFormed] = field(default_factory=dict)
    _counted: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)

    # --- what it takes

    def apply(self, record: LedgerRecord) -> None:
        """Takes a record of the ledger; they come in order."""
        self._saw(record.at)
        self.counted_from = self.counted_from or record.at
        match record:
            case GroupsAdmitted(first=first, count=count):
                self.finished = False  # a finished run can be given more steps
                self._open |= {group_id(index): _OpenGroup(record.at) for index in range(first, first + count)}
                self._count(ADMITTED, record.at, count)
            case GroupsScored(groups=groups):
                for group in groups:
                    self._scored(group, record.at)
            case GroupRequeued(group=name, partial=partial):
                self._requeued(name, record.at, lost=partial is None)
            case GroupsDropped(groups=names, reason=reason):
                self.dropped[reason] += len(names)
                self._count(DROPPED, record.at, len(names))
                self._count(STALE, record.at, len(names) * (reason == STALE))
                self._lose(names)
            case GroupDead(group=name, reason=reason, fault=fault):
                self.dead.append(DeadGroup(name, reason, record.at, fault))
                self._count(DEAD, record.at, 1)
                self._lose([name])
            case BatchFormed():
                self._batches[record.step] = record
            case BatchAmended(step=step, removed=removed, added=added) if step in self._batches:
                kept = [name for name in self._batches[step].groups if name not in removed]
                self._batches[step] = self._batches[step].model_copy(update={"groups": kept + added})
            case BatchTrained():
                self._trained(record)
            case RunFinished():
                self.finished = True

    def metric(self, written: MetricsWritten) -> None:
        """Takes what a trainer process has measured of a step; warm starts, pushes and evaluations count steps of their own."""
        own = {name: value for name, value in written.values.items() if name.startswith(OF_STEPS)}
        if written.role == "actor" and own:
            self.metrics.setdefault(written.step, {}).update(own)
            if REWARD in own:
                self.rewards[written.step] = own[REWARD]
            if len(self.metrics) > MOST_STEPS:
                del self.metrics[min(self.metrics)]

    def push(self, pushed: WeightsPushed) -> None:
        """Takes a push of weights that has ended."""
        self.pushes.append(pushed)
        for part in pushed.replicas:
            if part.paused:
                self.pauses.setdefault(part.replica, deque()).append(ActivitySpan(PAUSED, pushed.at - part.paused, pushed.at))

    def service_event(self, event: ServiceEvent) -> None:
        """Takes an event of a service. One that begins again was restarted, where no launcher tells of it, too; a node's role tells."""
        if event.what == JOINED and event.service not in (NODE, ENGINE_NODE) and self._died(event.instance):
            self.service_event(event.model_copy(update={"what": RESTARTED, "detail": ""}))
        self.events.append(event)
        if math.isfinite(event.at):
            self._saw(event.at)
        self.failures.take(event)

    def observe(self, service: str, instance: str, activity: str, at: float) -> None:
        """Takes what a service does at ``at``, and has done since it was last observed."""
        self._saw(at)
        self.kinds[instance] = service
        spans = self.looks.setdefault(instance, deque())
        before = spans[-1] if spans and at - spans[-1].end < LOOK_GAP_S else ActivitySpan(activity, at, at)
        if before.activity != activity:
            spans.append(ActivitySpan(activity, before.end, at))
        elif spans and spans[-1] is before:
            spans[-1] = ActivitySpan(activity, before.begin, at)
        else:
            spans.append(before)

    def forget(self) -> None:
        """Forgets what ended more than `KEPT_SECONDS` ago."""
        limit = self.newest - KEPT_SECONDS
        for counted in self._counted.values():
            while counted and counted[0][0] < limit:
                counted.popleft()
        for intervals in self.generated.values():
            while intervals and intervals[0][1] < limit:
                intervals.popleft()
        for spans in (*self.pauses.values(), *self.looks.values()):
            while spans and spans[0].end < limit:
                spans.popleft()
        self.looks = {instance: spans for instance, spans in self.looks.items() if spans}
        self.generated = {replica: spans for replica, spans in self.generated.items() if spans}

    # --- its figures

    def failures_since(self, at: float) -> ServiceFailures:
        """Returns the failures and restarts since ``at`` (seconds since the epoch), of those that are remembered."""
        found = ServiceFailures()
        for event in self.events:
            if event.at >= at:
                found.take(event)
        return found

    @property
    def outstanding(self) -> list[float]:
        """Returns when each group that is with the rollout and reward services was admitted, the oldest first."""
        return sorted(group.admitted for group in self._open.values() if group.scored_at is None)

    @property
    def ready(self) -> list[float]:
        """Returns when each group that waits for its batch was scored, the oldest first."""
        batched = self.batched
        return sorted(group.scored_at for name, group in self._open.items() if group.scored_at is not None and name not in batched)

    @property
    def batched(self) -> set[str]:
        """Returns the groups of batches that are not trained yet."""
        return {name for batch in self._batches.values() for name in batch.groups}

    @property
    def batch_since(self) -> float | None:
        """Returns when the batch was formed that is in training now; None while there is none."""
        return min((batch.at for batch in self._batches.values()), default=None)

    def _died(self, instance: str) -> bool:
        """Returns whether a service has begun, and neither left in order since nor was restarted."""
        told = [event.what for event in self.events if event.instance == instance and event.what in (JOINED, *GONE)]
        return told[-1:] in ([JOINED], [FAILED]) or told[-2:] == [FAILED, LEFT]

    def absences(self, instance: str) -> list[ActivitySpan]:
        """Returns when a service was not there, by what was told of it: from its failure, leave or restart until it joined again."""
        found, since = [], None
        for event in self.events:
            if event.instance != instance:
                continue
            if event.what in GONE:
                since = event.at if since is None else since
            elif event.what == JOINED and since is not None:
                found.append(ActivitySpan(ABSENT, since, event.at))
                since = None
        return found

    def back_at(self, wait: Interval) -> float:
        """Returns when a trainer that died within ``wait`` was ready again; 0 where none did."""
        joined = (event for event in self.events if event.service == "trainer" and event.what == JOINED)
        names = {event.instance for event in joined if wait[0] < event.at <= wait[1]}
        absent = [span.end for name in names for span in self.absences(name)]
        loading = [span.end for name in names for span in self.looks.get(name, ()) if span.activity != "ready"]
        return max((end for end in (*absent, *loading) if wait[0] < end <= wait[1]), default=0.0)

    def per_minute(self, what: str, window: Interval) -> float:
        """Returns how many groups a minute were, for example, `ADMITTED` within a window."""
        begin, end = max(window[0], self.counted_from), window[1]
        count = sum(number for at, number in self._counted.get(what, ()) if begin <= at <= end)
        return 60 * count / max(end - begin, 1.0)

    def steps_in(self, window: Interval) -> list[StepRecord]:
        """Returns the steps that ended within a window."""
        return [step for step in self.steps if window[0] <= step.ended <= window[1]]

    # --- groups

    def _saw(self, at: float) -> None:
        self.newest, self.oldest = max(self.newest, at), min(self.oldest or at, at)

    def _count(self, what: str, at: float, number: int) -> None:
        self._counted.setdefault(what, deque()).append((at, number))

    def _scored(self, group: ScoredGroup, at: float) -> None:
        known = self._open.setdefault(group.group, _OpenGroup(0.0))
        known.group, known.scored_at = group, at
        self.generated.setdefault(group.replica, deque()).append((group.started, group.ended))
        self.kinds.setdefault(group.replica, "rollout")
        self._count(GENERATED, group.ended, 1)
        self._count(SCORED, at, 1)

    def _requeued(self, name: str, at: float, lost: bool) -> None:
        self._count(REQUEUED, at, 1)
        if (known := self._open.get(name)) is not None:
            if lost:
                self._tokens_lost(known)
            known.group = known.scored_at = None

    def _lose(self, names: Iterable[str]) -> None:
        for name in names:
            if (known := self._open.pop(name, None)) is not None:
                self._tokens_lost(known)

    def _tokens_lost(self, known: _OpenGroup) -> None:
        for sample in known.group.samples if known.group is not None else ():
            self._by_length(sample).dropped += sample.trained or sample.tokens

    def _by_length(self, sample: SampleMeta) -> TokensByLength:
        found = self.lengths.setdefault(sample.tokens, TokensByLength())
        found.samples += 1
        return found

    # --- steps

    def _trained(self, record: BatchTrained) -> None:
        batch = self._batches.pop(record.step, None)
        ways = [self._open.pop(name) for name in (batch.groups if batch is not None else ()) if name in self._open]
        self._count(TRAINED, record.at, len(ways))
        passages = [
            GroupPassage(group.group, group.replica, way.admitted, group.started, group.ended, way.scored_at or 0.0)
            for way in ways
            if (group := way.group) is not None
        ]
        groups = [way.group for way in ways if way.group is not None]
        ages, masked = self._ages(record.version, batch.mask_below if batch is not None else 0, groups)
        last = max(passages, key=lambda passage: passage.scored, default=None)
        wait_from, self.trained_until = self.trained_until, record.ended
        times = (record.step, record.version, wait_from, record.started, record.ended)
        self.steps.append(StepRecord(*times, last, ages, masked, **_signal(groups)))

    def _ages(self, version: int, mask_below: int, groups: Iterable[ScoredGroup]) -> tuple[dict[int, int], int]:
        """Returns the trained tokens of a batch by their age, and how many were masked."""
        ages: Counter[int] = Counter()
        masked = 0
        for group in groups:
            for index, sample in enumerate(group.samples):
                by_length = self._by_length(sample)
                for of_version, tokens in sample.spans or ((sample.oldest, sample.trained),):
                    if index in group.removed:
                        by_length.dropped += tokens
                    elif of_version < mask_below:
                        by_length.masked, masked = by_length.masked + tokens, masked + tokens
                    elif tokens:
                        ages[version - of_version] += tokens
                        by_length.trained += tokens
        return dict(sorted(ages.items())), masked


def _signal(groups: Sequence[ScoredGroup]) -> dict[str, Any]:
    """Returns the figures of a `StepRecord` that say whether a batch can teach anything."""
    rewards = [reward for group in groups for reward in group.rewards]
    known = {"reward": sum(rewards) / len(rewards), "lowest": min(rewards), "highest": max(rewards)} if rewards else {}
    samples = [sample for group in groups for sample in group.samples]
    several = [group.rewards for group in groups if len(group.rewards) > 1]
    return {
        "groups": len(several),
        "equal_rewards": sum(len(set(rewards)) == 1 for rewards in several),
        "samples": len(samples),
        "truncated": sum(sample.finish == "length" for sample in samples),
        "unread": sum(len(group.unread) for group in groups),
        **known,
    }
