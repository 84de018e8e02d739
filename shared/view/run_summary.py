"""The summary of a run, from its ledger and its events. Pure but for `collect`, which reads them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from shared import __version__
from shared.bus import streams
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.schema.ledger import BatchTrained, EvalEnded, EvalScored, GroupsScored, LedgerRecord, ValuesChanged
from shared.schema.ledger_audit import Audit
from shared.schema.messages import Trained
from shared.schema.service_messages import WarmStartEnded
from shared.view.alarms import Alarm, alarms, standing
from shared.view.flow_history import FlowHistory, Interval, measure, overlap
from shared.view.flow_view import FlowReader
from shared.view.group_history import GroupHistory, GroupRecord

EDGE = 0.1  # The part of the steps that "first" and "last" reward are means of
LATE = "had not come back at eval_timeout"  # Why a held-out prompt has no rewards although nothing has failed

# Metrics of a `Trained`: sum of |engine's − trainer's log-prob| over tokens that both computed under one version, and their number
DIFF_SUM, DIFF_COUNT = "agreement_abs_diff", "agreement_tokens"


@dataclass(frozen=True)
class EvaluationSummary:
    """An evaluation of the held-out set ``dataset`` that has ended. ``step``: training steps in the weights; ``samples``: those that the
    figures are of, which are those of `shared.schema.messages.EvalFigures`."""

    dataset: str
    version: int
    step: int
    mean_reward: float
    samples: int
    failed: int
    late: int = 0
    prompts: int = 0
    newest: int = 0
    lag: int = 0
    rates: dict[str, float] = field(default_factory=dict)
    lengths: dict[str, float] = field(default_factory=dict)
    truncated: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class GroupCounts:
    """The number of admitted groups that came to each end, by reason. ``faults``: the dead ones by what was at fault."""

    admitted: int
    trained: int
    dropped: dict[str, int]
    dead: dict[str, int]
    in_flight: int
    faults: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WarmStart:
    """The supervised warm start: its optimizer steps, the loss (nats a token) of the first and the last of them (means of `EDGE`)."""

    steps: int
    loss_first: float
    loss_last: float


@dataclass(frozen=True)
class Summary:
    """The content of summary.json. Times in seconds; what was not measured is None.

    accuracy_before/after: mean reward of the first held-out set under version 0 and under the newest evaluated version after it;
    ``evaluations`` has every set by its name.
    max_staleness: the run's bound; the other staleness figures are over the samples of all batches.
    overlap_seconds: how long some group was generated while some step was trained, of generation_seconds and training_seconds, in
    which at least one was. trained_tokens: by the trainer's attestations, else of responses.
    eval_failed: held-out prompts that failed, by reason. errors: what each service that failed or was restarted last ended with. waits:
    the newest waits out of the ordinary, how long and what for. alarms: as `shared.view.alarms.Alarm` has them, where they are known.
    version: of Myxo, at the run's end. changes: of the training's values, from which step on, and as `shared.schema.ledger.ValuesChanged`.
    mean_abs_logprob_diff: between engine and trainer, over tokens that both computed under the same weight version.
    """

    run: str
    steps: int
    accuracy_before: float | None
    accuracy_after: float | None
    max_staleness: int
    max_staleness_seen: int
    mean_staleness: float | None
    staleness_histogram: dict[str, int]
    overlap_seconds: float
    generation_seconds: float
    training_seconds: float
    reward_first: float | None
    reward_last: float | None
    mean_abs_logprob_diff: float | None
    warm_start: WarmStart | None
    trained_tokens: int
    wall_seconds: float
    groups: GroupCounts
    restarts: dict[str, int]
    finished: bool
    audit: str | list[str]
    evaluations: list[EvaluationSummary]
    eval_failed: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    waits: list[str] = field(default_factory=list)
    alarms: list[dict[str, str]] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    version: str = __version__


class SummaryTally:
    """Takes the ledger records and events of a run, and returns the `Summary`."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.rewards: list[float] = []
        """Mean reward of each trained step's samples (`rollout/raw_reward`), in order of the steps; NaN where none is known."""
        self.warm_start: WarmStartEnded | None = None  # The newest report of a warm start: one that was interrupted began anew
        self.flow = FlowHistory()  # What the alarms are judged by, and the services' failures: of the same reading, as `collect` sets it
        self._audit = Audit(config.rollout.max_staleness, config.rollout.rollout_batch_size)
        self._history = GroupHistory()
        self._generation: list[Interval] = []
        self._training: list[Interval] = []
        self._evaluations: dict[tuple[str, int], EvaluationSummary] = {}
        self._tokens = 0
        self._diffs: dict[int, tuple[float, float]] = {}
        self._eval_failed: Counter[str] = Counter()
        self._changes: list[ValuesChanged] = []
        self._times: tuple[float, float] | None = None  # of the first and the last record

    def apply(self, record: LedgerRecord) -> None:
        """Takes a record; they come in the ledger's order."""
        self._audit.see(record)
        changed = self._history.apply(0, record)
        self._times = (self._times[0] if self._times is not None else record.at, record.at)
        match record:
            case GroupsScored():
                self._generation.extend((group.started, group.ended) for group in changed)
            case BatchTrained(step=step, started=started, ended=ended, attestation=attested):
                self._training.append((started, ended))
                self._tokens += sum(sum(group.tokens) for group in changed) if attested is None else attested.tokens
                self._trained(step, changed)
            case ValuesChanged():
                self._changes.append(record)
            case EvalScored(rewards=[], reason=reason):
                self._eval_failed[reason] += 1
            case EvalEnded():
                self._eval_failed[LATE] += record.late
                if record.reason:  # an evaluation function's: no prompt of it failed by itself
                    self._eval_failed[record.reason] += record.failed
                if not record.samples:
                    return
                step = self.config.steps_of_version(record.version)
                names = [item.name for item in fields(EvaluationSummary) if item.name != "step"]
                found = EvaluationSummary(step=step, **{name: getattr(record, name) for name in names})
                self._evaluations[record.dataset, record.version] = found

    def apply_step(self, event: Trained) -> None:
        """Takes a trainer's report. A restarted trainer makes steps again and reports them again: the first report counts."""
        if DIFF_SUM in event.metrics and DIFF_COUNT in event.metrics:
            self._diffs.setdefault(event.step, (event.metrics[DIFF_SUM], event.metrics[DIFF_COUNT]))

    def summary(self) -> Summary:
        """Returns the summary of all that was taken."""
        report = self._audit.report()
        evaluations = [self._evaluations[key] for key in sorted(self._evaluations)]
        first_set = next((item.name for item in self.config.eval.named.values()), None)
        own = {found.version: found.mean_reward for found in evaluations if found.dataset == first_set}
        newest = max(own, default=0)
        first, last = _edges(self.rewards)
        return Summary(
            run=self.config.run.name,
            steps=report.steps,
            accuracy_before=own.get(0),
            accuracy_after=own[newest] if newest > 0 else None,
            max_staleness=self.config.rollout.max_staleness,
            max_staleness_seen=report.max_staleness,
            mean_staleness=_ratio(sum(age * count for age, count in report.staleness.items()), report.staleness.total()),
            staleness_histogram={str(age): report.staleness[age] for age in sorted(report.staleness)},
            overlap_seconds=overlap(self._generation, self._training),
            generation_seconds=measure(self._generation),
            training_seconds=measure(self._training),
            reward_first=first,
            reward_last=last,
            mean_abs_logprob_diff=_ratio(sum(total for total, _ in self._diffs.values()), sum(count for _, count in self._diffs.values())),
            warm_start=self._warm_start(),
            trained_tokens=self._tokens,
            wall_seconds=self._times[1] - self._times[0] if self._times is not None else 0.0,
            groups=GroupCounts(
                report.admitted, report.trained, dict(report.dropped), dict(report.dead), report.in_flight, dict(report.faults)
            ),
            eval_failed=dict(+self._eval_failed),
            restarts=dict(self.flow.failures.restarts),
            errors=dict(self.flow.failures.errors),
            waits=list(self.flow.failures.waits),
            finished=report.finished,
            audit="ok" if report.ok else list(report.violations),
            evaluations=evaluations,
            alarms=[alarm.plain() for alarm in self.alarms()],
            changes=[{"step": record.step, "changed": list(record.changed)} for record in self._changes],
        )

    def alarms(self) -> list[Alarm]:
        """Returns the alarms that stand at the last record."""
        found = standing(self.flow, (), {}, None, live=False)
        whole = {step: reward for step, reward in enumerate(self.rewards) if math.isfinite(reward)}  # events of a long run are dropped
        return alarms(replace(found, rewards=found.rewards if 0 in found.rewards else whole), self.config)

    def _trained(self, step: int, groups: Sequence[GroupRecord]) -> None:
        rewards = [reward for group in groups for reward in group.rewards]
        self.rewards.extend([math.nan] * (step - len(self.rewards)))
        if step == len(self.rewards):  # the audit reports one that was trained twice
            self.rewards.append(sum(rewards) / len(rewards) if rewards else math.nan)

    def _warm_start(self) -> WarmStart | None:
        if self.warm_start is None:
            return None
        first, last = _edges(self.warm_start.losses)
        return WarmStart(self.warm_start.steps, first, last) if first is not None and last is not None else None


def _edges(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Returns the means of the first and of the last `EDGE` of the values, of those that are numbers."""
    edge = math.ceil(len(values) * EDGE)
    parts = ([value for value in part if not math.isnan(value)] for part in (values[:edge], values[len(values) - edge :]))
    first, last = (_ratio(sum(known), len(known)) for known in parts)
    return first, last


def _ratio(total: float, count: float) -> float | None:
    return total / count if count else None


async def collect(bus: Bus, config: RunConfig) -> SummaryTally:
    """Reads the ledger and the events of a run, each once."""
    tally, names = SummaryTally(config), Subjects(config.run.name)
    reader = FlowReader(config.run.name, partial(streams.read, bus), 0, tally.apply)
    tally.flow = reader.history
    await reader.catch_up()
    async for _, step in streams.read(bus, names.events_stream, Trained, names.event("trainer", "step"), strict=False):
        tally.apply_step(step)
    async for _, ended in streams.read(bus, names.events_stream, WarmStartEnded, names.event("trainer", "warm_start"), strict=False):
        tally.warm_start = ended
    return tally
