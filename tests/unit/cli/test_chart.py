"""The picture of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shared.cli import chart
from shared.cli.chart import moving_mean
from shared.cli.summary import Evaluation, Groups, Summary

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
    trained_tokens=100,
    wall_seconds=4.0,
    groups=Groups(40, 40, {}, {}, 0),
    restarts={},
    finished=True,
    audit="ok",
    evaluations=[Evaluation(0, 0, 0.1, 10, 0), Evaluation(20, 20, 0.5, 10, 0), Evaluation(40, 40, 0.9, 10, 0)],
)


def test_draws_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "reward.png"
    chart.draw(SUMMARY, [step / 40 for step in range(40)], path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = int.from_bytes(content[16:20]), int.from_bytes(content[20:24])
    assert (width, height) == (1650, 660)


@pytest.mark.parametrize("rewards", [[0.5], [-1.0, 3.0]])
def test_draws_short_runs_without_evaluations(tmp_path: Path, rewards: list[float]) -> None:
    pytest.importorskip("matplotlib")
    from dataclasses import replace

    path = tmp_path / "reward.png"
    chart.draw(replace(SUMMARY, evaluations=[], staleness_histogram={}), rewards, path)
    assert path.stat().st_size > 1000


def test_moving_mean() -> None:
    assert moving_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert moving_mean([1.0, 2.0], 1) == [1.0, 2.0]


def test_absence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not chart.available()
