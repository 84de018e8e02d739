"""The buffer's state: the fold of the run's ledger, and nothing else.

`BufferState.apply` takes one record; replaying the ledger from its beginning gives the very state that the killed process had.
Decisions are in `services.buffer.policy`; this module decides nothing. Invariant: a group is in `groups` from its admission until its
end (trained and durable, dropped, or dead), so memory follows what is in flight, not how long the run is.
"""

import sys
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shared.data.pass_rates import of_rollouts
from shared.schema import ledger
from shared.schema.ledger import LedgerRecord, eval_group_id, group_id
from shared.schema.messages import Payload, SampleMeta

NOTHING_TRAINED = 1 << 30  # Stands for the version of a token that does not exist: newer than any


@dataclass(slots=True)
class Result:
    """The part of a scored group that the state keeps: the data for its batch, in little memory.

    keys, size, sizes, digest, tokens: of its payload, as in `Payload`. oldest: version of the oldest trained token of all. rewards:
    float64 [m] of its m samples. removed: positions of samples that a filter took out of the loss. parts: as in `ScoredGroup`.
    """

    attempt: int
    keys: tuple[str, ...]
    size: int
    sizes: tuple[int, ...]
    digest: str
    oldest: int
    samples: list[SampleMeta]
    rewards: "array[float]"
    tokens: "array[int]"
    removed: tuple[int, ...] = ()
    parts: tuple[dict[str, float], ...] = ()

    @classmethod
    def of(cls, scored: ledger.ScoredGroup) -> "Result":
        payload, samples, removed = scored.payload, scored.samples, scored.removed
        oldest = min([sample.oldest for sample in trained_of(samples, removed)], default=NOTHING_TRAINED)
        rewards, tokens = array("d", scored.rewards), array("I", payload.tokens)
        parts = tuple({sys.intern(name): value for name, value in sample.items()} for sample in scored.parts)  # names are kept once
        stored = (tuple(payload.keys), payload.bytes, payload.sizes, payload.digest)
        return cls(scored.attempt, *stored, oldest, samples, rewards, tokens, removed, parts)

    @property
    def newest(self) -> list[int]:
        """Returns the version of the newest trained token of each sample that is trained."""
        return [sample.newest for sample in trained_of(self.samples, self.removed)]

    @property
    def payload(self) -> Payload:
        """Returns the reference to the stored samples."""
        keys, tokens = list(self.keys), tuple(self.tokens)
        return Payload(keys=keys, bytes=self.size, sizes=self.sizes, tokens=tokens, digest=self.digest)

    def stale(self, mask_below: int) -> tuple[int, ...]:
        """Returns the positions of samples that hold nothing of version ``mask_below`` or newer."""
        return tuple(index for index, sample in enumerate(self.samples) if sample.newest < mask_below) if mask_below else ()


@dataclass(slots=True)
class GroupState:
    """A group in flight. ``scored`` is set once it came back; ``step`` once it is in a batch.

    ``partial``: samples that the present attempt continues from, but for those that hold nothing newer than ``renew_below``.
    ``refused``: when the trainer refused what it holds. ``lost``: how often the store has lost that.
    """

    number: int
    id: str
    attempt: int = 0
    scored: Result | None = None
    step: int | None = None
    partial: Payload | None = None
    renew_below: int = 0
    refused: tuple[float, ...] = ()
    lost: int = 0


@dataclass(slots=True)
class BatchRecord:
    """A batch that was formed: kept until a checkpoint beyond it is durable, so that it can be handed out again.

    ``lost``: groups that have left it since, and that nothing has replaced yet.
    """

    step: int
    version: int
    groups: list[GroupState]
    mask_below: int = 0
    lost: list[str] = field(default_factory=list)


@dataclass(slots=True)
class EvaluationState:
    """The evaluation of one set under way. ``started``: seconds since the epoch. ``pending``: rows that have not come back, by group id.

    ``groups``: rewards of each prompt's rollouts; ``lengths`` of all samples, in tokens; ``truncated``: rollouts that ended at a length;
    ``oldest``, ``newest``: versions that drew them. ``failed``: how many prompts came back without rewards.
    """

    dataset: str
    version: int
    prompts: int
    started: float
    pending: dict[str, int]
    groups: "list[array[float]]" = field(default_factory=list)
    lengths: "array[int]" = field(default_factory=lambda: array("I"))
    truncated: int = 0
    oldest: int = NOTHING_TRAINED
    newest: int = 0
    failed: int = 0


@dataclass
class BufferState:
    """The fold of a ledger. ``admitted``, ``trained``, ``dropped`` and ``dead`` count groups since the run began."""

    admitted: int = 0
    trained: int = 0
    dropped: int = 0
    dead: int = 0
    live_version: int = -1
    version_before: int = -1  # live before it
    trained_steps: int = 0
    durable_steps: int = 0
    groups: dict[str, GroupState] = field(default_factory=dict)
    ready: dict[str, GroupState] = field(default_factory=dict)  # scored, not yet batched, in the order they came back
    batches: dict[int, BatchRecord] = field(default_factory=dict)
    formed_steps: int = 0
    evaluations: dict[tuple[int, str], EvaluationState] = field(default_factory=dict)  # under way, by version and set
    evaluated: dict[tuple[int, str], ledger.EvalEnded] = field(default_factory=dict)  # those that ended, in order
    # Numbers of groups that were dropped or have died behind the oldest one in flight, in order
    ended: "array[int]" = field(default_factory=lambda: array("Q"))
    finished_steps: int = -1  # steps of the run when it last finished; more may have been asked for since
    released: list[str] = field(default_factory=list)  # payload keys let go by the latest record: free them

    @property
    def in_flight(self) -> int:
        """Returns the number of groups admitted and not ended: generating, being scored, ready, or in a batch not yet trained."""
        return self.admitted - self.trained - self.dropped - self.dead

    def ended_before(self, number: int) -> int:
        """Returns how many of the groups that were admitted before that one, which is in flight, were dropped or have died."""
        return self.dropped + self.dead - (len(self.ended) - bisect_left(self.ended, number))

    @property
    def outstanding(self) -> list[GroupState]:
        """Returns the groups that rollout or reward services have now."""
        return [group for group in self.groups.values() if group.scored is None]

    def apply(self, record: LedgerRecord) -> None:
        """Folds one record in. Records come from `services.buffer.policy` or from the ledger, in order."""
        fold = _FOLDS.get(type(record))
        if fold is None:
            raise TypeError(f"the buffer does not know ledger record {type(record).__name__}")
        self.released = []
        fold(self, record)

    def _groups_admitted(self, record: ledger.GroupsAdmitted) -> None:
        for number in range(record.first, record.first + record.count):
            name = group_id(number)
            self.groups[name] = GroupState(number, name)
        self.admitted += record.count

    def _groups_scored(self, record: ledger.GroupsScored) -> None:
        for scored in record.groups:
            group = self.groups[scored.group]
            if group.partial is not None:
                self._release(group)
                group.partial = None
            group.scored = Result.of(scored)
            self.ready[scored.group] = group

    def _group_requeued(self, record: ledger.GroupRequeued) -> None:
        group = self.groups[record.group]
        self._leave_batch(group)
        self._release(group, but=record.partial)
        group.lost += record.reason == ledger.PAYLOAD_LOST
        group.attempt, group.scored, group.partial, group.renew_below = record.attempt, None, record.partial, record.renew_below
        self.ready.pop(record.group, None)

    def _groups_dropped(self, record: ledger.GroupsDropped) -> None:
        for name in record.groups:
            self._end(name)
        self.dropped += len(record.groups)

    def _group_dead(self, record: ledger.GroupDead) -> None:
        self._leave_batch(self.groups[record.group])
        self._end(record.group)
        self.released += record.payload.keys if record.payload is not None else []
        self.dead += 1

    def _batch_formed(self, record: ledger.BatchFormed) -> None:
        batch = BatchRecord(record.step, record.version, [self.groups[name] for name in record.groups], record.mask_below)
        for group in batch.groups:
            group.step = record.step
            del self.ready[group.id]
        self.batches[record.step] = batch
        self.formed_steps = record.step + 1

    def _sample_refused(self, record: ledger.SampleRefused) -> None:
        group = self.groups[record.group]
        group.refused = (*group.refused, record.refused)

    def _batch_amended(self, record: ledger.BatchAmended) -> None:
        batch, added = self.batches[record.step], [self.groups[name] for name in record.added]
        for group in added:
            group.step = record.step
            del self.ready[group.id]
        batch.groups = sorted(batch.groups + added, key=lambda group: group.number)
        batch.lost = []
        if record.step < self.trained_steps:
            self.trained += len(added)

    def _batch_trained(self, record: ledger.BatchTrained) -> None:
        self.trained += len(self.batches[record.step].groups)
        self.trained_steps = record.step + 1

    def _checkpoint_durable(self, record: ledger.CheckpointDurable) -> None:
        self.durable_steps = record.steps
        for step in [step for step in self.batches if step < record.steps]:
            for group in self.batches.pop(step).groups:
                self._end(group.id)

    def _version_live(self, record: ledger.VersionLive) -> None:
        self.version_before, self.live_version = self.live_version, record.version

    def _eval_started(self, record: ledger.EvalStarted) -> None:
        pending = {eval_group_id(record.dataset, record.version, row): row for row in range(record.prompts)}
        evaluation = EvaluationState(record.dataset, record.version, record.prompts, record.at, pending)
        self.evaluations[record.version, record.dataset] = evaluation

    def _eval_scored(self, record: ledger.EvalScored) -> None:
        evaluation = self.evaluations[record.version, record.dataset]
        self.released += record.payload.keys if record.payload is not None else []
        del evaluation.pending[record.group]
        if not record.rewards:
            evaluation.failed += 1
            return
        evaluation.groups.append(array("d", of_rollouts(record.rewards, record.rollouts)))
        evaluation.lengths.extend(record.lengths)
        evaluation.truncated += len({record.rollouts[index] if record.rollouts else index for index in record.truncated})
        evaluation.oldest, evaluation.newest = min(evaluation.oldest, record.oldest), max(evaluation.newest, record.newest)

    def _eval_ended(self, record: ledger.EvalEnded) -> None:
        del self.evaluations[record.version, record.dataset]
        self.evaluated[record.version, record.dataset] = record

    def _run_finished(self, record: ledger.RunFinished) -> None:
        self.finished_steps = record.steps

    def _ledger_repaired(self, record: ledger.LedgerRepaired) -> None:
        """Nothing that the ledger says has changed; what it does not say any more was never folded."""

    def _values_changed(self, record: ledger.ValuesChanged) -> None:
        """The buffer decides by none of these values."""

    def _leave_batch(self, group: GroupState) -> None:
        if group.step is None:
            return
        batch = self.batches[group.step]
        batch.groups = [other for other in batch.groups if other is not group]
        batch.lost.append(group.id)
        self.trained -= group.step < self.trained_steps  # its training was undone with the trainer's death
        group.step, group.refused = None, ()

    def _end(self, name: str) -> None:
        group = self.groups.pop(name)
        insort(self.ended, group.number)
        oldest = next((one.number for one in self.groups.values()), self.admitted)
        del self.ended[: bisect_left(self.ended, oldest)]
        self.ready.pop(name, None)
        self._release(group)

    def _release(self, group: GroupState, but: Payload | None = None) -> None:
        """Releases the stored payload of a group, ``but`` the part that its next attempt continues."""
        held = group.scored.keys if group.scored is not None else group.partial.keys if group.partial is not None else ()
        self.released.extend(held if but is None else [key for key in held if key not in but.keys])


# The method that folds each kind of record in; it is named after the record
_FOLDS: dict[type[LedgerRecord], Callable[[BufferState, Any], None]] = {
    kind: vars(BufferState)[f"_{kind.event()}"] for kind in LedgerRecord.__subclasses__()
}


def trained_of(samples: list[SampleMeta], removed: tuple[int, ...]) -> list[SampleMeta]:
    """Returns the samples that a loss has something of: neither a filter took them out, nor are all of their tokens masked."""
    without = set(removed)
    return [sample for index, sample in enumerate(samples) if sample.trained and index not in without]
