"""What a run that a loss of power or a bad disk has torn apart needs to go on. It is pure.

The ledger and the checkpoints are written one after the other, to files of their own. Where the last records of the ledger are lost, a
checkpoint may be ahead of it: it has steps that the ledger does not know as trained. Where records are lost in its middle,
what follows them has no ground. So the ledger is cut before its first gap, and the run goes back to a checkpoint that the ledger knows.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shared.schema.ledger import BatchTrained, CheckpointDurable, LedgerRecord, LedgerRepaired


@dataclass(frozen=True)
class LedgerCut:
    """Records of the ledger that cannot be kept: all with a sequence above ``after``, up to ``last``. ``why``: the first one's trouble."""

    after: int
    last: int
    why: str


@dataclass(frozen=True)
class LedgerExtent:
    """How far the good part of a ledger goes.

    trained: steps that it says were trained, which is as far as a checkpoint may be. durable: steps below which batches have been freed.
    cut: what is not good.
    """

    trained: int = 0
    durable: int = 0
    cut: LedgerCut | None = None


@dataclass(frozen=True)
class RepairPlan:
    """What is to be done.

    Attributes:
        cut: records of the ledger to remove.
        resume: the steps of the checkpoint that the run will go on from; 0: from the weights that it began with.
        set_aside: checkpoints that the ledger knows nothing of, by their steps.
        problem: empty, or why nothing can be done.
    """

    resume: int
    cut: LedgerCut | None = None
    set_aside: tuple[int, ...] = ()
    problem: str = ""

    @property
    def needed(self) -> bool:
        """Returns whether anything is to be done."""
        return self.cut is not None or bool(self.set_aside)


def extent(records: Iterable[tuple[int, LedgerRecord]], last: int) -> LedgerExtent:
    """Returns how far a ledger is good.

    Args:
        records: (sequence, record) of all that can be read, in order. last: the sequence of the newest one that there was.
    """
    found = list(records)
    mended = {record.cut_after: record.cut_last for _, record in found if isinstance(record, LedgerRepaired) and record.cut_last}
    trained, durable, before = 0, 0, 0
    cut: LedgerCut | None = None
    for sequence, record in found:
        expected = mended.get(before, before) + 1
        if sequence != expected:
            cut = LedgerCut(before, last, f"records {expected} to {sequence - 1} are gone, or cannot be read")
            break
        before = sequence
        if isinstance(record, BatchTrained):
            trained = record.step + 1
        elif isinstance(record, CheckpointDurable):
            durable = record.steps
    if cut is None and last > mended.get(before, before):
        cut = LedgerCut(before, last, f"records {before + 1} to {last} are gone, or cannot be read")
    return LedgerExtent(trained, durable, cut)


def repair_plan(ledger: LedgerExtent, checkpoints: Iterable[int]) -> RepairPlan:
    """Returns what a run needs.

    Args:
        checkpoints: the steps of each complete one that all of the trainer's roles have.
    """
    held = sorted(checkpoints)
    newest = held[-1] if held else 0
    if ledger.durable <= newest <= ledger.trained:
        return RepairPlan(newest, ledger.cut)
    known = [steps for steps in [0, *held] if ledger.durable <= steps <= ledger.trained]
    ahead = tuple(steps for steps in held if steps > ledger.trained)
    if not known:
        kept = ", ".join(map(str, held)) or "none"
        return RepairPlan(
            newest,
            ledger.cut,
            problem=f"the ledger can be gone on with from {ledger.durable} to {ledger.trained} steps, and no checkpoint is of so many"
            f" (there: {kept})",
        )
    return RepairPlan(known[-1], ledger.cut, ahead)
