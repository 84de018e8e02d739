"""Shows the results of a simulation: as tables, as bars against the bound, as JSON, and as a picture.

matplotlib is an optional extra (``myxo[report]``), imported only when a picture is drawn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from services.buffer.simulation.modelled_engine import Baseline
from services.buffer.simulation.simulation_run import PolicyOutcome, Setting, SimulationPlan
from services.buffer.simulation.workload_model import DECILES

BAR = 60
"""Characters of a bar that reaches the limit."""

_SHARES = {
    "dropped": "samples thrown away (dropped, or generated anew)",
    "dropped_tokens": "tokens thrown away",
    "masked": "tokens in batches masked for their age",
}
"""The shares by length that an outcome has."""


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
    """Yields a table by length for each kind of share that any outcome has."""
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
            for parts in (_untrained(outcome) for outcome in ordered if outcome.bound == middle):
                if any(parts):
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


def _untrained(outcome: PolicyOutcome) -> list[float]:
    """Returns the percentage of the generated tokens that is thrown away or masked, by decile."""
    shares = zip(outcome.dropped_tokens.by_decile, outcome.masked.by_decile, strict=True)
    return [100 * (1 - (1 - dropped) * (1 - masked)) for dropped, masked in shares]
