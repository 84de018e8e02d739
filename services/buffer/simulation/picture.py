"""The picture of a simulation: speed-up against the bound, and how much of what was generated is not trained, by length.

matplotlib is an optional extra (``myxo[report]``), imported only when a picture is drawn.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from services.buffer.simulation.baseline import Baseline
from services.buffer.simulation.simulation_run import PolicyOutcome, Setting
from services.buffer.simulation.workload_model import DECILES


def available() -> bool:
    """Whether pictures can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(baseline: Baseline, outcomes: Sequence[PolicyOutcome], path: Path) -> None:
    """Writes the picture as PNG. The right side is of the middle one of the bounds."""
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
        for number, (setting, found) in enumerate(settings.items()):
            width = max(1.0, 5 - 0.6 * number)  # one that lies under another still shows
            line, marker = ("--", "x") if setting.policy == "unbounded" else ("-", "os^vDP*"[number % 7])
            at = sorted(found, key=lambda outcome: outcome.bound)
            speeds = [outcome.speedup for outcome in at]
            style = {"linestyle": line, "marker": marker, "markersize": 4 + width, "linewidth": width}
            drawn = left.plot([outcome.bound for outcome in at], speeds, label=setting.name, **style)
            for outcome in at:
                parts = [1 - (1 - dropped) * (1 - masked) for dropped, masked in _lost(outcome)]
                if outcome.bound == middle and any(parts):
                    right.plot(range(1, DECILES + 1), [100 * part for part in parts], color=drawn[0].get_color(), **style)
        left.set_xticks(bounds)
        left.set_xlabel("bound on staleness (versions)")
        left.set_title("speed-up over the synchronous run", loc="left")
        left.margins(y=0.12)
        left.legend(frameon=False, fontsize=8)
        right.set_xlabel("decile of response length, shortest first")
        right.set_title(f"generated tokens that are not trained (%), bound {middle}", loc="left")
        right.set_xticks(range(1, DECILES + 1))
        right.set_ylim(bottom=0)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
        figure.savefig(path, dpi=150)
    finally:
        pyplot.close(figure)


def _lost(outcome: PolicyOutcome) -> list[tuple[float, float]]:
    return list(zip(outcome.dropped_tokens_by_decile, outcome.masked_by_decile, strict=True))
