"""The picture of a run: the warm start's loss, reward over steps with every held-out set, staleness of the trained samples; and the
reward's curve as text.

The curves' names are those of docs/metrics.md. matplotlib is an optional extra (``myxo[report]``), imported only here and only when a
picture is drawn.
"""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shared.schema.service_messages import WarmStartEnded
from shared.view.metric_history import moving_mean
from shared.view.run_summary import EvaluationSummary, Summary

SMOOTH = 0.05  # part of the steps that the smoothed reward is a moving mean over
MARGIN = 0.1  # space above and below the data, of their range
LONGEST_NAME = 32  # letters of a name in the picture
BLUE, GRAY, GREEN = "#2a6fbb", "#8a8f98", "#3a8f5c"
# Colours and markers of the held-out sets, in the order of their names; from the sixth on they come again.
SETS = (("#d9731a", "o"), ("#9b4fb8", "s"), ("#1b998b", "^"), ("#c33149", "D"), ("#6b705c", "v"))


def obstacle(trained: object) -> str:
    """Returns why no picture can be drawn here; empty where one can. ``trained``: whether a step has a reward."""
    if not trained:
        return "no step is trained yet"
    return "" if importlib.util.find_spec("matplotlib") else "matplotlib is not installed (pip install 'myxo[report]')"


def draw(summary: Summary, rewards: Sequence[float], warm_start: WarmStartEnded | None, path: Path) -> None:
    """Writes the picture as PNG.

    ``rewards``: mean reward of each trained step, in order, NaN where it is not known; at least one. ``warm_start``: None: there was none.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    widths, inches = ((2.6, 1), 11.0) if warm_start is None else ((0.9, 2.6, 1), 13.5)
    figure, plots = pyplot.subplots(1, len(widths), figsize=(inches, 4.8), width_ratios=widths, layout="constrained")
    try:
        if warm_start is not None:
            _warm_start(plots[0], warm_start)
        _reward(plots[-2], summary, rewards)
        _staleness(plots[-1], summary)
        for axes in plots:
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.margins(y=MARGIN)
        figure.savefig(path, dpi=150)
    finally:
        pyplot.close(figure)


def draw_together(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """Writes the smoothed rewards of several runs as PNG. ``curves``: of each run, as for `draw`; some may be empty."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.8), layout="constrained")
    for name, rewards in curves.items():
        means = moving_mean(np.array(rewards), max(1, round(len(rewards) * SMOOTH)))
        axes.plot(range(1, len(means) + 1), means, label=shortened(name), marker="." if len(means) <= 30 else None)
    axes.set(xlabel="training steps", ylabel="mean reward of a sample")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _warm_start(axes: Any, warm_start: WarmStartEnded) -> None:
    steps = [min((index + 1) * warm_start.every, warm_start.steps) for index in range(len(warm_start.losses))]
    axes.plot(steps, warm_start.losses, color=GREEN, linewidth=1.5, marker="o" if len(steps) == 1 else None)
    axes.set_xlabel("SFT steps")
    axes.set_ylabel("sft/loss (nats a token)")
    axes.set_title("warm start", loc="left")
    axes.set_xlim(0, max(1, warm_start.steps))


def _reward(axes: Any, summary: Summary, rewards: Sequence[float]) -> None:
    from matplotlib.ticker import MaxNLocator

    steps = range(1, len(rewards) + 1)
    window = max(1, round(len(rewards) * SMOOTH))
    dots = "." if len(rewards) <= 30 or not all(map(math.isfinite, rewards)) else None  # a line needs two numbers in a row
    pale = 0.3 if window > 1 else 1.0
    axes.plot(steps, rewards, color=BLUE, alpha=pale, linewidth=1, marker=dots, label="rollout/raw_reward (a step's batch)")
    if window > 1:
        axes.plot(steps, moving_mean(np.array(rewards), window), color=BLUE, linewidth=2, label=f"its mean over {window} steps")
    for index, name in enumerate(dict.fromkeys(evaluation.dataset for evaluation in summary.evaluations)):
        _held_out(axes, [found for found in summary.evaluations if found.dataset == name], *SETS[index % len(SETS)])
    for change in summary.changes:
        axes.axvline(change["step"], color=GRAY, linewidth=1, linestyle=":")
        words = ", ".join(one.partition(".")[2] for one in change["changed"])
        axes.annotate(words, (change["step"], 1), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize="x-small", color=GRAY)
    axes.set_xlabel("training steps" if summary.warm_start is None else "training steps (0: after the warm start)")
    axes.set_ylabel("mean reward of a sample")
    axes.set_title(f"{shortened(summary.run)}: reward over {len(rewards)} step{'s' if len(rewards) > 1 else ''}", loc="left")
    last = max([len(rewards), *(evaluation.step for evaluation in summary.evaluations)])
    axes.set_xlim(0, last * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize="small")


def _held_out(axes: Any, evaluations: Sequence[EvaluationSummary], color: str, marker: str) -> None:
    at = [evaluation.step for evaluation in evaluations]
    means = [evaluation.mean_reward for evaluation in evaluations]
    line = "--" if len(at) > 2 else "none"  # two points show no trend
    label = f"eval/{shortened(evaluations[0].dataset)}"
    axes.plot(at, means, color=color, marker=marker, markersize=5, linewidth=1.2, linestyle=line, label=label, clip_on=False, zorder=3)
    for index in sorted({0, len(at) - 1}):
        axes.annotate(
            f"{means[index]:.3f}",
            (at[index], means[index]),
            textcoords="offset points",
            xytext=(6, 6) if index == 0 else (-6, 6),
            ha="left" if index == 0 else "right",
            color=color,
            fontweight="bold",
            fontsize="small",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
        )


def _staleness(axes: Any, summary: Summary) -> None:
    oldest = max(summary.max_staleness, summary.max_staleness_seen)
    ages = {age: summary.staleness_histogram.get(str(age), 0) for age in range(oldest + 1)}
    total = sum(ages.values()) or 1
    bars = axes.bar([str(age) for age in ages], [100 * count / total for count in ages.values()], color=GRAY)
    if len(ages) <= 9:
        axes.bar_label(bars, fmt="%.0f %%", padding=2, color=GRAY)
    axes.set_xlabel("staleness (weight versions)")
    axes.set_ylabel("trained samples (%)")
    axes.set_title(f"staleness, bound {summary.max_staleness}", loc="left")


def shortened(name: str) -> str:
    """Returns the name, or its beginning and end where it is longer than `LONGEST_NAME`."""
    half = (LONGEST_NAME - 1) // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}…{name[-half:]}"


BLOCKS = " ▁▂▃▄▅▆▇█"  # cell that is filled by so many eighths


def text_chart(values: Sequence[float], *, width: int, height: int) -> list[str]:
    """Returns ``height`` lines and an axis. The columns stand on 0, or on the lowest value where it is below.

    ``values``: one a step; a column is the mean of those in its part of the steps. What is no number is left out; a column without any
    number stays empty, and without any at all there are no lines. ``width``: columns at most. ``height``: lines.
    """
    columns = [_mean(part) for part in _parts(values, width)]
    numbers = [value for value in columns if math.isfinite(value)]
    if not numbers:
        return []
    low, high = min(0.0, *numbers), max(numbers)
    scale = 8 * height / ((high - low) or 1.0)
    eighths = [max(1, round((value - low) * scale)) if math.isfinite(value) else 0 for value in columns]
    labels = {0: "" if high == low else f"{high:.3g}", height - 1: f"{low:.3g}"}
    room = max(map(len, labels.values()))
    lines = []
    for line in range(height):
        below = 8 * (height - 1 - line)
        cells = "".join(BLOCKS[min(max(filled - below, 0), 8)] for filled in eighths)
        lines.append(f"{labels.get(line, ''):>{room}} ┤{cells}".rstrip())
    first, last = "step 1", str(len(values))
    axis = first if len(values) == 1 else f"{first}{last:>{max(len(columns) - len(first), len(last) + 1)}}"
    return [*lines, f"{'':{room}}  {axis}"]


def _parts(values: Sequence[float], most: int) -> list[Sequence[float]]:
    count = min(len(values), most)
    return [values[len(values) * index // count : len(values) * (index + 1) // count] for index in range(count)]


def _mean(values: Sequence[float]) -> float:
    numbers = [value for value in values if math.isfinite(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan
