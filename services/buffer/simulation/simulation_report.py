"""Shows the results of a simulation: as tables, as bars against the bound, as JSON, and as a picture.

matplotlib is an optional extra (``myxo[report]``), imported only when a picture is drawn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.buffer.simulation.length_tally import LengthShare
from services.buffer.simulation.modelled_engine import Baseline
from services.buffer.simulation.simulation_run import PolicyOutcome, Setting, SimulationPlan
from services.buffer.simulation.workload_model import DECILES

BAR = 60
"""Characters of a bar that reaches the limit."""

_EIGHTHS = " ▏▎▍▌▋▊▉"


def show(plan: SimulationPlan, baseline: Baseline, outcomes: Sequence[PolicyOutcome], console: Console) -> None:
    """Prints everything."""
    samples, tokens, masked = (
        [(outcome, share) for outcome, share in zip(outcomes, shares, strict=True) if any(share.by_decile)]
        for shares in zip(*((outcome.dropped, outcome.dropped_tokens, outcome.masked) for outcome in outcomes), strict=True)
    )
    parts = [
        _model(plan, baseline),
        _speeds(baseline, outcomes),
        *_shares("samples thrown away (dropped, or generated anew)", samples),
        *_shares("tokens thrown away", tokens),
        *_shares("tokens in batches masked for their age", masked),
        _ages(outcomes),
        _bars(baseline, outcomes),
    ]
    for part in parts:
        console.print(part, soft_wrap=True)


def _model(plan: SimulationPlan, baseline: Baseline) -> Text:
    model = plan.model
    stall = f", w = {model.push:g} s" if model.push else ""
    lines = [
        f"{model.gpus} GPUs, {model.split} of them generate; batch {model.groups} groups of {model.samples}; lengths lognormal, "
        f"σ = {model.sigma:g}, at most {model.cap:g} × the mean of {model.mean_tokens:g} tokens",
        f"g = {model.generation:.1f} GPU-s, h = {model.train:.1f} GPU-s, M = {baseline.makespan:.1f} s{stall}; "
        f"synchronous step {baseline.step:.1f} s, {model.batch / baseline.step:.2f} samples/s",
        f"U_sync = {baseline.utilisation:.3f}, limit {baseline.limit:.2f}×",
    ]
    return Text("\n".join(lines) + "\n")


def _speeds(baseline: Baseline, outcomes: Sequence[PolicyOutcome]) -> Table:
    """Returns a row for each setting at each bound. Speed-ups are over the synchronous run."""
    table = _table("Throughput", "speed-up", "of limit", "in tokens", "samples/s", "mean age", "max age", "dropped", "masked")
    synchronous = outcomes[0].samples_per_second / outcomes[0].speedup
    table.add_row("synchronous", "", "1.00×", f"{1 / baseline.limit:.0%}", "1.00×", f"{synchronous:.2f}", "0.00", "0", "0.0%", "0.0%")
    for name, outcome in _named(outcomes):
        table.add_row(
            name,
            str(outcome.bound),
            f"{outcome.speedup:.2f}×",
            f"{outcome.speedup / baseline.limit:.0%}",
            f"{outcome.token_speedup:.2f}×",
            f"{outcome.samples_per_second:.2f}",
            f"{outcome.mean_age:.2f}",
            str(outcome.max_age),
            f"{outcome.dropped.overall:.1%}",
            f"{outcome.masked.overall:.1%}",
        )
    return table


def _shares(title: str, found: list[tuple[PolicyOutcome, LengthShare]]) -> Iterator[Table]:
    """Yields a table by length, where there is anything."""
    if found:
        table = _table(f"By decile of response length, shortest first: {title}, %", *map(str, range(1, DECILES + 1)))
        for (name, outcome), (_, share) in zip(_named([outcome for outcome, _ in found]), found, strict=True):
            table.add_row(name, str(outcome.bound), *(f"{part:.1%}"[:-1] for part in share.by_decile))
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


def _bars(baseline: Baseline, outcomes: Sequence[PolicyOutcome]) -> Text:
    text = Text(f"\nSpeed-up against the bound, up to the limit of {baseline.limit:.2f}×\n")
    width = max(len(outcome.setting.name) for outcome in outcomes)
    for name, outcome in _named(outcomes):
        text.append(f"{name:{width}}  {outcome.bound:>3} ")
        text.append(f"{_bar(outcome.speedup / baseline.limit):{BAR}}│", style="blue")
        text.append(f" {outcome.speedup:.2f}×\n")
    return text


def _bar(part: float) -> str:
    eighths = round(min(1.0, part) * BAR * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


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
        policies.setdefault(outcome.setting.name, {})[str(outcome.bound)] = _cell(outcome, baseline)
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
            "steps": plan.steps,
            "warm_up": plan.warm_up,
            "seed": plan.seed,
            "interrupting": plan.interrupting,
        },
        "policies": policies,
    }


def _cell(outcome: PolicyOutcome, baseline: Baseline) -> dict[str, Any]:
    shares = {"dropped": outcome.dropped, "dropped_tokens": outcome.dropped_tokens, "masked": outcome.masked}
    return {
        "policy": outcome.setting.policy,
        "order": outcome.setting.order,
        "steps": outcome.steps,
        "speedup": round(outcome.speedup, 4),
        "of_limit": round(outcome.speedup / baseline.limit, 4),
        "token_speedup": round(outcome.token_speedup, 4),
        "samples_per_second": round(outcome.samples_per_second, 4),
        "max_age": outcome.max_age,
        "mean_age": round(outcome.mean_age, 4),
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
            untrained = [_untrained(outcome) for outcome in ordered if outcome.bound == middle]
            for parts in filter(any, untrained):
                right.plot(range(1, DECILES + 1), [100 * part for part in parts], color=drawn[0].get_color(), **style)
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
    """Returns the part of the generated tokens that is thrown away or masked, by decile."""
    return [
        1 - (1 - dropped) * (1 - masked) for dropped, masked in zip(outcome.dropped_tokens.by_decile, outcome.masked.by_decile, strict=True)
    ]
