"""What has become of every group, in compact facts: the fold of the ledger for those who look at samples. Pure.

A group is in `GroupHistory.open` from its admission until it is trained, dropped or dead; then it is handed out once and forgotten, so that
memory follows what is in flight, not how long the run is. Records that do not fit are passed over: judging them is the audit's business.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from shared.data.rollout_files import DEAD, DROPPED, EVALUATED, FAILED, TRAINED, RolloutRecord
from shared.schema.ledger import (
    BatchFormed,
    BatchTrained,
    CheckpointDurable,
    EvalScored,
    EvalStarted,
    GroupDead,
    GroupRequeued,
    GroupsAdmitted,
    GroupsDropped,
    GroupsScored,
    LedgerRecord,
    ScoredGroup,
    eval_group_parts,
    group_id,
)
from shared.schema.messages import Payload

OUTSTANDING, REQUEUED, READY, BATCHED = "outstanding", "requeued", "ready", "batched"
STATUSES = (OUTSTANDING, REQUEUED, READY, BATCHED, TRAINED, DROPPED, DEAD, EVALUATED, FAILED)
"""Where a group can be: with the rollout and reward services (at first, or again), back with rewards, in a batch, at one of the ends."""


@dataclass(slots=True)
class GroupRecord:
    """One group. ``changed``: ledger sequence of the record that last changed it, ``at`` its time, seconds since the epoch.

    rewards, tokens, oldest, newest: one entry a sample, of the attempt that came back; empty while none has. parts: the samples' named
    rewards, where they have some; removed: positions of those that a filter took out of the loss. ``version``: that its batch is trained
    on, which masks tokens older than ``mask_below``, or that it evaluates. ``started``/``ended``: of the generation. dataset: of a held-out
    prompt. keys: of its payload.
    """

    group: str
    changed: int
    at: float
    attempt: int = 0
    status: str = OUTSTANDING
    reason: str = ""
    step: int | None = None
    version: int | None = None
    mask_below: int = 0
    rewards: tuple[float, ...] = ()
    parts: tuple[dict[str, float], ...] = ()
    removed: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    oldest: tuple[int, ...] = ()
    newest: tuple[int, ...] = ()
    replica: str = ""
    started: float = 0.0
    ended: float = 0.0
    dataset: str | None = None
    keys: tuple[str, ...] = ()

    @property
    def reward(self) -> float | None:
        """The mean of the samples' rewards."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def seconds(self) -> float | None:
        """How long its samples took to generate."""
        return self.ended - self.started if self.rewards and self.ended else None

    def came_back(self, scored: ScoredGroup) -> None:
        """Takes what an attempt came back with."""
        self.attempt, self.status, self.reason = scored.attempt, READY, ""
        self.rewards, self.parts, self.removed = tuple(scored.rewards), scored.parts, scored.removed
        self.tokens = tuple(sample.tokens for sample in scored.samples)
        self.oldest = tuple(sample.oldest for sample in scored.samples)
        self.newest = tuple(sample.newest for sample in scored.samples)
        self.replica = sys.intern(scored.replica)
        self.started, self.ended = scored.started, scored.ended
        self.keys = tuple(scored.payload.keys)

    def forget_samples(self) -> None:
        """Nothing of an attempt that was given up stands any more."""
        self.rewards = self.tokens = self.oldest = self.newest = self.removed = ()
        self.parts, self.replica, self.keys = (), "", ()

    def where(self) -> str:
        """The status in words."""
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
        """Plain data for JSON."""
        facts = {**asdict(self), "reward": self.reward, "seconds": self.seconds}
        del facts["keys"]
        return facts


def scored_for_evaluation(sequence: int, record: EvalScored) -> GroupRecord:
    """The facts of a held-out prompt that came back, or was given up."""
    status = EVALUATED if record.rewards else FAILED
    facts = GroupRecord(
        record.group, sequence, record.at, status=status, reason=record.reason, version=record.version, dataset=record.dataset
    )
    if record.rewards:
        facts.rewards, facts.parts, facts.oldest, facts.newest = tuple(record.rewards), record.parts, (record.oldest,), (record.newest,)
    return facts


def facts_of(sequence: int, record: RolloutRecord) -> GroupRecord:
    """The facts of a group as far as its kept responses tell them, where there is no ledger any more. ``sequence``: a place among them."""
    samples = record.samples
    versions = [[version for _, _, version in sample.segments] or [0] for sample in samples]
    return GroupRecord(
        record.group,
        sequence,
        record.at,
        attempt=record.attempt,
        status=record.status,
        reason=record.reason,
        step=record.step,
        version=record.version,
        mask_below=record.mask_below,
        rewards=tuple(sample.reward or 0.0 for sample in samples),
        parts=tuple({name: value or 0.0 for name, value in sample.parts.items()} for sample in samples),
        removed=tuple(position for position, sample in enumerate(samples) if sample.removed),
        tokens=tuple(sample.length for sample in samples),
        oldest=tuple(map(min, versions)),
        newest=tuple(map(max, versions)),
        dataset=record.dataset,
    )


@dataclass
class GroupHistory:
    """The fold. ``open``: groups in flight by id; ``admitted``: how many there ever were."""

    open: dict[str, GroupRecord] = field(default_factory=dict)
    admitted: int = 0
    durable_steps: int = 0
    _batches: dict[int, list[str]] = field(default_factory=dict)

    def see(self, sequence: int, record: LedgerRecord) -> list[GroupRecord]:
        """Takes a record and its place in the ledger, in order; returns the groups that it ended."""
        match record:
            case GroupsAdmitted(first=first, count=count):
                for number in range(first, first + count):
                    name = group_id(number)
                    self.open[name] = GroupRecord(name, sequence, record.at)
                self.admitted = max(self.admitted, first + count)
            case GroupsScored(groups=groups):
                for scored in groups:
                    for facts in self._changed([scored.group], sequence, record):
                        facts.came_back(scored)
            case GroupRequeued(group=name, attempt=attempt, reason=reason):
                for facts in self._changed([name], sequence, record):
                    facts.forget_samples()
                    facts.attempt, facts.status, facts.reason = attempt, REQUEUED, reason
            case GroupsDropped(groups=names, reason=reason):
                return self._ended(names, sequence, record, DROPPED, reason)
            case GroupDead(group=name, reason=reason):
                return self._ended([name], sequence, record, DEAD, reason)
            case BatchFormed(step=step, version=version, groups=names, mask_below=mask_below):
                self._batches[step] = names
                for facts in self._changed(names, sequence, record):
                    facts.status, facts.step, facts.version, facts.mask_below = BATCHED, step, version, mask_below
            case BatchTrained(step=step):
                return self._ended(self._batches.pop(step, []), sequence, record, TRAINED, "")
            case CheckpointDurable(steps=steps):
                self.durable_steps = max(self.durable_steps, steps)
            case EvalScored():
                return [scored_for_evaluation(sequence, record)]
            case _:
                pass
        return []

    def durable(self, facts: GroupRecord) -> bool:
        """Whether the group is trained and in a durable checkpoint: its payload is freed then."""
        return facts.status == TRAINED and facts.step is not None and facts.step < self.durable_steps

    def gone(self, facts: GroupRecord | None) -> str | None:
        """Why the store has no samples of a group; None where it should."""
        if facts is None or facts.status in (OUTSTANDING, REQUEUED):
            return "its samples are still with the rollout and reward services"
        if facts.status in (DROPPED, EVALUATED):
            return f"its samples were freed when it was {facts.status}"
        if facts.status in (DEAD, FAILED):
            return "it was given up; samples that it had were freed"
        if self.durable(facts):
            return f"its samples were freed: step {facts.step} is trained and in a durable checkpoint"
        return None

    def _changed(self, names: Iterable[str], sequence: int, record: LedgerRecord) -> list[GroupRecord]:
        found = [self.open[name] for name in names if name in self.open]
        for facts in found:
            facts.changed, facts.at = sequence, record.at
        return found

    def _ended(self, names: list[str], sequence: int, record: LedgerRecord, status: str, reason: str) -> list[GroupRecord]:
        found = self._changed(names, sequence, record)
        for facts in found:
            facts.status, facts.reason = status, reason
            del self.open[facts.group]
        return found


@dataclass(frozen=True)
class Passage:
    """A ledger record as far as it tells of one group. ``sequence``: its place; ``at``: seconds since the epoch; ``what`` in words."""

    sequence: int
    at: float
    event: str
    what: str


class GroupLife:
    """All that the ledger knows of one group.

    Args:
        group: its id.
    """

    def __init__(self, group: str) -> None:
        self.group = group
        self.facts: GroupRecord | None = None
        """None: no such group was admitted."""
        self.passages: list[Passage] = []
        self.payload: Payload | None = None
        """Where the samples of its latest scored attempt were put."""
        self.trails = GroupHistory()
        self._durable = False

    def see(self, sequence: int, record: LedgerRecord) -> None:
        """Takes a record; they come in the ledger's order."""
        before = self.facts.status if self.facts else None
        ended = self.trails.see(sequence, record)
        self.facts = next((facts for facts in ended if facts.group == self.group), None) or self.trails.open.get(self.group) or self.facts
        what = self._told(record, before)
        if what is not None:
            self.passages.append(Passage(sequence, record.at, record.event(), what))

    def gone(self) -> str | None:
        """Why the store has no samples of it; None where it should."""
        return self.trails.gone(self.facts)

    def _told(self, record: LedgerRecord, before: str | None) -> str | None:
        facts, name = self.facts, self.group
        match record:
            case GroupsAdmitted(version=version) if facts is not None and before is None:
                return f"admitted while version {version} was live"
            case GroupsScored(groups=groups):
                for scored in groups:
                    if scored.group == name:
                        self.payload = scored.payload
                        rewards = " ".join(f"{reward:g}" for reward in scored.rewards)
                        seconds = scored.ended - scored.started
                        return f"attempt {scored.attempt} back from {scored.replica} after {seconds:.1f} s, rewards {rewards}"
            case GroupRequeued(group=group, attempt=attempt, reason=reason, partial=partial) if group == name:
                how = "to be generated anew" if partial is None else "to go on from what it has"
                return f"{how} as attempt {attempt}: {reason}"
            case GroupsDropped(groups=names, reason=reason) if name in names:
                return f"dropped: {reason}"
            case GroupDead(group=group, reason=reason) if group == name:
                return f"dead: {reason}"
            case BatchFormed(step=step, version=version, groups=names, mask_below=mask_below) if name in names:
                masked = f", tokens older than version {mask_below} masked" if mask_below else ""
                return f"in the batch of step {step}, on version {version}{masked}"
            case BatchTrained(step=step, started=started, ended=ended) if facts is not None and facts.step == step and before == BATCHED:
                return f"trained in step {step}, {ended - started:.1f} s"
            case EvalStarted(dataset=dataset, version=version, prompts=prompts) if _is_of(name, dataset, version, prompts):
                return f"sent out for the evaluation of version {version}"
            case EvalScored(group=group, rewards=scores, reason=reason) if group == name:
                return "scored, rewards " + " ".join(f"{reward:g}" for reward in scores) if scores else f"failed: {reason}"
            case CheckpointDurable(steps=steps) if facts is not None and self.trails.durable(facts) and not self._durable:
                self._durable = True
                return f"a checkpoint of {steps} steps is durable, its samples are freed"
            case _:
                pass
        return None


def _is_of(group: str, dataset: str, version: int, prompts: int) -> bool:
    """Whether a group is one of the held-out prompts of an evaluation."""
    parts = eval_group_parts(group)
    return parts is not None and parts[:2] == (dataset, version) and parts[2] < prompts
