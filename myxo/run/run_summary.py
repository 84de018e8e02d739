"""What a run came to, from its ledger and its events. Pure but for `collect`, which reads them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from myxo.run.intervals import Interval, measure, overlap
from shared.bus import runs, stream_replay
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.schema.ledger import (
    BatchFormed,
    BatchTrained,
    EvalEnded,
    EvalScored,
    GroupDead,
    GroupRequeued,
    GroupsDropped,
    GroupsScored,
    LedgerRecord,
    ScoredGroup,
)
from shared.schema.ledger_audit import Audit
from shared.schema.messages import ServiceEvent, TrainerStep, WarmStartEnded

EDGE = 0.1
"""Part of the steps that "first" and "last" reward are means of."""

DIFF_SUM, DIFF_COUNT = "agreement_abs_diff", "agreement_tokens"
"""Metrics of a `TrainerStep`: sum of |engine's − trainer's log-prob| over tokens that both computed under one version, and their number."""


@dataclass(frozen=True)
class EvaluationSummary:
    """An evaluation of one held-out set that ended. ``dataset``: its name; ``step``: training steps in the weights; ``samples``: rewards
    that ``mean_reward`` is the mean of."""

    dataset: str
    version: int
    step: int
    mean_reward: float
    samples: int
    failed: int


@dataclass(frozen=True)
class GroupCounts:
    """Where the admitted groups ended, by reason where there are several."""

    admitted: int
    trained: int
    dropped: dict[str, int]
    dead: dict[str, int]
    in_flight: int


@dataclass(frozen=True)
class WarmStart:
    """The supervised warm start: its optimizer steps, the loss (nats a token) of the first and the last of them (means of `EDGE`)."""

    steps: int
    loss_first: float
    loss_last: float


@dataclass(frozen=True)
class Summary:
    """The content of summary.json. Times in seconds; what was not measured is None.

    accuracy_before/after: mean reward of the held-out set `eval_name` under version 0 and under the newest evaluated version after it;
    ``evaluations`` has every set by its name.
    max_staleness: the run's bound; the other staleness figures are over the samples of all batches.
    overlap_seconds: how long some group was generated while some step was trained, of generation_seconds and training_seconds, in
    which at least one was. trained_tokens: response tokens of the trained samples.
    eval_failed: held-out prompts that failed, by reason. errors: what each service that failed or was restarted last ended with.
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

    def as_json(self) -> dict[str, Any]:
        """Plain data for `json.dump`."""
        return asdict(self)


@dataclass
class SummaryTally:
    """Takes ledger records and events, gives the `Summary`.

    Args:
        config: the run's.
    """

    config: RunConfig
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each trained step's samples (`rollout/raw_reward`), in order of the steps; NaN where none is known."""

    warm_start: WarmStartEnded | None = None
    """The newest report of a warm start: one that was interrupted began anew."""

    def __post_init__(self) -> None:
        self._audit = Audit(self.config.rollout.max_staleness, self.config.rollout.rollout_batch_size)
        self._scored: dict[str, ScoredGroup] = {}
        self._batches: dict[int, list[ScoredGroup]] = {}
        self._generation: list[Interval] = []
        self._training: list[Interval] = []
        self._evaluations: dict[tuple[str, int], EvaluationSummary] = {}
        self._tokens = 0
        self._diffs: dict[int, tuple[float, float]] = {}
        self._restarts: Counter[str] = Counter()
        self._errors: dict[str, str] = {}
        self._eval_failed: Counter[str] = Counter()
        self._first_at: float | None = None
        self._last_at = 0.0

    def see(self, record: LedgerRecord) -> None:
        """Takes a record; they come in the ledger's order."""
        self._audit.see(record)
        self._first_at = record.at if self._first_at is None else self._first_at
        self._last_at = record.at
        match record:
            case GroupsScored(groups=groups):
                self._scored.update((group.group, group) for group in groups)
                self._generation.extend((group.started, group.ended) for group in groups)
            case GroupRequeued(group=name) | GroupDead(group=name):
                self._scored.pop(name, None)
            case GroupsDropped(groups=names):
                for name in names:
                    self._scored.pop(name, None)
            case BatchFormed(step=step, groups=names):
                self._batches[step] = [self._scored.pop(name) for name in names if name in self._scored]
            case BatchTrained(step=step, started=started, ended=ended):
                self._training.append((started, ended))
                self._trained(step, self._batches.pop(step, []))
            case EvalScored(rewards=[], reason=reason):
                self._eval_failed[reason] += 1
            case EvalEnded() if record.samples:
                self._evaluations[record.dataset, record.version] = EvaluationSummary(
                    dataset=record.dataset,
                    version=record.version,
                    step=min(record.version * self.config.weights.update_weights_interval, self.config.rollout.num_rollout),
                    mean_reward=record.mean_reward,
                    samples=record.samples,
                    failed=record.failed,
                )
            case _:
                pass

    def see_step(self, event: TrainerStep) -> None:
        """Takes a trainer's report. A restarted trainer makes steps again and reports them again: the first report counts."""
        if DIFF_SUM in event.metrics and DIFF_COUNT in event.metrics:
            self._diffs.setdefault(event.step, (event.metrics[DIFF_SUM], event.metrics[DIFF_COUNT]))

    def see_restart(self, event: ServiceEvent) -> None:
        """Takes the launcher's word that it started a service again."""
        self._restarts[event.instance] += 1
        self.see_failure(event)

    def see_failure(self, event: ServiceEvent) -> None:
        """Takes a service's word that it failed. A launcher says more of the same, and is to be heard after it."""
        if event.detail:
            self._errors[event.instance] = event.detail

    def summary(self) -> Summary:
        """The sum of all that was taken."""
        report = self._audit.report()
        samples = report.staleness.total()
        evaluations = [self._evaluations[key] for key in sorted(self._evaluations)]
        own = [evaluation for evaluation in evaluations if evaluation.dataset == self.config.eval.eval_name]
        compared = sum(count for _, count in self._diffs.values())
        edge = math.ceil(len(self.rewards) * EDGE)
        return Summary(
            run=self.config.run.name,
            steps=report.steps,
            accuracy_before=own[0].mean_reward if own and own[0].version == 0 else None,
            accuracy_after=own[-1].mean_reward if own and own[-1].version > 0 else None,
            max_staleness=self.config.rollout.max_staleness,
            max_staleness_seen=report.max_staleness,
            mean_staleness=sum(age * count for age, count in report.staleness.items()) / samples if samples else None,
            staleness_histogram={str(age): report.staleness[age] for age in sorted(report.staleness)},
            overlap_seconds=overlap(self._generation, self._training),
            generation_seconds=measure(self._generation),
            training_seconds=measure(self._training),
            reward_first=_mean(self.rewards[:edge]),
            reward_last=_mean(self.rewards[-edge:] if edge else []),
            mean_abs_logprob_diff=sum(total for total, _ in self._diffs.values()) / compared if compared else None,
            warm_start=self._warm_start(),
            trained_tokens=self._tokens,
            wall_seconds=self._last_at - self._first_at if self._first_at is not None else 0.0,
            groups=GroupCounts(report.admitted, report.trained, dict(report.dropped), dict(report.dead), report.in_flight),
            eval_failed=dict(self._eval_failed),
            restarts=dict(self._restarts),
            errors=dict(self._errors),
            finished=report.finished,
            audit="ok" if report.ok else list(report.violations),
            evaluations=evaluations,
        )

    def _trained(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        rewards = [reward for group in groups for reward in group.rewards]
        self.rewards.extend([math.nan] * (step - len(self.rewards)))
        if step == len(self.rewards):  # one that was trained twice is the audit's affair
            self.rewards.append(sum(rewards) / len(rewards) if rewards else math.nan)
        self._tokens += sum(sample.tokens for group in groups for sample in group.samples)

    def _warm_start(self) -> WarmStart | None:
        if self.warm_start is None or not self.warm_start.losses:
            return None
        losses = self.warm_start.losses
        edge = math.ceil(len(losses) * EDGE)
        return WarmStart(self.warm_start.steps, sum(losses[:edge]) / edge, sum(losses[-edge:]) / edge)


def _mean(values: Sequence[float]) -> float | None:
    """The mean of those that are numbers."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else None


async def collect(bus: Bus, run: str) -> SummaryTally:
    """Reads the run's config, ledger and events. Raises NoSuchRun."""
    config = await runs.load(bus, run)
    tally, names = SummaryTally(config), Subjects(run)
    async for _, record in stream_replay.read(bus, names.ledger_stream, LedgerRecord):
        tally.see(record)
    async for _, step in stream_replay.read(bus, names.events_stream, TrainerStep, subject=names.event("trainer", "step")):
        tally.see_step(step)
    async for _, ended in stream_replay.read(bus, names.events_stream, WarmStartEnded, subject=names.event("trainer", "warm_start")):
        tally.warm_start = ended
    async for _, event in stream_replay.read(bus, names.events_stream, ServiceEvent, subject=names.event("service", "failed")):
        tally.see_failure(event)
    async for _, event in stream_replay.read(bus, names.events_stream, ServiceEvent, subject=names.event("service", "restarted")):
        tally.see_restart(event)
    return tally
