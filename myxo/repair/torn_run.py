"""Reads what is left of a run that is at rest, and carries a repair out."""

import contextlib
import re
import time
from collections.abc import Iterable
from pathlib import Path

from nats.js.errors import BadRequestError, NotFoundError

from myxo.repair.repair_plan import LedgerExtent, RepairPlan, extent
from myxo.run.run_access import Access
from shared.bus import streams
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.schema.ledger import LedgerRecord, LedgerRepaired

CHECKPOINTS = {"actor": "checkpoints", "critic": "critic-checkpoints"}
"""Where the trainer's roles keep theirs, in the run's directory."""

MARKER = "checkpoint.json"
"""What a complete checkpoint has (`services.trainer.megatron.checkpoint_parts`)."""

ASIDE = ".set-aside"
"""What the name of a checkpoint that is not used any more ends with."""

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
            await _removed(bus, names.ledger_stream, sequence)
    record = LedgerRepaired(
        resume=plan.resume,
        cut_after=0 if plan.cut is None else plan.cut.after,
        cut_last=0 if plan.cut is None else plan.cut.last,
        set_aside=plan.set_aside,
        at=time.time(),
    )
    last = await streams.last_sequence(bus, names.ledger_stream)
    message_id = f"{names.ledger_stream}.{last + 1}.{record.at}"
    await bus.publish(names.ledger(record.event()), record.encode(), msg_id=message_id, after=(names.ledger_stream, last))
    return moved


def _put_aside(config: RunConfig, step: int) -> Iterable[Path]:
    for name in CHECKPOINTS.values():
        for found, path in _complete(config.trained / name):
            if found == step:
                yield path.rename(path.with_name(path.name + ASIDE + f"-{time.time_ns()}"))


async def _removed(bus: Bus, stream: str, sequence: int) -> None:
    with contextlib.suppress(NotFoundError, BadRequestError):  # it is one of those that are gone
        await bus.js.delete_msg(stream, sequence)
