"""The audit replays a run's ledger and checks the invariants, independently of the buffer's own state.

Conservation: admitted = trained + dropped + dead + in flight, and each group ends once. Staleness: no batch trains a token older than the
bound; tokens that it masks for their age, and samples that a filter removed, are not trained. Batches: each step once, of the configured
size, in order; an amendment takes out what is dead, for as many others at most. Versions: never fall. Attestation: the trainer has trained
the tokens that were scored, no others and all of them.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from shared.schema import ledger
from shared.schema.digests import attest_scored
from shared.schema.ledger import LedgerRecord, group_id
from shared.schema.messages import ScoredGroup

NOT_SAID = "not said"  # What was at fault in groups of ledgers that say nothing of it


@dataclass
class AuditReport:
    """The result of the replay. ``violations`` is empty when every invariant holds.

    staleness: trained samples by age, in versions. masked: samples of which some or all tokens were masked for their age; removed: those
    that a filter took out. faults: dead groups by what was at fault, as far as their records say. amended: groups that were taken out of
    their batch since the trainer refused them. repairs: by `myxo repair`.
    """

    admitted: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dead: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    steps: int = 0
    durable_steps: int = 0
    live_version: int = -1
    max_staleness: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    masked: int = 0
    removed: int = 0
    amended: int = 0
    repairs: int = 0
    finished: bool = False
    violations: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.violations


class Audit:
    """Takes every record in order with `see`, then gives the `report`.

    Args:
        max_staleness: the run's bound, in versions. groups_per_batch: the run's rollout_batch_size.
    """

    def __init__(self, max_staleness: int, groups_per_batch: int) -> None:
        self._bound, self._size = max_staleness, groups_per_batch
        self._report = AuditReport()
        self._open: dict[str, ScoredGroup | None] = {}
        self._batched: dict[int, ledger.BatchFormed] = {}
        self._refused: dict[str, int] = {}  # groups that the trainer refused, and the step
        self._lost: dict[int, list[str]] = {}  # those of them that have left the batch, until it is amended
        self._in_batch: set[str] = set()
        self._checks: dict[type[LedgerRecord], Callable[[Any], None]] = {
            ledger.GroupsAdmitted: self._admitted,
            ledger.GroupsScored: self._scored,
            ledger.GroupRequeued: self._requeued,
            ledger.GroupsDropped: lambda record: self._end(record.groups, self._report.dropped, record.reason),
            ledger.GroupDead: self._dead,
            ledger.SampleRefused: self._sample_refused,
            ledger.BatchFormed: self._formed,
            ledger.BatchAmended: self._amended,
            ledger.BatchTrained: self._trained,
            ledger.CheckpointDurable: self._durable,
            ledger.VersionLive: self._live,
            ledger.RunFinished: lambda _: setattr(self._report, "finished", True),
            ledger.LedgerRepaired: lambda _: setattr(self._report, "repairs", self._report.repairs + 1),
        }

    def see(self, record: LedgerRecord) -> None:
        """Takes one record."""
        if (check := self._checks.get(type(record))) is not None:
            check(record)

    def report(self) -> AuditReport:
        """Returns the verdict on all records seen so far."""
        report = self._report
        report.in_flight = len(self._open)
        ended = report.trained + report.dropped.total() + report.dead.total()
        if report.admitted != ended + report.in_flight:
            self._violation(f"{report.admitted} admitted, but {ended} ended and {report.in_flight} in flight")
        if report.finished and report.in_flight:
            self._violation(f"the run finished with {report.in_flight} groups in flight")
        return report

    def _admitted(self, record: ledger.GroupsAdmitted) -> None:
        if record.first != self._report.admitted:
            self._violation(f"admission starts at group {record.first}, {self._report.admitted} were admitted before")
        self._open |= dict.fromkeys(group_id(index) for index in range(record.first, record.first + record.count))
        self._report.admitted += record.count
        self._report.finished = False

    def _scored(self, record: ledger.GroupsScored) -> None:
        for scored in record.groups:
            if self._known(scored.group, "scored"):
                if self._open[scored.group] is not None:
                    self._violation(f"{scored.group} was scored twice in one attempt")
                self._open[scored.group] = scored

    def _requeued(self, record: ledger.GroupRequeued) -> None:
        group = record.group
        if self._known(group, "requeued"):
            if group in self._in_batch:
                self._left_batch(group)
            self._open[group] = None

    def _left_batch(self, group: str) -> None:
        """Takes a group out of its batch to be generated anew, which needs a refusal of the trainer."""
        if (step := self._refused.pop(group, None)) is None:
            self._violation(f"{group} was requeued while it is in a batch, and was not refused")
            return
        self._lost.setdefault(step, []).append(group)
        self._in_batch.discard(group)

    def _formed(self, record: ledger.BatchFormed) -> None:
        step = record.step
        if step != len(self._batched):
            self._violation(f"batch of step {step} was formed after that of step {len(self._batched) - 1}")
        if len(record.groups) != self._size:
            self._violation(f"batch of step {step} has {len(record.groups)} groups, not {self._size}")
        self._take(record, record.groups)
        self._batched[step] = record.model_copy(update={"groups": list(record.groups)})

    def _take(self, batch: ledger.BatchFormed, groups: list[str]) -> None:
        """Checks groups that a batch trains, from its beginning or as an amendment."""
        for group in groups:
            scored = self._open.get(group) if self._known(group, f"batched for step {batch.step}") else None
            if group in self._in_batch:
                self._violation(f"{group} is in two batches")
            self._in_batch.add(group)
            if scored is None:
                self._violation(f"{group} was batched for step {batch.step} without a score")
            else:
                self._check_ages(batch, scored)

    def _amended(self, record: ledger.BatchAmended) -> None:
        step, batch = record.step, self._batched.get(record.step)
        lost = self._lost.pop(step, [])
        if batch is None or not lost or sorted(record.removed) != sorted(lost):
            self._violation(f"step {step} was amended by removing {record.removed}; of its groups {lost} had left it")
        if batch is None:
            return
        if len(record.added) > len(record.removed):
            self._violation(f"step {step} was amended by {len(record.added)} groups for {len(record.removed)}")
        self._take(batch, record.added)
        batch.groups = sorted(({*batch.groups} - {*record.removed}) | {*record.added}, key=lambda group: (len(group), group))  # by number
        self._report.amended += len(record.removed)
        if step < self._report.steps:
            self._trained_groups(step, record.added)

    def _sample_refused(self, record: ledger.SampleRefused) -> None:
        batch = self._batched.get(record.step)
        if batch is None or record.group not in batch.groups or record.step < self._report.durable_steps:
            self._violation(f"{record.group} was refused in step {record.step}, which does not train it")
        else:
            self._refused[record.group] = record.step

    def _dead(self, record: ledger.GroupDead) -> None:
        """Ends a group, as any, or as one that the trainer refused: even one that it trained before its death, which undid that."""
        group, report = record.group, self._report
        before = report.dead.total()
        step = self._refused.pop(group, None)
        if step is not None and step >= report.durable_steps:
            self._lost.setdefault(step, []).append(group)
            self._in_batch.discard(group)
            if step < report.steps:
                report.trained -= 1
                report.dead[record.reason] += 1
                report.faults[record.fault or NOT_SAID] += 1
                return
        self._end([group], report.dead, record.reason)
        if report.dead.total() > before:
            report.faults[record.fault or NOT_SAID] += 1

    def _check_ages(self, record: ledger.BatchFormed, scored: ScoredGroup) -> None:
        report, step = self._report, record.step
        removed = set(scored.removed)
        report.removed += len(removed)
        for sample in (sample for index, sample in enumerate(scored.samples) if sample.trained and index not in removed):
            report.masked += sample.oldest < record.mask_below
            if sample.newest < record.mask_below:
                continue
            age = record.version - max(sample.oldest, record.mask_below)
            report.staleness[age] += 1
            report.max_staleness = max(report.max_staleness, age)
            if age > self._bound:
                self._violation(f"step {step} trains a sample of {scored.group} that is {age} versions old; the bound is {self._bound}")
            if sample.newest > record.version:
                self._violation(f"step {step} on version {record.version} holds a token of version {sample.newest}")

    def _trained(self, record: ledger.BatchTrained) -> None:
        step = record.step
        if step != self._report.steps:
            self._violation(f"step {step} was trained after {self._report.steps} steps")
        if step in self._batched:
            self._check_attestation(record, self._batched[step])
            self._trained_groups(step, self._batched[step].groups)
        self._report.steps = step + 1

    def _trained_groups(self, step: int, groups: list[str]) -> None:
        for group in groups:
            if self._known(group, f"trained in step {step}"):
                del self._open[group]
                self._in_batch.discard(group)
                self._report.trained += 1

    def _check_attestation(self, record: ledger.BatchTrained, batch: ledger.BatchFormed) -> None:
        """Compares the trainer's account of a step with what was scored of the batch's groups."""
        if record.attestation is None:
            self._violation(f"step {record.step} was trained, and the trainer does not say what")
            return
        scored = [group for name in batch.groups if (group := self._open.get(name)) is not None]
        expected = attest_scored([(group.group, group.samples, group.removed) for group in scored], batch.mask_below).model_dump()
        for name, said in record.attestation.model_dump().items():
            if said != expected[name]:
                self._violation(f"step {record.step}: by the trainer's account its {name} is {said}, by what was scored {expected[name]}")

    def _durable(self, record: ledger.CheckpointDurable) -> None:
        report, steps = self._report, record.steps
        if steps > report.steps:
            self._violation(f"checkpoint of {steps} steps is durable, {report.steps} were trained")
        if steps < report.durable_steps:
            self._violation(f"durable steps fell from {report.durable_steps} to {steps}")
        report.durable_steps = max(steps, report.durable_steps)

    def _live(self, record: ledger.VersionLive) -> None:
        if record.version <= self._report.live_version:
            self._violation(f"live version went from {self._report.live_version} to {record.version}")
        self._report.live_version = record.version

    def _end(self, groups: list[str], ends: Counter[str], reason: str) -> None:
        for group in groups:
            if self._known(group, f"ended ({reason})"):
                del self._open[group]
                ends[reason] += 1

    def _known(self, group: str, what: str) -> bool:
        if group in self._open:
            return True
        self._violation(f"{group} was {what} but is not in flight")
        return False

    def _violation(self, text: str) -> None:
        self._report.violations.append(text)


def audit(records: Iterable[LedgerRecord], max_staleness: int, groups_per_batch: int) -> AuditReport:
    """Returns the verdict on a run's records."""
    checker = Audit(max_staleness, groups_per_batch)
    for record in records:
        checker.see(record)
    return checker.report()
