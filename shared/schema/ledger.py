"""The ledger's records: every transition of a group, once, in order. The buffer's state is their fold; the audit replays them.

Subject ``<run>.ledger.<event>``; the stream keeps them all. Groups carry one of the ends ``trained``, ``dropped``, ``dead``.
"""

import re

from pydantic import Field

from shared.runtime.errors import Fault
from shared.schema.message import LARGEST, MAX_SAMPLES, Count, GroupId, Name, Parts, Reason, Reward, Timestamp
from shared.schema.messages import Attestation, EvalFigures, Message, Payload, ScoredGroup

PAYLOAD_LOST = "payload lost"  # Reason of groups that are generated anew because the store holds their samples no more
MOST_SKIPPED = 64  # The most versions that one evaluation says it stands for
_EVAL_GROUP = re.compile(r"eval\.([^.]+)\.([0-9]+)\.([0-9]+)\Z")


class LedgerRecord(Message):
    """Base of all ledger records. ``at``: seconds since the epoch when it was decided."""

    at: Timestamp

    @classmethod
    def event(cls) -> str:
        """Returns the record's name in its subject, for example ``groups_admitted``."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


class GroupsAdmitted(LedgerRecord):
    """``count`` groups enter the run, numbered from ``first`` on; ``version`` was live and admitted them."""

    first: Count
    count: int = Field(gt=0, le=LARGEST)
    version: Count


class GroupsScored(LedgerRecord):
    """Groups came back with rewards and are ready to be batched."""

    groups: list[ScoredGroup]


class GroupRequeued(LedgerRecord):
    """A group is generated anew as ``attempt``, or continues what ``partial`` holds, but for samples all older than ``renew_below``."""

    group: GroupId
    attempt: Count
    reason: Reason
    partial: Payload | None = None
    renew_below: Count = 0


class GroupsDropped(LedgerRecord):
    """Groups end as dropped, for ``reason``."""

    groups: list[GroupId]
    reason: Reason


class GroupDead(LedgerRecord):
    """A group ends as dead: it failed too often, or can never succeed. ``payload``: what had been generated, to be freed. ``fault``: what
    was at fault (`shared.runtime.errors.Fault`)."""

    group: GroupId
    reason: Reason
    fault: Fault = ""
    payload: Payload | None = None


class BatchFormed(LedgerRecord):
    """``step`` trains these groups on weights of ``version``, now and after any restart; older tokens than ``mask_below`` are masked."""

    step: Count
    version: Count
    groups: list[GroupId]
    mask_below: Count = 0


class SampleRefused(LedgerRecord):
    """The trainer refused the batch of ``step`` at ``refused`` (seconds since the epoch): it cannot train ``sample`` of ``group``."""

    step: Count
    group: GroupId
    sample: Count
    reason: Reason
    refused: Timestamp


class BatchAmended(LedgerRecord):
    """``step`` trains ``added`` in the place of ``removed``, which are dead or generated anew; fewer where nothing can take their place."""

    step: Count
    removed: list[GroupId]
    added: list[GroupId]


class BatchTrained(LedgerRecord):
    """The trainer made ``step`` into weights: its groups end as trained. ``started``/``ended``: seconds since the epoch.

    ``attestation``: the trainer's own account of what it trained, which the audit compares with the batch.
    """

    step: Count
    version: Count
    started: Timestamp
    ended: Timestamp
    attestation: Attestation | None = None


class CheckpointDurable(LedgerRecord):
    """A checkpoint with every step below ``steps`` is durable; their payloads are freed after this record."""

    steps: Count


class VersionLive(LedgerRecord):
    """Weights of ``version`` are served by at least one replica."""

    version: Count


class EvalStarted(LedgerRecord):
    """``prompts`` held-out prompts of ``dataset`` go out, for weights of ``version``.

    ``skipped``: versions that were due and that it is made in place of, since they never went live; the newest `MOST_SKIPPED`.
    """

    dataset: Name
    version: Count
    prompts: Count
    skipped: tuple[Count, ...] = Field(default=(), max_length=MOST_SKIPPED)


class EvalScored(LedgerRecord):
    """One held-out prompt of evaluation ``version`` is scored or, without rewards, failed for ``reason``; its ``payload`` is freed.

    ``oldest``/``newest``: versions that generated it. ``lengths``: tokens of each response; ``truncated``: positions of samples that ended
    at their length. ``parts``, ``rollouts`` as in `ScoredGroup`; ``reason``: why it failed, ``fault``: what was at fault then.
    """

    group: GroupId
    dataset: Name
    version: Count
    rewards: list[Reward] = Field(max_length=MAX_SAMPLES)
    parts: tuple[Parts, ...] = Field(default=(), max_length=MAX_SAMPLES)
    lengths: tuple[Count, ...] = Field(default=(), max_length=MAX_SAMPLES)
    truncated: tuple[Count, ...] = Field(default=(), max_length=MAX_SAMPLES)
    rollouts: tuple[Count, ...] = Field(default=(), max_length=MAX_SAMPLES)
    oldest: Count = 0
    newest: Count = 0
    reason: Reason = ""
    fault: Fault = ""
    payload: Payload | None = None


class EvalEnded(LedgerRecord, EvalFigures):
    """The evaluation of a set has ended: every prompt is scored or dead, or its deadline has passed."""


class RunFinished(LedgerRecord):
    """Every step is trained and durable, every evaluation ended."""

    steps: Count


class LedgerRepaired(LedgerRecord):
    """`myxo repair` has mended the run; it continues from its checkpoint of ``resume`` steps.

    ``cut_after``, ``cut_last``: the records between them were removed, by sequence, the first excluded; ``cut_last`` 0: none.
    ``set_aside``: steps of checkpoints of which the ledger knew nothing, and which are not used any more.
    """

    resume: Count
    cut_after: Count = 0
    cut_last: Count = 0
    set_aside: tuple[Count, ...] = Field(default=(), max_length=10_000)


class ValuesChanged(LedgerRecord):
    """The run continues from its checkpoint of ``step`` steps with other values of its training.

    ``changed``: each as ``section.field: old → new``.
    """

    step: Count
    changed: tuple[Reason, ...] = Field(max_length=64)

    def words(self) -> str:
        """Returns it in one line for people."""
        return f"continues at step {self.step} with " + ", ".join(one.partition(".")[2].replace(": ", " ") for one in self.changed)


def group_id(index: int) -> str:
    """Returns the id of the group that was admitted as the ``index``-th (from 0)."""
    return f"g{index:08d}"


def group_number(group: str) -> int:
    """Returns how many groups were admitted before a training group, from its id."""
    return int(group[1:])


def is_evaluation(group: str) -> bool:
    """Returns whether a group's id is that of a held-out prompt."""
    return group.startswith("eval.")


def eval_group_id(dataset: str, version: int, row: int) -> str:
    """Returns the id of a held-out prompt in the evaluation of ``version``."""
    return f"eval.{dataset}.{version}.{row}"


def eval_group_parts(group: str) -> tuple[str, int, int] | None:
    """Returns (dataset, version, row) of an evaluation group's id; None for a training group's."""
    match = _EVAL_GROUP.match(group)
    return (match[1], int(match[2]), int(match[3])) if match else None
