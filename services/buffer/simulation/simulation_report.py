"""What a simulation found, as tables, as bars against the bound, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.buffer.simulation.baseline import Baseline
from services.buffer.simulation.simulation_run import PolicyOutcome, SimulationPlan
from services.buffer.simulation.workload_model import DECILES

BAR = 60
"""Characters of a bar that reaches the limit."""

_EIGHTHS = " ▏▎▍▌▋▊▉"


def show(plan: SimulationPlan, baseline: Baseline, outcomes: Sequence[PolicyOutcome], console: Console) -> None:
    """Prints everything."""
    for part in (model_lines(plan, baseline), speeds(baseline, outcomes), *shares(outcomes), ages(outcomes), bars(baseline, outcomes)):
        console.print(part, soft_wrap=True)


def model_lines(plan: SimulationPlan, baseline: Baseline) -> Text:
    """The model and the limit that follows from it."""
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


def speeds(baseline: Baseline, outcomes: Sequence[PolicyOutcome]) -> Table:
    """Each setting at each bound. Speed-ups are over the synchronous run."""
    columns = ("policy/order", "bound", "speed-up", "of limit", "in tokens", "samples/s", "mean age", "max age", "dropped", "masked")
    table = _table("Throughput", columns)
    batch = outcomes[0].samples_per_second / outcomes[0].speedup  # of the synchronous run
    table.add_row("synchronous", "", "1.00×", f"{1 / baseline.limit:.0%}", "1.00×", f"{batch:.2f}", "0.00", "0", "0.0%", "0.0%")
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
            f"{outcome.dropped:.1%}",
            f"{outcome.masked:.1%}",
        )
    return table


def shares(outcomes: Sequence[PolicyOutcome]) -> list[Table]:
    """What was thrown away or masked, by length, where there is anything."""
    kinds = (
        ("samples thrown away (dropped, or generated anew)", [outcome.dropped_by_decile for outcome in outcomes]),
        ("tokens thrown away", [outcome.dropped_tokens_by_decile for outcome in outcomes]),
        ("tokens in batches masked for their age", [outcome.masked_by_decile for outcome in outcomes]),
    )
    tables = []
    for title, deciles in kinds:
        found = [(outcome, parts) for outcome, parts in zip(outcomes, deciles, strict=True) if any(parts)]
        if found:
            table = _table(
                f"By decile of response length, shortest first: {title}, %", ("policy/order", "bound", *map(str, range(1, DECILES + 1)))
            )
            for (name, outcome), (_, parts) in zip(_named([outcome for outcome, _ in found]), found, strict=True):
                table.add_row(name, str(outcome.bound), *(f"{part:.1%}"[:-1] for part in parts))
            tables.append(table)
    return tables


def ages(outcomes: Sequence[PolicyOutcome]) -> Table:
    """Staleness of the trained samples: the batch's version less that of the oldest trained token."""
    oldest = max(max(outcome.ages, default=0) for outcome in outcomes)
    table = _table("Trained samples by age in versions, %", ("policy/order", "bound", *map(str, range(oldest + 1))))
    for name, outcome in _named(outcomes):
        total = sum(outcome.ages.values())
        counts = [outcome.ages.get(age, 0) for age in range(oldest + 1)]
        table.add_row(name, str(outcome.bound), *(f"{count / total:.1%}"[:-1] if count else "" for count in counts))
    return table


def bars(baseline: Baseline, outcomes: Sequence[PolicyOutcome]) -> Text:
    """Speed-up against the bound; the full width is the limit."""
    text = Text(f"\nSpeed-up against the bound, up to the limit of {baseline.limit:.2f}×\n")
    width = max(len(outcome.setting.name) for outcome in outcomes)
    for name, outcome in _named(outcomes):
        text.append(f"{name:{width}}  {outcome.bound:>3} ")
        text.append(f"{_bar(outcome.speedup / baseline.limit):{BAR}}│", style="blue")
        text.append(f" {outcome.speedup:.2f}×\n")
    return text


def as_json(plan: SimulationPlan, baseline: Baseline, outcomes: Sequence[PolicyOutcome]) -> dict[str, Any]:
    """The same as one object; parts are of 1."""
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
        "dropped": round(outcome.dropped, 5),
        "dropped_by_decile": _rounded(outcome.dropped_by_decile),
        "dropped_tokens": round(outcome.dropped_tokens, 5),
        "dropped_tokens_by_decile": _rounded(outcome.dropped_tokens_by_decile),
        "masked": round(outcome.masked, 5),
        "masked_by_decile": _rounded(outcome.masked_by_decile),
    }


def _rounded(parts: Sequence[float]) -> list[float]:
    return [round(part, 5) for part in parts]


def _named(outcomes: Sequence[PolicyOutcome]) -> Iterator[tuple[str, PolicyOutcome]]:
    """Each outcome with its setting's name, which is left out where the line above has it."""
    above = ""
    for outcome in outcomes:
        name = outcome.setting.name
        yield ("" if name == above else name), outcome
        above = name


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", header_style="", title_style="bold", pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _bar(part: float) -> str:
    eighths = round(min(1.0, part) * BAR * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()
