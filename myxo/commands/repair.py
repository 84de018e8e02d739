"""``myxo repair RUN``: says what a run that a loss of power has torn apart needs to continue, and its cost; with ``--yes``, does it."""

import argparse
import asyncio
from pathlib import Path

from rich.console import Console
from rich.text import Text

from myxo.commands.command_arguments import add_json, add_run
from myxo.run import run_repair
from myxo.run.run_access import Access, reach
from myxo.run.run_repair import LedgerExtent, RepairPlan, repair_plan
from shared.bus.registry import Registry
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError
from shared.runtime.safe_text import json_text

WRITERS = ("buffer", "trainer")  # services that write the ledger and the checkpoints


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
        if busy := await at_work(access):
            raise ConfigError("RUN", run, f"{', '.join(busy)} are at work on it; end the run first")
        ledger = await run_repair.ledger_extent(access.bus, access.run)
        held = run_repair.checkpoints(access.config)
        plan = repair_plan(ledger, held)
        moved = await run_repair.carry_out(access, plan) if agreed and plan.needed and not plan.problem else []
        done = agreed and not plan.problem
        if as_json:
            told = {
                "run": access.run,
                **vars(plan),
                "cut": None if plan.cut is None else vars(plan.cut),
                "needed": plan.needed,
                "done": done,
            }
            console.file.write(json_text(told) + "\n")
        else:
            for line in lines(ledger, held, plan, access.run, done=done):
                console.print(Text(line), soft_wrap=True)
            for path in moved:
                console.print(Text(f"put aside: {path}"), soft_wrap=True)
    return exit_codes.FAILED if plan.problem or (plan.needed and not agreed) else exit_codes.DONE


async def at_work(access: Access) -> list[str]:
    """Returns the services that read or write what a repair changes, of those that answer."""
    registry = Registry(access.bus, access.run)
    return [status.instance for service in WRITERS if access.live for status in await registry.alive(service)]


def lines(ledger: LedgerExtent, held: list[int], plan: RepairPlan, run: str, *, done: bool) -> list[str]:
    """Returns the report, a line each."""
    kept = ", ".join(map(str, held)) or "none"
    told = [f"ledger: {ledger.trained} steps trained, the batches of {ledger.durable} freed. Checkpoints, by steps trained: {kept}"]
    if plan.problem:
        return [
            *told,
            f"cannot be repaired: {plan.problem}",
            "Its newest checkpoint's weights can begin another run: `myxo convert` writes them in Hugging Face's format."
            if held
            else "Put its checkpoints back where they were, or start it anew: `myxo up CONFIG --fresh`.",
        ]
    if not plan.needed:
        return [*told, f"nothing to repair: the run continues from {_from(plan.resume)}"]
    if plan.cut is not None:
        count = plan.cut.last - plan.cut.after
        told.append(f"the ledger's last {count} records cannot be kept: {plan.cut.why}; their groups are generated or trained anew")
    if plan.set_aside:
        lost = max(plan.set_aside) - plan.resume
        named = ", ".join(map(str, plan.set_aside))
        told.append(f"the ledger knows nothing of the checkpoints of {named} steps: they are put aside, and {lost} steps are trained anew")
    end = "done: `myxo up` continues" if done else f"nothing was changed; this does it: myxo repair {run} --yes"
    return [*told, f"the run continues from {_from(plan.resume)}", end]


def _from(steps: int) -> str:
    return f"its checkpoint of {steps} steps" if steps else "the weights that it began with"
