"""What a run that a loss of power or a bad disk has torn apart needs to continue, and its repair.

The ledger and the checkpoints are written one after the other, to files of their own. Where the last records of the ledger are lost, a
checkpoint may be ahead of it: it has steps that the ledger does not know as trained. Where records are lost in its middle, what follows
them has no ground. So the ledger is cut before its first gap, and the run goes back to a checkpoint that the ledger knows.
"""

import contextlib
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nats.js.errors import BadRequestError, NotFoundError

from myxo.run.run_access import Access
from shared.bus import runs, streams
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
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

    ``cut``: records of the ledger to remove. ``resume``: the steps of the checkpoint that the run continues from; 0: from the weights that
    it began with. ``set_aside``: checkpoints that the ledger knows nothing of, by their steps. ``problem``: empty, or why nothing can be
    done.
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

    ``records``: (sequence, record) of all that can be read, in order. ``last``: the sequence of the newest one that there was.
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
    """Returns what a run needs. ``checkpoints``: the steps of each complete one that all of the trainer's roles have."""
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
            problem=f"the ledger can be continued from {ledger.durable} to {ledger.trained} steps, and no checkpoint is of so many"
            f" (there: {kept})",
        )
    return RepairPlan(known[-1], ledger.cut, ahead)


CHECKPOINTS = {"actor": "checkpoints", "critic": "critic-checkpoints"}  # where the trainer's roles keep theirs, in the run's directory
MARKER = "checkpoint.json"  # What a complete checkpoint has (`services.trainer.parallel.checkpoint`)
ASIDE = ".set-aside"  # what the name of a checkpoint that is not used any more ends with
_STEP = re.compile(r"step_(\d{8,})")


async def ledger_extent(bus: Bus, run: str) -> LedgerExtent:
    """Returns how far the run's ledger is good. Raises DeadlineExceeded."""
    stream = Subjects(run).ledger_stream
    last = await streams.last_sequence(bus, stream)
    return extent([found async for found in streams.read(bus, stream, LedgerRecord, strict=False)], last)


def checkpoints(config: RunConfig) -> list[int]:
    """Returns the steps of the complete checkpoints that all of the trainer's roles have on this machine, oldest first."""
    roots = [config.trained / CHECKPOINTS["actor"]]
    if config.algorithm.has_critic:
        roots.append(config.trained / CHECKPOINTS["critic"])
    return sorted(set.intersection(*({step for step, _ in _complete(root)} for root in roots)))


def _complete(root: Path) -> Iterable[tuple[int, Path]]:
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if (named := _STEP.fullmatch(path.name)) and (path / MARKER).is_file():
            yield int(named[1]), path


async def carry_out(access: Access, plan: RepairPlan) -> list[Path]:
    """Cuts the ledger, puts checkpoints aside, and writes down in the ledger that it was done. Returns where those lie now.

    What it does may be done once more after it was interrupted: the record comes last.
    """
    moved = [aside for step in plan.set_aside for aside in _put_aside(access.config, step)]
    bus, names = access.bus, Subjects(access.run)
    if plan.cut is not None:
        for sequence in range(plan.cut.last, plan.cut.after, -1):  # from the end: an interrupted one has only shortened it
            with contextlib.suppress(NotFoundError, BadRequestError):  # it is one of those that are gone
                await bus.js.delete_msg(names.ledger_stream, sequence)
    record = LedgerRepaired(
        resume=plan.resume,
        cut_after=0 if plan.cut is None else plan.cut.after,
        cut_last=0 if plan.cut is None else plan.cut.last,
        set_aside=plan.set_aside,
        at=time.time(),
    )
    await runs.append(bus, access.run, record)
    return moved


def _put_aside(config: RunConfig, step: int) -> Iterable[Path]:
    for name in CHECKPOINTS.values():
        for found, path in _complete(config.trained / name):
            if found == step:
                yield path.rename(path.with_name(path.name + ASIDE + f"-{time.time_ns()}"))
