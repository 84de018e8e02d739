"""The command line of the simulation: ``myxo simulate``, or ``python -m services.buffer.simulation``."""

import argparse
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from services.buffer.simulation import simulation_report
from services.buffer.simulation.simulation_run import ORDERS, POLICIES, Setting, SimulationPlan, settings
from services.buffer.simulation.workload_model import WorkloadModel
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError
from shared.runtime.exit_codes import Parser, ended

PROGRAM = "myxo simulate"

WIDTH = 130
"""Characters of a line that goes into a file."""

_ABOUT = """Simulate a run's throughput and staleness: the buffer's own decisions in a world whose GPUs follow a simple model.

Prints what a synchronous run would use of its GPUs and by how much any schedule could be faster, then for every policy, order and bound
the speed-up, the ages of what was trained, and what was dropped or masked by length. docs/simulation.md tells what the model leaves out."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    given = parser().parse_args(arguments)

    def work() -> int:
        _check(given)
        model = WorkloadModel(**{field.name: getattr(given, field.name) for field in fields(WorkloadModel)})
        windows = given.windows or [model.groups + 1, 2 * model.groups]
        if min(windows) < model.groups:
            raise ConfigError("--windows", min(windows), f"at least the {model.groups} groups of a batch")
        wanted = settings(given.policies, given.orders, windows)
        plan = SimulationPlan(model, wanted, given.bounds, given.steps, given.warm_up, given.seed, not given.no_interrupts)
        _simulate(plan, given.json, given.chart)
        return exit_codes.DONE

    return ended(PROGRAM, work)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all options."""
    top = Parser(prog=PROGRAM, description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    what = top.add_argument_group("what is compared")
    what.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="staleness policies (default all)")
    orders = "orders of the batches (default completion, for drop all of them)"
    what.add_argument("--orders", nargs="+", choices=ORDERS, help=orders)
    what.add_argument("--bounds", nargs="+", type=int, default=[1, 2, 4], metavar="S", help="bounds on staleness (default 1 2 4)")
    windows = "groups that windowed_fifo looks ahead (default one more than a batch has, and two batches)"
    what.add_argument("--windows", nargs="+", type=int, metavar="N", help=windows)
    what.add_argument("--no-interrupts", action="store_true", help="let generations end that have fallen behind the bound")
    how = top.add_argument_group("how long")
    how.add_argument("--steps", type=int, default=100, metavar="N", help="steps to measure (default 100)")
    how.add_argument("--warm-up", type=int, default=15, metavar="N", help="steps before them (default 15)")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same figures (default 0)")
    how.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    how.add_argument("--chart", type=Path, metavar="FILE", help="write a picture there, as PNG")
    _with_model(top.add_argument_group("the model"))
    return top


def _with_model(group: argparse._ArgumentGroup) -> None:
    for field in fields(WorkloadModel):
        default, about = field.default, field.metadata["about"]
        kind = float if isinstance(default, float) else int
        shown = about if default is None else f"{about} (default {default:g})"
        name = "--" + field.name.replace("_", "-")
        group.add_argument(name, type=kind, default=default, metavar="X" if kind is float else "N", help=shown)


def _check(given: argparse.Namespace) -> None:
    if given.steps < 2:
        raise ConfigError("--steps", given.steps, "at least 2, for time is measured between steps")
    for name, least in (("--bounds", min(given.bounds)), ("--warm-up", given.warm_up), ("--seed", given.seed)):
        if least < 0:
            raise ConfigError(name, least, "at least 0")
    for name, path in (("--json", given.json), ("--chart", given.chart)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(name, str(path), "a file in a directory that is there")
    if given.chart is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--chart", str(given.chart), "needs matplotlib: pip install 'myxo[report]'")


def _simulate(plan: SimulationPlan, json_path: Path | None, chart: Path | None) -> None:
    baseline = plan.baseline()
    columns = (TextColumn("{task.description:36}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=len(plan.settings) * len(plan.bounds) * (plan.steps + plan.warm_up))

        def stepped(setting: Setting, bound: int) -> None:
            progress.update(bar, advance=1, description=f"{setting.name}, bound {bound}")

        outcomes = list(plan.outcomes(baseline, stepped))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    simulation_report.show(plan, baseline, outcomes, console)
    if json_path is not None:
        json_path.write_text(json.dumps(simulation_report.as_json(plan, baseline, outcomes), indent=2, ensure_ascii=False) + "\n")
    if chart is not None:
        simulation_report.draw(baseline, outcomes, chart)
