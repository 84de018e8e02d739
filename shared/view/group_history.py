"""The history of every group: the fold of the ledger that lists, pages and the summary read. Pure.

A group is in `GroupHistory.open` from its admission until it is trained, dropped or dead; then it is handed out once more and forgotten, so
that memory follows what is in flight, not how long the run is. Records that do not fit are passed over: judging them is the audit's work.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shared.data.rollout_files import DEAD, DROPPED, EVALUATED, FAILED, TRAINED, RolloutRecord, RolloutSample
from shared.schema.ledger import (
    BatchAmended,
    BatchFormed,
    BatchTrained,
    CheckpointDurable,
    EvalScored,
    GroupDead,
    GroupRequeued,
    GroupsAdmitted,
    GroupsDropped,
    GroupsScored,
    LedgerRecord,
    SampleRefused,
    group_id,
)
from shared.schema.messages import Payload, ScoredGroup

OUTSTANDING, REQUEUED, READY, BATCHED = "outstanding", "requeued", "ready", "batched"
ENDS = (TRAINED, DROPPED, DEAD, EVALUATED, FAILED)
# The states of a group: with the rollout and reward services (at first, or again), back with rewards, in a batch, at one of the ends
STATUSES = (OUTSTANDING, REQUEUED, READY, BATCHED, *ENDS)


@dataclass(slots=True)
class GroupRecord:
    """One group. ``changed``: ledger sequence of the record that last changed it, ``at`` its time, seconds since the epoch; ``admitted``:
    when it was admitted, 0 where that is not known.

    rewards, tokens, oldest, newest: one entry a sample, of the attempt that came back; empty while none has. parts: the samples' named
    rewards; removed: positions of samples that a filter took out of the loss. ``version``: the weights that its batch is trained on, which
    masks tokens older than ``mask_below``, or those that it evaluates. ``started``/``ended``: of the generation. dataset: only of a
    held-out prompt. truncated: positions of samples that ended at their length. rollouts: of each sample, which rollout it comes from;
    empty where each gave one. payload: where the samples lie.
    """

    group: str
    changed: int
    at: float
    admitted: float = 0.0
    attempt: int = 0
    status: str = OUTSTANDING
    reason: str = ""
    step: int | None = None
    version: int | None = None
    mask_below: int = 0
    rewards: tuple[float, ...] = ()
    parts: tuple[dict[str, float], ...] = ()
    removed: tuple[int, ...] = ()
    unread: tuple[tuple[int, str], ...] = ()
    tokens: tuple[int, ...] = ()
    oldest: tuple[int, ...] = ()
    newest: tuple[int, ...] = ()
    truncated: tuple[int, ...] = ()
    rollouts: tuple[int, ...] = ()
    replica: str = ""
    started: float = 0.0
    ended: float = 0.0
    dataset: str | None = None
    payload: Payload | None = None

    @property
    def reward(self) -> float | None:
        """Returns the mean of the samples' rewards."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def seconds(self) -> float | None:
        """Returns the seconds that its samples took to generate."""
        return self.ended - self.started if self.rewards and self.ended else None

    def figures(self) -> dict[str, Any]:
        """Returns what lists of groups show and sort by. samples: how many; spread: of their rewards; tokens: of all responses; longest: of
        one; truncated: samples that ended at their length; forks: samples beyond one a rollout."""
        shown = ("status", "reason", "dataset", "step", "version", "attempt", "reward", "replica", "seconds", "at")
        return {
            **{name: getattr(self, name) for name in shown},
            "samples": len(self.rewards),
            "spread": max(self.rewards) - min(self.rewards) if self.rewards else None,
            "tokens": sum(self.tokens) if self.tokens else None,
            "longest": max(self.tokens, default=None),
            "truncated": len(self.truncated),
            "forks": len(self.rollouts) - len(set(self.rollouts)),
            "admitted": self.admitted or None,
        }

    def reward_of(self, index: int) -> float | None:
        """Returns the reward of one of the samples, where it has one."""
        return self.rewards[index] if index < len(self.rewards) else None

    def parts_of(self, index: int) -> dict[str, float]:
        """Returns the named rewards of one of the samples."""
        return self.parts[index] if index < len(self.parts) else {}

    def unread_of(self, index: int) -> str:
        """Returns why the verifier could not read the response of one of the samples, where it could not."""
        return dict(self.unread).get(index, "")

    def came_back(self, scored: ScoredGroup) -> None:
        """Takes the results of an attempt."""
        self.attempt, self.status, self.reason = scored.attempt, READY, ""
        self.rewards, self.parts, self.removed, self.unread = tuple(scored.rewards), scored.parts, scored.removed, scored.unread
        self.tokens = tuple(sample.tokens for sample in scored.samples)
        self.oldest = tuple(sample.oldest for sample in scored.samples)
        self.newest = tuple(sample.newest for sample in scored.samples)
        self.truncated = tuple(index for index, sample in enumerate(scored.samples) if sample.finish == "length")
        self.rollouts = scored.rollouts
        self.replica = sys.intern(scored.replica)
        self.started, self.ended, self.payload = scored.started, scored.ended, scored.payload

    def given_up(self, attempt: int, reason: str) -> None:
        """Forgets the samples of an attempt that is made again as ``attempt``."""
        self.attempt, self.status, self.reason = attempt, REQUEUED, reason
        self.rewards = self.tokens = self.oldest = self.newest = self.removed = self.truncated = self.rollouts = ()
        self.parts, self.unread, self.replica, self.payload = (), (), "", None

    def where(self) -> str:
        """Returns the status in words."""
        match self.status:
            case "batched":
                return f"in batch of step {self.step}"
            case "trained":
                return f"trained at step {self.step}"
            case "evaluated":
                return f"evaluated at version {self.version}"
            case _:
                return f"{self.status} ({self.reason})" if self.reason else self.status

    def as_plain(self) -> dict[str, Any]:
        """Returns plain data for JSON, without the payload."""
        plain = {**asdict(self), "reward": self.reward, "seconds": self.seconds}
        del plain["payload"]
        return plain


def evaluated(sequence: int, record: EvalScored) -> GroupRecord:
    """Returns the record of a held-out prompt that came back, or was given up."""
    status = EVALUATED if record.rewards else FAILED
    group = GroupRecord(
        record.group, sequence, record.at, status=status, reason=record.reason, version=record.version, dataset=record.dataset
    )
    if record.rewards:
        group.rewards, group.parts = tuple(record.rewards), record.parts
        group.oldest, group.newest = (record.oldest,), (record.newest,)
        group.tokens, group.truncated = record.lengths, record.truncated
    return group


def kept_group(position: int, record: RolloutRecord) -> GroupRecord:
    """Returns the record of a group as far as its kept responses tell it, for a run without a ledger.

    Args:
        position: its place among the kept groups, which stands for a ledger sequence.
    """
    samples = record.samples
    fields = ("attempt", "status", "reason", "step", "version", "mask_below", "dataset")
    group = GroupRecord(record.group, position, record.at, **{name: getattr(record, name) for name in fields})
    group.rewards, group.parts = _rewards(samples)
    group.removed = _positions(sample.removed for sample in samples)
    group.truncated = _positions(sample.finish == "length" for sample in samples)
    group.tokens = tuple(sample.length for sample in samples)
    group.rollouts = tuple(sample.index if sample.rollout is None else sample.rollout for sample in samples)
    versions = [[version for _, _, version in sample.segments] or [0] for sample in samples]
    group.oldest, group.newest = tuple(map(min, versions)), tuple(map(max, versions))
    return group


def _rewards(samples: Sequence[RolloutSample]) -> tuple[tuple[float, ...], tuple[dict[str, float], ...]]:
    """Returns the samples' rewards and named rewards; none of a group that was lost before all were scored."""
    rewards = tuple(sample.reward for sample in samples if sample.reward is not None)
    if len(rewards) < len(samples):
        return (), ()
    return rewards, tuple({name: value for name, value in sample.parts.items() if value is not None} for sample in samples)


def _positions(holds: Iterable[bool]) -> tuple[int, ...]:
    return tuple(position for position, there in enumerate(holds) if there)


@dataclass
class GroupHistory:
    """The fold. ``open``: groups in flight by id; ``batches``: each batch in training, as amended; ``admitted``: how many there were."""

    open: dict[str, GroupRecord] = field(default_factory=dict)
    batches: dict[int, BatchFormed] = field(default_factory=dict)
    admitted: int = 0
    durable_steps: int = 0

    def apply(self, sequence: int, record: LedgerRecord) -> list[GroupRecord]:
        """Takes a record and its place in the ledger, in order; returns the groups that it changed, which are open or at one of `ENDS`."""
        match record:
            case GroupsAdmitted(first=first, count=count):
                self.admitted = max(self.admitted, first + count)
                admitted = [GroupRecord(group_id(index), sequence, record.at, record.at) for index in range(first, first + count)]
                self.open |= {group.group: group for group in admitted}
                return admitted
            case GroupsScored(groups=groups):
                scored = {group.group: group for group in groups}
                changed = self._changed(scored, sequence, record)
                for group in changed:
                    group.came_back(scored[group.group])
                return changed
            case GroupRequeued(group=name, attempt=attempt, reason=reason):
                changed = self._changed([name], sequence, record)
                for group in changed:
                    group.given_up(attempt, reason)
                return changed
            case GroupsDropped(groups=names, reason=reason):
                return self._ended(names, sequence, record, DROPPED, reason)
            case GroupDead(group=name, reason=reason):
                return self._ended([name], sequence, record, DEAD, reason)
            case SampleRefused(group=name):
                return self._changed([name], sequence, record)
            case BatchFormed() | BatchAmended() | BatchTrained():
                return self._batch(sequence, record)
            case CheckpointDurable(steps=steps):
                self.durable_steps = max(self.durable_steps, steps)
            case EvalScored():
                return [evaluated(sequence, record)]
        return []

    def _batch(self, sequence: int, record: BatchFormed | BatchAmended | BatchTrained) -> list[GroupRecord]:
        if isinstance(record, BatchFormed):
            self.batches[record.step] = record
            return self._batched(record, record.groups, sequence, record)
        if (batch := self.batches.pop(record.step, None)) is None:
            return []
        if isinstance(record, BatchTrained):
            return self._ended(batch.groups, sequence, record, TRAINED, "")
        groups = [name for name in batch.groups if name not in record.removed] + record.added
        self.batches[record.step] = amended = batch.model_copy(update={"groups": groups})
        return self._batched(amended, record.added, sequence, record)

    def _batched(self, batch: BatchFormed, groups: list[str], sequence: int, record: LedgerRecord) -> list[GroupRecord]:
        changed = self._changed(groups, sequence, record)
        for group in changed:
            group.status, group.step, group.version, group.mask_below = BATCHED, batch.step, batch.version, batch.mask_below
        return changed

    def durable(self, group: GroupRecord) -> bool:
        """Returns whether the group is trained and in a durable checkpoint: its payload is freed then."""
        return group.status == TRAINED and group.step is not None and group.step < self.durable_steps

    def gone(self, group: GroupRecord) -> str | None:
        """Returns why the store has no samples of a group; None where it should."""
        if group.status in (OUTSTANDING, REQUEUED):
            return "its samples are still with the rollout and reward services"
        if group.status in (DROPPED, EVALUATED):
            return f"its samples were freed when it was {group.status}"
        if group.status in (DEAD, FAILED):
            return "it was given up; samples that it had were freed"
        if self.durable(group):
            return f"its samples were freed: step {group.step} is trained and in a durable checkpoint"
        return None

    def _changed(self, names: Iterable[str], sequence: int, record: LedgerRecord) -> list[GroupRecord]:
        found = [self.open[name] for name in names if name in self.open]
        for group in found:
            group.changed, group.at = sequence, record.at
        return found

    def _ended(self, names: list[str], sequence: int, record: LedgerRecord, status: str, reason: str) -> list[GroupRecord]:
        found = self._changed(names, sequence, record)
        for group in found:
            group.status, group.reason = status, reason
            del self.open[group.group]
        return found


@dataclass(frozen=True)
class ProvenanceStep:
    """A ledger record as far as it concerns one group. ``sequence``: its place; ``at``: seconds since the epoch; ``what``: in words."""

    sequence: int
    at: float
    event: str
    what: str


def ledger_words(record: LedgerRecord, group: GroupRecord) -> str | None:
    """Describes what a record has made of a group."""
    rewards = " ".join(f"{reward:g}" for reward in group.rewards)
    match record:
        case GroupsAdmitted(version=version):
            return f"admitted while version {version} was live"
        case GroupsScored():
            return f"attempt {group.attempt} back from {group.replica} after {group.ended - group.started:.1f} s, rewards {rewards}"
        case GroupRequeued(attempt=attempt, reason=reason, partial=partial):
            how = "to be generated anew" if partial is None else "to continue from what it has"
            return f"{how} as attempt {attempt}: {reason}"
        case GroupsDropped() | GroupDead():
            return f"{group.status}: {group.reason}"
        case BatchFormed(step=step, version=version, mask_below=mask_below):
            masked = f", tokens older than version {mask_below} masked" if mask_below else ""
            return f"in the batch of step {step}, on version {version}{masked}"
        case BatchAmended(step=step, removed=removed):
            return f"in the batch of step {step}, in the place of {', '.join(removed)}"
        case SampleRefused(step=step, sample=sample, reason=reason):
            return f"refused by the trainer in step {step}: sample {sample}: {reason}"
        case BatchTrained(step=step, started=started, ended=ended):
            return f"trained in step {step}, {ended - started:.1f} s"
        case EvalScored(reason=reason):
            return f"scored, rewards {rewards}" if rewards else f"failed: {reason}"
    return None
