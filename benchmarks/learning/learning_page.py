"""The picture and the tables of docs/learning.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.learning_curves import LearningRow, Run, band, grouped, learning_rows, target
from benchmarks.page_table import put_table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "learning.md"
PICTURE = ROOT / "docs" / "pictures" / "learning.png"

COLOURS = ("#1b1f23", "#2a6fbb", "#3a9d5d", "#d9731a", "#b3243b", "#7d4bb0")
"""One for each bound, from the smallest to the largest."""

BESIDE = {"torch": "decoupled"}  # Objectives that are drawn dashed, among the curves of another one
TITLES = {"arithmetic": "sums, tiny model, CPU", "smollm2": "sums, SmolLM2-135M, GPU"}


def write(runs: Sequence[Run], conditions: Mapping[str, Any]) -> None:
    """Draws the picture of all examples, and writes a table for each into the page."""
    kinds = sorted({(run["example"], run["device"]) for run in runs})
    parts = {kind: [run for run in runs if (run["example"], run["device"]) == kind] for kind in kinds}
    parts = {kind: found for kind, found in parts.items() if grouped(found)}
    picture = f"![held-out reward over steps and over wall time](pictures/{PICTURE.name})\n\n"
    for index, ((example, device), found) in enumerate(parts.items()):
        rows = table(found, conditions.get(f"{example} {device}", {}))
        put_table(PAGE, "learning", rows if index else picture + rows, name=f"learning_{example}")
    if parts:
        draw({TITLES.get(example, example): found for (example, _), found in parts.items()}, PICTURE)


def table(runs: Sequence[Run], conditions: Mapping[str, Any]) -> str:
    """Returns the rows of one example, and what they were measured on."""
    lines = [
        "| objective | bound | staleness | s a step | held-out at the end | over the steps | steps to the target | seconds to it |",
        "|---|---|---|---|---|---|---|---|",
        *map(_line, rows := learning_rows(runs)),
    ]
    aim, seeds = target(runs), sorted({row.seeds for row in rows})
    counted = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else f"{seeds[0]} seed{'s' if seeds[0] > 1 else ''}"
    steps = max(len(run["steps"]) for run in runs)
    start = sum(row.start[0] for row in rows) / len(rows)
    words = f"{counted} of each, up to {steps} steps, held-out reward {start:.2f} at first; the target is {aim:.2f}."
    return "\n".join([*lines, "", f"{words} {_where(conditions)}"])


def _line(row: LearningRow) -> str:
    def spread(values: tuple[float, float, float]) -> str:
        mean, low, high = values
        return f"{mean:.3f}" + (f" ({low:.2f}–{high:.2f})" if row.seeds > 1 else "")

    steps, seconds = ("—" if value is None else f"{value:.0f}" for value in (row.target_steps, row.target_seconds))
    cells = (row.objective, row.bound, f"{row.staleness:.2f}", f"{row.step_seconds:.2f}", spread(row.end), spread(row.over_steps))
    return f"| {' | '.join(map(str, (*cells, steps, seconds)))} |"


def _where(conditions: Mapping[str, Any]) -> str:
    parts = [f"{conditions['gpus']} × {conditions['gpu']}"] if "gpu" in conditions else []
    parts += [f"{conditions['cores']} cores", f"{conditions['at'][:10]}"] if conditions else []
    return ", ".join(parts) + "." if parts else ""


def draw(parts: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Writes held-out rewards over steps and over seconds as PNG: a row for each part and objective, a colour for each bound, its band
    from the least to the most of its seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plots = [
        (f"{title}: {objective}", {key: runs for key, runs in groups.items() if BESIDE.get(key[0], key[0]) == objective})
        for title, groups in ((title, grouped(runs)) for title, runs in parts.items())
        for objective in sorted({BESIDE.get(name, name) for name, _ in groups})
    ]
    bounds = sorted({bound for _, found in plots for _, bound in found})
    colours = dict(zip(bounds, COLOURS * len(bounds), strict=False))
    figure, axes = pyplot.subplots(len(plots), 2, figsize=(10, 3 * len(plots)), layout="constrained", squeeze=False)
    for (title, found), pair in zip(plots, axes, strict=True):
        for axis, shown in zip(("steps", "seconds"), pair, strict=True):
            for (objective, bound), runs in found.items():
                curve, line, named = band(runs, axis), *(("--", f"{bound} {objective}") if objective in BESIDE else ("-", f"{bound}"))
                shown.plot(curve.x, curve.mean, line, color=colours[bound], linewidth=1.6, label=named)
                shown.fill_between(curve.x, curve.low, curve.high, color=colours[bound], alpha=0.15, linewidth=0)
            shown.set_title(title, fontsize=10, loc="left")
            shown.set_xlabel("training steps" if axis == "steps" else "seconds since version 0 was live", fontsize=9)
            shown.set_ylabel("held-out reward", fontsize=9)
            shown.spines[["top", "right"]].set_visible(False)
            shown.grid(axis="y", color="#e6e8eb", linewidth=0.8)
        pair[0].legend(title="max_staleness", fontsize=8, title_fontsize=8, loc="lower right", frameon=False)
        top = max(shown.get_ylim()[1] for shown in pair)
        for shown in pair:
            shown.set_ylim(min(shown.get_ylim()[0] for shown in pair), top)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
