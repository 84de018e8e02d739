"""The picture of a run, and its curve in a terminal."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myxo.display import reward_chart
from myxo.display.reward_chart import BLOCKS, text_chart
from shared.schema.service_messages import WarmStartEnded
from shared.view.run_summary import EvaluationSummary, GroupCounts, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUMMARY = Summary(
    run="tiny",
    steps=40,
    accuracy_before=0.1,
    accuracy_after=0.9,
    max_staleness=2,
    max_staleness_seen=2,
    mean_staleness=1.0,
    staleness_histogram={"0": 10, "1": 20, "2": 10},
    overlap_seconds=1.0,
    generation_seconds=2.0,
    training_seconds=2.0,
    reward_first=0.1,
    reward_last=0.9,
    mean_abs_logprob_diff=None,
    warm_start=None,
    trained_tokens=100,
    wall_seconds=4.0,
    groups=GroupCounts(40, 40, {}, {}, 0),
    restarts={},
    finished=True,
    audit="ok",
    evaluations=[EvaluationSummary("heldout", step, step, mean, 10, 0) for step, mean in ((0, 0.1), (20, 0.5), (40, 0.9))],
)


def test_draws_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "reward.png"
    changed = [{"step": 20, "changed": ["trainer.lr: 1e-06 → 2e-06"]}]
    reward_chart.draw(replace(SUMMARY, changes=changed), [step / 40 for step in range(40)], None, path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = int.from_bytes(content[16:20]), int.from_bytes(content[20:24])
    assert (width, height) == (1650, 720)


@pytest.mark.parametrize("rewards", [[0.5], [-1.0, 3.0]])
def test_draws_short_runs_without_evaluations(tmp_path: Path, rewards: list[float]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "reward.png"
    reward_chart.draw(replace(SUMMARY, evaluations=[], staleness_histogram={}), rewards, None, path)
    assert path.stat().st_size > 1000


NAMES = ("gsm8k", "math-500", "a-name-that-somebody-has-made-out-of-all-they-know-about-the-set")
SEVERAL = [EvaluationSummary(name, step, step, number + step / 40, 10, 0) for number, name in enumerate(NAMES) for step in (0, 20, 40)]


def drawn(
    monkeypatch: pytest.MonkeyPatch, path: Path, rewards: list[float], evaluations: list[EvaluationSummary], warm: bool = False
) -> "list[Axes]":
    """The plots of a picture, as they were saved."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    ended = WarmStartEnded.of([3.0 / (step + 1) for step in range(500)]) if warm else None
    reward_chart.draw(replace(SUMMARY, run="r" * 60, evaluations=evaluations), rewards, ended, path)
    monkeypatch.undo()
    axes = kept[0].axes
    pyplot.close(kept[0])
    return list(axes)


@pytest.mark.parametrize(
    ("rewards", "low", "high"),
    [
        ([-3.0, -1.0, -2.0], -3.3, -0.7),
        ([0.02, 0.03, 0.025], 0.018, 0.032),
        ([0.5] * 40, 0.4, 0.6),
        ([0.0], -0.1, 0.1),
        ([math.nan, 1.0, math.nan, math.nan, 3.0], 0.7, 3.3),
        ([1000.0, 9000.0], 0.0, 10_000.0),
    ],
)
def test_the_axis_fits_the_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rewards: list[float], low: float, high: float) -> None:
    """All of it is seen, and nothing but it: no room for rewards that nobody got."""
    axes, _ = drawn(monkeypatch, tmp_path / "reward.png", rewards, [])
    bottom, top = axes.get_ylim()
    known = [value for value in rewards if math.isfinite(value)]
    assert low <= bottom < min(known) and max(known) < top <= high


def test_curves_bear_the_names_of_what_they_show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    warm, axes, _ = drawn(monkeypatch, tmp_path / "reward.png", [step / 40 for step in range(40)], SEVERAL, warm=True)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[:4] == ["rollout/raw_reward (a step's batch)", "its mean over 2 steps", "eval/gsm8k", "eval/math-500"]
    assert labels[4].startswith("eval/a-name") and "…" in labels[4] and len(labels[4]) < 40
    bottom, top = axes.get_ylim()
    assert bottom < 0 and top > 3, "the held-out sets are in it, too"
    assert (axes.get_ylabel(), warm.get_ylabel()) == ("mean reward of a sample", "sft/loss (nats a token)")
    steps, losses = warm.lines[0].get_data()
    assert len(losses) <= 200 and steps[-1] == 500


def test_rewards_that_nobody_knows_are_no_picture_of_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn(monkeypatch, tmp_path / "reward.png", [math.nan, math.nan], [])
    assert (tmp_path / "reward.png").stat().st_size > 1000


def test_absence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert reward_chart.obstacle([0.5]).startswith("matplotlib is not installed") and reward_chart.obstacle([]) == "no step is trained yet"


def test_a_column_a_step_where_there_is_room() -> None:
    assert text_chart([0.0, 0.5, 1.0], width=10, height=2) == ["1 ┤  █", "0 ┤▁██", "   step 1 3"]


def test_columns_are_means_of_their_part() -> None:
    lines = text_chart([0.0, 1.0, 1.0, 1.0], width=2, height=1)
    assert lines[0].endswith("▄█") and lines[-1].split() == ["step", "1", "4"]


def test_below_zero_the_lowest_value_is_the_ground() -> None:
    assert text_chart([-1.0, 1.0], width=4, height=2)[:2] == [" 1 ┤ █", "-1 ┤▁█"]


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf]])
def test_without_any_number_there_is_no_chart(values: list[float]) -> None:
    assert text_chart(values, width=10, height=3) == []


def test_a_step_without_a_number_stays_empty() -> None:
    assert text_chart([1.0, math.nan, 1.0], width=9, height=1)[0].endswith("┤█ █")


@given(st.lists(st.floats(width=32), max_size=200), st.integers(1, 80), st.integers(1, 12))
def test_any_numbers_fit(values: list[float], width: int, height: int) -> None:
    lines = text_chart(values, width=width, height=height)
    assert len(lines) in (0, height + 1)
    for line in lines[:-1]:
        cells = line.partition("┤")[2]
        assert len(cells) <= width and set(cells) <= set(BLOCKS)
