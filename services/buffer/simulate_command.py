"""``myxo simulate``, or ``python -m services.buffer.simulate_command``: simulates every wanted policy at every wanted bound, and shows the
outcomes.

They are shown as tables, as bars against the bound, as JSON, and as a picture; matplotlib is an optional extra (``myxo[report]``), imported
only when a picture is made.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from numpy.random import default_rng
from rich import box
from rich.bar import Bar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from services.buffer.buffer_config import BufferConfig
from services.buffer.policy import Order
from services.buffer.simulated_world import DECILES, Baseline, LengthShare, LengthTally, WorkloadModel, World
from services.buffer.staleness import Policy
from shared.config.rollout_section import RolloutSection
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError
from shared.runtime.exit_codes import Parser, ended
from shared.schema.ledger import BatchFormed, LedgerRecord

# The staleness policies, and one that no run can have: admission keeps to the bound, batches take whatever came back
Simulated = Literal["unbounded", "drop", "requeue", "continue", "mask"]
POLICIES: tuple[Simulated, ...] = get_args(Simulated)
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True)
class Setting:
    """A policy and an order. window: groups that ``windowed_fifo`` looks ahead."""

    policy: Simulated
    order: Order = "completion"
    window: int = 0

    @property
    def name(self) -> str:
        """Returns the name of the setting in tables and JSON."""
        policy = "unbounded (reference)" if self.policy == "unbounded" else self.policy
        if (self.policy, self.order) == ("unbounded", "completion"):
            return policy
        return f"{policy}/{self.order}" + (f"({self.window})" if self.order == "windowed_fifo" else "")


@dataclass(frozen=True)
class PolicyOutcome:
    """The outcome of one setting at one bound.

    speedup: of steps per second, token_speedup: of trained tokens per second, both over the synchronous run; of_limit: part of the largest
    speed-up that there can be. max_age: over the whole run, in versions; ages: trained samples by age, after the warm-up. dropped,
    dropped_tokens: samples and generated tokens that were thrown away; masked: tokens in batches that were not trained.
    """

    setting: Setting
    bound: int
    steps: int
    speedup: float
    of_limit: float
    token_speedup: float
    samples_per_second: float
    max_age: int
    ages: dict[int, int]
    dropped: LengthShare
    dropped_tokens: LengthShare
    masked: LengthShare

    @property
    def mean_age(self) -> float:
        return sum(age * count for age, count in self.ages.items()) / max(1, sum(self.ages.values()))


@dataclass(frozen=True)
class SimulationPlan:
    """The plan of a simulation. steps: those that are measured, after ``warm_up`` others. interrupting: as for `World`."""

    model: WorkloadModel
    settings: Sequence[Setting]
    bounds: Sequence[int]
    steps: int
    warm_up: int
    seed: int
    interrupting: bool = True

    def baseline(self) -> Baseline:
        """Returns the synchronous run of the model."""
        return Baseline.of(self.model, default_rng(self.seed))

    def outcomes(self, baseline: Baseline, stepped: Callable[[Setting, int], None] = lambda *_: None) -> Iterable[PolicyOutcome]:
        """Simulates one after the other. stepped: called with setting and bound at every batch. Raises SimulationBroken."""
        for setting, bound in product(self.settings, self.bounds):
            yield self._outcome(setting, bound, baseline, stepped)

    def _outcome(self, setting: Setting, bound: int, baseline: Baseline, stepped: Callable[[Setting, int], None]) -> PolicyOutcome:
        model, tally = self.model, LengthTally(self.model, self.warm_up)

        def see(record: LedgerRecord) -> None:
            if isinstance(record, BatchFormed):
                stepped(setting, bound)

        config, enforced = buffer_config(model, setting, bound), setting.policy != "unbounded"
        world = World(model, config, default_rng(self.seed), tally, enforced=enforced, interrupting=self.interrupting, see=see)
        report = world.run(self.warm_up + self.steps)
        speedup = baseline.step / tally.step_seconds
        return PolicyOutcome(
            setting=setting,
            bound=bound,
            steps=self.steps,
            speedup=speedup,
            of_limit=speedup / baseline.limit,
            token_speedup=speedup * tally.tokens_per_step / (model.batch * model.capped_mean),
            samples_per_second=model.batch / tally.step_seconds,
            max_age=report.max_staleness,
            ages=dict(sorted(tally.ages.items())),
            dropped=tally.share("discarded", "discarded", "trained"),
            dropped_tokens=tally.share("discarded_tokens", "discarded_tokens", "batched_tokens"),
            masked=tally.share("masked_tokens", "batched_tokens"),
        )


def buffer_config(model: WorkloadModel, setting: Setting, bound: int) -> BufferConfig:
    """Returns the buffer's config for a setting at a bound."""
    policy: Policy = "drop" if setting.policy == "unbounded" else setting.policy
    rollout = RolloutSection(
        num_rollout=1,
        rollout_batch_size=model.groups,
        n_samples_per_prompt=model.samples,
        max_staleness=bound,
        staleness_policy=policy,
        rollout_order=setting.order,
    )
    return BufferConfig(rollout.model_copy(update={"rollout_window": setting.window or None}))  # also of windows that no run may have


def settings(policies: Sequence[Simulated], orders: Sequence[Order] | None, windows: Sequence[int]) -> list[Setting]:
    """Returns each policy in each order, once for every window where the order has one. orders None: all for ``drop``, else one."""
    wanted = []
    for policy in policies:
        for order in orders or (ORDERS if policy == "drop" else ("completion",)):
            wanted += [Setting(policy, order, window) for window in (windows if order == "windowed_fifo" else (0,))]
    return wanted


BAR = 60  # Characters of a bar that reaches the limit

# The shares by length that an outcome has
_SHARES = {
    "dropped": "samples thrown away (dropped, or generated anew)",
    "dropped_tokens": "tokens thrown away",
    "masked": "tokens in batches masked for their age",
}


def show(plan: SimulationPlan, baseline: Baseline, outcomes: Sequence[PolicyOutcome], console: Console) -> None:
    """Prints everything."""
    tables = (_speeds(plan, baseline, outcomes), *_shares(outcomes), _ages(outcomes))
    for part in (_model(plan, baseline), *tables, *_bars(baseline, outcomes)):
        console.print(part, soft_wrap=True)


def _model(plan: SimulationPlan, baseline: Baseline) -> str:
    model = plan.model
    stall = f", w = {model.push:g} s" if model.push else ""
    return (
        f"{model.gpus} GPUs, {model.split} of them generate; batch {model.groups} groups of {model.samples}; lengths lognormal, "
        f"σ = {model.sigma:g}, at most {model.cap:g} × the mean of {model.mean_tokens:g} tokens\n"
        f"g = {model.generation:.1f} GPU-s, h = {model.train:.1f} GPU-s, M = {baseline.makespan:.1f} s{stall}; "
        f"synchronous step {baseline.step:.1f} s, {model.batch / baseline.step:.2f} samples/s\n"
        f"U_sync = {baseline.utilisation:.3f}, limit {baseline.limit:.2f}×\n"
    )


def _speeds(plan: SimulationPlan, baseline: Baseline, outcomes: Sequence[PolicyOutcome]) -> Table:
    """Returns a row for each setting at each bound. Speed-ups are over the synchronous run."""
    table = _table("Throughput", "speed-up", "of limit", "in tokens", "samples/s", "mean age", "max age", "dropped", "masked")
    synchronous = f"{plan.model.batch / baseline.step:.2f}"
    table.add_row("synchronous", "", "1.00×", f"{1 / baseline.limit:.0%}", "1.00×", synchronous, "0.00", "0", "0.0%", "0.0%")
    for name, outcome in _named(outcomes):
        table.add_row(
            name,
            str(outcome.bound),
            f"{outcome.speedup:.2f}×",
            f"{outcome.of_limit:.0%}",
            f"{outcome.token_speedup:.2f}×",
            f"{outcome.samples_per_second:.2f}",
            f"{outcome.mean_age:.2f}",
            str(outcome.max_age),
            f"{outcome.dropped.overall:.1%}",
            f"{outcome.masked.overall:.1%}",
        )
    return table


def _shares(outcomes: Sequence[PolicyOutcome]) -> Iterator[Table]:
    for share, title in _SHARES.items():
        if found := [outcome for outcome in outcomes if any(getattr(outcome, share).by_decile)]:
            table = _table(f"By decile of response length, shortest first: {title}, %", *map(str, range(1, DECILES + 1)))
            for name, outcome in _named(found):
                table.add_row(name, str(outcome.bound), *(f"{part:.1%}"[:-1] for part in getattr(outcome, share).by_decile))
            yield table


def _ages(outcomes: Sequence[PolicyOutcome]) -> Table:
    """Returns the staleness of the trained samples: the batch's version less that of the oldest trained token."""
    ages = range(max(max(outcome.ages, default=0) for outcome in outcomes) + 1)
    table = _table("Trained samples by age in versions, %", *map(str, ages))
    for name, outcome in _named(outcomes):
        total = sum(outcome.ages.values())
        parts = (f"{outcome.ages[age] / total:.1%}"[:-1] if outcome.ages.get(age) else "" for age in ages)
        table.add_row(name, str(outcome.bound), *parts)
    return table


def _bars(baseline: Baseline, outcomes: Sequence[PolicyOutcome]) -> tuple[str, Table]:
    table = Table.grid(padding=(0, 1))
    for name, outcome in _named(outcomes):
        bar = Bar(1.0, 0.0, min(1.0, outcome.of_limit), width=BAR, color="blue")
        table.add_row(name, f"{outcome.bound:>3}", bar, f"│ {outcome.speedup:.2f}×")
    return f"\nSpeed-up against the bound, up to the limit of {baseline.limit:.2f}×", table


def _named(outcomes: Sequence[PolicyOutcome]) -> Iterator[tuple[str, PolicyOutcome]]:
    """Yields each outcome with its setting's name, which is left out where the line above has it."""
    above = ""
    for outcome in outcomes:
        name = outcome.setting.name
        yield ("" if name == above else name), outcome
        above = name


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", header_style="", title_style="bold", pad_edge=False)
    table.add_column("policy/order", no_wrap=True)
    for column in ("bound", *columns):
        table.add_column(column, justify="right", no_wrap=True)
    return table


def as_json(plan: SimulationPlan, baseline: Baseline, outcomes: Sequence[PolicyOutcome]) -> dict[str, Any]:
    """Returns the same as one object; parts are of 1."""
    model = plan.model
    policies: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        policies.setdefault(outcome.setting.name, {})[str(outcome.bound)] = _cell(outcome)
    return {
        "limit": round(baseline.limit, 4),
        "u_sync": round(baseline.utilisation, 4),
        "sync": {"step_seconds": round(baseline.step, 3), "makespan_seconds": round(baseline.makespan, 3)},
        "parameters": {
            **asdict(model),
            "rollout_gpus": model.split,
            "groups": model.groups,
            "generation_gpu_seconds": round(model.generation, 3),
            "training_gpu_seconds": round(model.train, 3),
            **{name: getattr(plan, name) for name in ("steps", "warm_up", "seed", "interrupting")},
        },
        "policies": policies,
    }


def _cell(outcome: PolicyOutcome) -> dict[str, Any]:
    figures = ("speedup", "of_limit", "token_speedup", "samples_per_second", "max_age", "mean_age")
    shares = {name: getattr(outcome, name) for name in _SHARES}
    return {
        "policy": outcome.setting.policy,
        "order": outcome.setting.order,
        "steps": outcome.steps,
        **{name: round(getattr(outcome, name), 4) for name in figures},
        "age_counts": {str(age): count for age, count in outcome.ages.items()},
        **{name: round(share.overall, 5) for name, share in shares.items()},
        **{f"{name}_by_decile": [round(part, 5) for part in share.by_decile] for name, share in shares.items()},
    }


def draw(baseline: Baseline, outcomes: Sequence[PolicyOutcome], path: Path) -> None:
    """Writes a picture as PNG: speed-up against the bound, and what is not trained by length, of the middle one of the bounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: dict[Setting, list[PolicyOutcome]] = {}
    for outcome in outcomes:
        settings.setdefault(outcome.setting, []).append(outcome)
    bounds = sorted({outcome.bound for outcome in outcomes})
    middle = bounds[len(bounds) // 2]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    try:
        left.axhline(baseline.limit, color="#8a8f98", linestyle="--", linewidth=1)
        left.annotate(f"limit {baseline.limit:.2f}×", (bounds[0], baseline.limit), xytext=(0, 4), textcoords="offset points")
        for index, (setting, found) in enumerate(settings.items()):
            width = max(1.0, 5 - 0.6 * index)  # one that lies under another still shows
            line, marker = ("--", "x") if setting.policy == "unbounded" else ("-", "os^vDP*"[index % 7])
            ordered = sorted(found, key=lambda outcome: outcome.bound)
            style = {"linestyle": line, "marker": marker, "markersize": 4 + width, "linewidth": width}
            speeds = [outcome.speedup for outcome in ordered]
            drawn = left.plot([outcome.bound for outcome in ordered], speeds, label=setting.name, **style)
            for outcome in (outcome for outcome in ordered if outcome.bound == middle):
                shares = zip(outcome.dropped_tokens.by_decile, outcome.masked.by_decile, strict=True)
                if any(parts := [100 * (1 - (1 - dropped) * (1 - masked)) for dropped, masked in shares]):
                    right.plot(range(1, DECILES + 1), parts, color=drawn[0].get_color(), **style)
        left.set(xticks=bounds, xlabel="bound on staleness (versions)")
        left.set_title("speed-up over the synchronous run", loc="left")
        left.margins(y=0.12)
        left.legend(frameon=False, fontsize=8)
        right.set(xlabel="decile of response length, shortest first", xticks=range(1, DECILES + 1))
        right.set_ylim(bottom=0)
        right.set_title(f"generated tokens that are not trained (%), bound {middle}", loc="left")
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
        figure.savefig(path, dpi=150)
    finally:
        pyplot.close(figure)


PROGRAM = "myxo simulate"
WIDTH = 130  # Characters of a line that goes into a file

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
    group = top.add_argument_group("the model")
    for field in fields(WorkloadModel):
        default, about = field.default, field.metadata["about"]
        kind = float if isinstance(default, float) else int
        shown = about if default is None else f"{about} (default {default:g})"
        name = "--" + field.name.replace("_", "-")
        group.add_argument(name, type=kind, default=default, metavar="X" if kind is float else "N", help=shown)
    return top


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
    show(plan, baseline, outcomes, console)
    if json_path is not None:
        json_path.write_text(json.dumps(as_json(plan, baseline, outcomes), indent=2, ensure_ascii=False) + "\n")
    if chart is not None:
        draw(baseline, outcomes, chart)


if __name__ == "__main__":
    sys.exit(main())
