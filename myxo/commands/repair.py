"""``myxo repair RUN``: says what a run that a loss of power or a bad disk has torn apart needs to continue, and its cost; with ``--yes``,
does it.

The ledger and the checkpoints are written one after the other, to files of their own. Where the last records of the ledger are lost, a
checkpoint may be ahead of it: it has steps that the ledger does not know as trained. Where records are lost in its middle, what follows
them has no ground. So the ledger is cut before its first gap, and the run goes back to a checkpoint that the ledger knows.
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from nats.js.errors import BadRequestError, NotFoundError
from rich.console import Console
from rich.text import Text

from myxo.commands.command_arguments import add_json, add_run
from myxo.run.run_access import Access, reach, refuse_work
from myxo.run.run_directory import CHECKPOINTS, checkpoints, complete_checkpoints
from shared.bus import runs, streams
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.model.final_exports import exported_steps, final_exports
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError
from shared.runtime.safe_text import json_text
from shared.schema.ledger import BatchTrained, CheckpointDurable, LedgerRecord, LedgerRepaired
from shared.schema.versions import version_after
from shared.transfer.weight_checkpoint import WeightCheckpoints

ASIDE = ".set-aside"  # what the name of a checkpoint or an export that is not used any more ends with


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
    found, trained, durable, before = list(records), 0, 0, 0
    mended = {record.cut_after: record.cut_last for _, record in found if isinstance(record, LedgerRepaired) and record.cut_last}
    for sequence, record in [*found, (last + 1, None)]:
        expected = mended.get(before, before) + 1
        if sequence != expected:
            why = f"records {expected} to {sequence - 1} are gone, or cannot be read"
            return LedgerExtent(trained, durable, LedgerCut(before, last, why))
        before = sequence
        if isinstance(record, BatchTrained):
            trained = record.step + 1
        elif isinstance(record, CheckpointDurable):
            durable = record.steps
    return LedgerExtent(trained, durable)


def repair_plan(ledger: LedgerExtent, complete: Iterable[int]) -> RepairPlan:
    """Returns what a run needs. ``complete``: the steps of each complete one that all of the trainer's roles have."""
    held = sorted(complete)
    newest = held[-1] if held else 0
    if ledger.durable <= newest <= ledger.trained:
        return RepairPlan(newest, ledger.cut)
    known = [steps for steps in [0, *held] if ledger.durable <= steps <= ledger.trained]
    ahead = tuple(steps for steps in held if steps > ledger.trained)
    if not known:
        problem = f"the ledger can be continued from {ledger.durable} to {ledger.trained} steps, and no checkpoint is of so many"
        return RepairPlan(newest, ledger.cut, problem=f"{problem} (there: {', '.join(map(str, held)) or 'none'})")
    return RepairPlan(known[-1], ledger.cut, ahead)


async def carry_out(access: Access, plan: RepairPlan) -> list[Path]:
    """Withdraws what is left of the steps that are gone, puts their checkpoints and final exports aside, cuts the ledger, and writes down
    in it that this was done. Returns where what was put aside lies now.

    What it does may be done once more after it was interrupted: the record comes last.
    """
    bus, config, names, cut = access.bus, access.config, Subjects(access.run), plan.cut or LedgerCut(0, 0, "")
    steps = config.rollout.num_rollout
    WeightCheckpoints.of_run(config).remove_after(version_after(plan.resume, config.weights.update_weights_interval, steps))
    found = [path for path in final_exports(config) if (exported_steps(config, path) or 0) > plan.resume]
    for name in CHECKPOINTS.values():
        found += [path for step, path in complete_checkpoints(config.trained / name) if step in plan.set_aside]
    moved = [path.rename(path.with_name(f"{path.name}{ASIDE}-{time.time_ns()}")) for path in found]
    await _withdraw(bus, config)
    for sequence in range(cut.last, cut.after, -1):  # from the end: an interrupted one has only shortened it
        with contextlib.suppress(NotFoundError, BadRequestError):  # it is one of those that are gone
            await bus.js.delete_msg(names.ledger_stream, sequence)
    record = LedgerRepaired(resume=plan.resume, cut_after=cut.after, cut_last=cut.last, set_aside=plan.set_aside, at=time.time())
    await runs.append(bus, access.run, record)
    return moved


async def _withdraw(bus: Bus, config: RunConfig) -> None:
    """Takes away what services would still serve or train with of the steps that are gone: the versions that are announced, and the tasks
    and samples in the queues. The trainer and the buffer make all of it anew."""
    names = Subjects(config.run.name)
    for key in ("live", "snapshot"):
        await bus.delete(names.weights_bucket, key)
    for queue in (names.task_stream, names.generated_stream, names.scored_stream):
        with contextlib.suppress(NotFoundError):  # an interrupted one has removed it
            await bus.js.delete_stream(queue)  # one that is only purged still takes a group's next task for a repeat of its last
    await streams.create(bus, config)


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_run(command)
    command.add_argument("--yes", action="store_true", help="do what is needed; without it nothing is changed")
    add_json(command)
    command.set_defaults(run_command=lambda parsed, console: asyncio.run(repair(parsed.run, parsed.dir, console, parsed.yes, parsed.json)))


async def repair(run: str, directory: Path, console: Console, agreed: bool, as_json: bool) -> int:
    """Prints what is needed, and does it where that is ``agreed``.

    Returns 0 where the run can continue; 1 where it cannot, or where it needs what was not agreed to.
    Raises ConfigError where there is no such run, or where it continues at present.
    """
    async with reach(run, directory) as access:
        await refuse_work(access)
        stream, held = Subjects(access.run).ledger_stream, checkpoints(access.config)
        last = await streams.last_sequence(access.bus, stream)
        ledger = extent([found async for found in streams.read(access.bus, stream, LedgerRecord, strict=False)], last)
        plan = repair_plan(ledger, held)
        try:
            moved = await carry_out(access, plan) if agreed and plan.needed and not plan.problem else []
        except (TimeoutError, ConnectionError):  # of the bus
            raise
        except OSError as error:
            wanted = f"a run whose files can be changed from here, which it needs ({error}); nothing is cut"
            raise ConfigError("RUN", run, wanted) from error
        done = agreed and not plan.problem
        if as_json:
            found = {"run": access.run, **asdict(plan), "needed": plan.needed, "done": done}
            console.file.write(json_text(found) + "\n")
        else:
            for line in (*lines(ledger, held, plan, access.run, done=done), *(f"put aside: {path}" for path in moved)):
                console.print(Text(line), soft_wrap=True)
    return exit_codes.FAILED if plan.problem or (plan.needed and not agreed) else exit_codes.DONE


def lines(ledger: LedgerExtent, held: list[int], plan: RepairPlan, run: str, *, done: bool) -> list[str]:
    """Returns the report, a line each."""
    kept = ", ".join(map(str, held)) or "none"
    found = [f"ledger: {ledger.trained} steps trained, the batches of {ledger.durable} freed. Checkpoints, by steps trained: {kept}"]
    if plan.problem:
        return [
            *found,
            f"cannot be repaired: {plan.problem}",
            "Its newest checkpoint's weights can begin another run: `myxo convert` writes them in Hugging Face's format."
            if held
            else "Put its checkpoints back where they were, or start it anew: `myxo up CONFIG --fresh`.",
        ]
    if not plan.needed:
        return [*found, f"nothing to repair: the run continues from {_from(plan.resume)}"]
    if plan.cut is not None:
        count = plan.cut.last - plan.cut.after
        found.append(f"the ledger's last {count} records cannot be kept: {plan.cut.why}; their groups are generated or trained anew")
    if plan.set_aside:
        lost = max(plan.set_aside) - plan.resume
        named = ", ".join(map(str, plan.set_aside))
        found.append(f"the ledger knows nothing of the checkpoints of {named} steps: they are put aside, and {lost} steps are trained anew")
    end = "done: `myxo up` continues" if done else f"nothing was changed; this does it: myxo repair {run} --yes"
    return [*found, f"the run continues from {_from(plan.resume)}", end]


def _from(steps: int) -> str:
    return f"its checkpoint of {steps} steps" if steps else "the weights that it began with"
