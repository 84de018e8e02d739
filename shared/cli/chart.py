"""The picture of a run: reward over steps with the held-out accuracy, and how stale the trained samples were.

matplotlib is an optional extra (``myxo[report]``), imported only here and only when a picture is drawn.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from shared.cli.summary import Summary

SMOOTH = 0.05
"""Part of the steps that the smoothed reward is a moving mean over."""

BLUE, ORANGE, GRAY = "#2a6fbb", "#d9731a", "#8a8f98"


def available() -> bool:
    """Whether pictures can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(summary: Summary, rewards: Sequence[float], path: Path) -> None:
    """Writes the picture as PNG.

    Args:
        rewards: mean reward of each trained step, in order; at least one.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4), width_ratios=(2.6, 1), layout="constrained")
    try:
        steps = range(1, len(rewards) + 1)
        window = max(1, round(len(rewards) * SMOOTH))
        left.plot(steps, rewards, color=BLUE, alpha=0.3 if window > 1 else 1.0, linewidth=1, label="training reward, mean of a step")
        if window > 1:
            left.plot(steps, moving_mean(rewards, window), color=BLUE, linewidth=2, label=f"mean of the last {window} steps")
        if summary.evaluations:
            at = [evaluation.step for evaluation in summary.evaluations]
            means = [evaluation.mean_reward for evaluation in summary.evaluations]
            line = "--" if len(at) > 2 else "none"  # two points are no course
            left.plot(
                at, means, color=ORANGE, marker="o", linewidth=1.2, linestyle=line, label="held-out accuracy", clip_on=False, zorder=3
            )
            for place in sorted({0, len(at) - 1}):
                left.annotate(
                    f"{means[place]:.3f}",
                    (at[place], means[place]),
                    textcoords="offset points",
                    xytext=(6, 8) if place == 0 else (-6, 8),
                    ha="left" if place == 0 else "right",
                    color=ORANGE,
                    fontweight="bold",
                    bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
                )
        left.set_xlabel("training steps")
        left.set_ylabel("mean reward (1 = correct)")
        left.set_title(f"{summary.run}: reward over {len(rewards)} steps", loc="left")
        left.set_xlim(0, max(1, len(rewards)))
        if all(0 <= value <= 1 for value in [*rewards, *(evaluation.mean_reward for evaluation in summary.evaluations)]):
            left.set_ylim(0, 1.05)
        left.margins(y=0.12)
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
        left.legend(frameon=False, loc="best")

        oldest = max(summary.max_staleness, summary.max_staleness_seen)
        ages = {age: summary.staleness_histogram.get(str(age), 0) for age in range(oldest + 1)}
        total = sum(ages.values()) or 1
        bars = right.bar([str(age) for age in ages], [100 * count / total for count in ages.values()], color=GRAY)
        if len(ages) <= 9:
            right.bar_label(bars, fmt="%.0f %%", padding=2, color=GRAY)
        right.set_xlabel("staleness (weight versions)")
        right.set_ylabel("trained samples (%)")
        right.set_title(f"staleness, bound {summary.max_staleness}", loc="left")
        right.margins(y=0.12)

        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
            axes.set_axisbelow(True)
        figure.savefig(path, dpi=150)
    finally:
        pyplot.close(figure)


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and up to ``window`` − 1 before it."""
    means = []
    for place in range(len(values)):
        part = values[max(0, place + 1 - window) : place + 1]
        means.append(sum(part) / len(part))
    return means
