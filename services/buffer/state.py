"""The buffer's state: the fold of the run's ledger, and nothing else.

`BufferState.apply` takes one record; replaying the ledger from its beginning gives the very state that the killed process had.
Decisions are in `services.buffer.policy`; this module decides nothing. Invariant: a group is in `groups` from its admission until its
end (trained and durable, dropped, or dead), so memory follows what is in flight, not how long the run is.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field

from shared.schema.ledger import (
    BatchFormed,
    BatchTrained,
    CheckpointDurable,
    EvalEnded,
    EvalScored,
    EvalStarted,
    GroupDead,
    GroupRequeued,
    GroupsAdmitted,
    GroupsDropped,
    GroupsScored,
    LedgerRecord,
    RunFinished,
    ScoredGroup,
    VersionLive,
    eval_group_id,
    eval_group_parts,
    group_id,
)
from shared.schema.messages import Payload, SampleMeta

NOTHING_TRAINED = 1 << 30
"""Stands for the version of a token that does not exist: newer than any."""


@dataclass(slots=True)
class Result:
    """What the state keeps of a scored group: what its batch is made of, as little as holds it.

    keys: of its payload, ``size`` bytes in all. oldest: version of the oldest trained token of all. rewards: float64 [m] of its m samples.
    removed: positions of samples that a filter took out of the loss. tokens: of each sample, as in `Payload`. parts: as in `ScoredGroup`.
    """

    attempt: int
    keys: tuple[str, ...]
    size: int
    oldest: int
    samples: list[SampleMeta]
    rewards: array[float]
    tokens: array[int]
    removed: tuple[int, ...] = ()
    parts: tuple[dict[str, float], ...] = ()

    @classmethod
    def of(cls, scored: ScoredGroup) -> Result:
        payload, samples, removed = scored.payload, scored.samples, scored.removed
        trained = _without(samples, removed) if removed else samples
        oldest = min([sample.oldest for sample in trained], default=NOTHING_TRAINED)
        rewards, tokens = array("d", scored.rewards), array("I", payload.tokens)
        parts = tuple({sys.intern(name): value for name, value in sample.items()} for sample in scored.parts)  # names are kept once
        return cls(scored.attempt, tuple(payload.keys), payload.bytes, oldest, samples, rewards, tokens, removed, parts)

    @property
    def newest(self) -> list[int]:
        """Version of the newest trained token of each sample that is trained."""
        return [sample.newest for sample in _without(self.samples, self.removed)]

    @property
    def payload(self) -> Payload:
        """Where the samples lie."""
        return Payload(keys=list(self.keys), bytes=self.size, tokens=tuple(self.tokens))

    def stale(self, mask_below: int) -> tuple[int, ...]:
        """Positions of samples that hold nothing of version ``mask_below`` or newer."""
        return tuple(index for index, sample in enumerate(self.samples) if sample.newest < mask_below) if mask_below else ()


@dataclass(slots=True)
class GroupState:
    """A group in flight. ``scored`` is set once it came back; ``step`` once it is in a batch.

    ``partial``: samples that the present attempt goes on from, but for those that hold nothing newer than ``renew_below``.
    """

    number: int
    id: str
    attempt: int = 0
    scored: Result | None = None
    step: int | None = None
    partial: Payload | None = None
    renew_below: int = 0


@dataclass(slots=True)
class BatchRecord:
    """A batch that was formed: kept until a checkpoint beyond it is durable, so that it can be handed out again."""

    step: int
    version: int
    groups: list[GroupState]
    mask_below: int = 0


@dataclass(slots=True)
class EvaluationState:
    """An evaluation under way. ``rewards``: of the prompts that came back, by group id."""

    dataset: str
    version: int
    prompts: int
    rewards: dict[str, list[float]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    oldest: int = NOTHING_TRAINED
    newest: int = -1

    def pending(self) -> list[str]:
        """Ids of the groups that have not come back."""
        names = (eval_group_id(self.dataset, self.version, row) for row in range(self.prompts))
        return [name for name in names if name not in self.rewards and name not in self.failed]

    def awaits(self, name: str) -> bool:
        """Whether ``name`` is a group of this evaluation that has not come back."""
        parts = eval_group_parts(name)
        if parts is None or parts[2] >= self.prompts or name != eval_group_id(self.dataset, self.version, parts[2]):
            return False
        return name not in self.rewards and name not in self.failed

    @property
    def complete(self) -> bool:
        return len(self.rewards) + len(self.failed) >= self.prompts


@dataclass
class BufferState:
    """See the module's docstring. Counters: groups admitted, trained, dropped, dead since the run began."""

    admitted: int = 0
    trained: int = 0
    dropped: int = 0
    dead: int = 0
    live_version: int = -1
    trained_steps: int = 0
    durable_steps: int = 0
    groups: dict[str, GroupState] = field(default_factory=dict)
    ready: dict[str, GroupState] = field(default_factory=dict)  # scored, not yet batched, in the order they came back
    batches: dict[int, BatchRecord] = field(default_factory=dict)
    formed_steps: int = 0
    evaluations: dict[int, EvaluationState] = field(default_factory=dict)  # under way, by version
    last_evaluation: EvalEnded | None = None
    evaluated: set[int] = field(default_factory=set)  # versions whose evaluation ended
    finished_steps: int = 0  # steps of the run when it last finished; more may have been asked for since
    released: list[str] = field(default_factory=list)  # payload keys let go by the latest record: free them

    @property
    def in_flight(self) -> int:
        """Groups admitted and not ended: generating, being scored, ready, or in a batch not yet trained."""
        return self.admitted - self.trained - self.dropped - self.dead

    @property
    def outstanding(self) -> list[GroupState]:
        """Groups that rollout or reward services have now."""
        return [group for group in self.groups.values() if group.scored is None]

    def apply(self, record: LedgerRecord) -> None:
        """Folds one record in. Records come from `services.buffer.policy` or from the ledger, in order."""
        self.released = []
        match record:
            case GroupsAdmitted(first=first, count=count):
                for number in range(first, first + count):
                    name = group_id(number)
                    self.groups[name] = GroupState(number, name)
                self.admitted += count
            case GroupsScored(groups=scored_groups):
                for scored in scored_groups:
                    group = self.groups[scored.group]
                    if group.partial is not None:
                        self._release(group)
                        group.partial = None
                    group.scored = Result.of(scored)
                    self.ready[scored.group] = group
            case GroupRequeued(group=name, attempt=attempt, partial=partial, renew_below=renew_below):
                group = self.groups[name]
                self._release(group, but=partial)
                group.attempt, group.scored, group.partial, group.renew_below = attempt, None, partial, renew_below
                self.ready.pop(name, None)
            case GroupsDropped(groups=names):
                for name in names:
                    self._end(name)
                self.dropped += len(names)
            case GroupDead(group=name, payload=payload):
                self._end(name)
                self.released += payload.keys if payload is not None else []
                self.dead += 1
            case BatchFormed(step=step, version=version, groups=names, mask_below=mask_below):
                batch = BatchRecord(step, version, [self.groups[name] for name in names], mask_below)
                for group in batch.groups:
                    group.step = step
                    del self.ready[group.id]
                self.batches[step] = batch
                self.formed_steps = step + 1
            case BatchTrained(step=step):
                self.trained += len(self.batches[step].groups)
                self.trained_steps = step + 1
            case CheckpointDurable(steps=steps):
                self.durable_steps = steps
                for step in [step for step in self.batches if step < steps]:
                    for group in self.batches.pop(step).groups:
                        self._end(group.id)
            case VersionLive(version=version):
                self.live_version = version
            case EvalStarted(dataset=dataset, version=version, prompts=prompts):
                self.evaluations[version] = EvaluationState(dataset, version, prompts)
            case EvalScored(version=version, group=name, rewards=rewards, oldest=oldest, newest=newest, payload=payload):
                evaluation = self.evaluations[version]
                self.released += payload.keys if payload is not None else []
                if rewards:
                    evaluation.rewards[name] = rewards
                    evaluation.oldest, evaluation.newest = min(oldest, evaluation.oldest), max(newest, evaluation.newest)
                else:
                    evaluation.failed.add(name)
            case EvalEnded(version=version):
                del self.evaluations[version]
                self.last_evaluation = record
                self.evaluated.add(version)
            case RunFinished(steps=steps):
                self.finished_steps = steps
            case _:
                raise TypeError(f"the buffer does not know ledger record {type(record).__name__}")

    def _end(self, name: str) -> None:
        group = self.groups.pop(name)
        self.ready.pop(name, None)
        self._release(group)

    def _release(self, group: GroupState, but: Payload | None = None) -> None:
        """Lets go of all that the store holds of a group, ``but`` what its next attempt goes on from."""
        held = group.scored.keys if group.scored is not None else group.partial.keys if group.partial is not None else ()
        self.released.extend(held if but is None else [key for key in held if key not in but.keys])


def _without(samples: list[SampleMeta], removed: tuple[int, ...]) -> list[SampleMeta]:
    return [sample for index, sample in enumerate(samples) if index not in removed]
