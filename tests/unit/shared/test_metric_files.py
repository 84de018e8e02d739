"""The lines of metrics are read as they grow, whatever a trainer that died has left; event files alone are read with tensorboard."""

import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from shared.data.metric_files import METRIC_LINES, MetricDirectory, Scalar


def test_lines_are_read_once_and_anew_where_they_were_written_anew(tmp_path: Path) -> None:
    directory, lines = MetricDirectory(tmp_path / "tensorboard"), tmp_path / "tensorboard" / METRIC_LINES
    assert list(directory.read()) == [], "there is no such directory yet"
    lines.parent.mkdir()
    lines.write_text('[17.5, 0, {"train/loss": 0.5, "rewards/größe/mean": Infinity}]\n[18.0, 1, {"train/l')
    assert list(directory.read()) == [Scalar("train/loss", 0, 0.5, 17.5), Scalar("rewards/größe/mean", 0, float("inf"), 17.5)]
    with lines.open("a") as file:
        file.write('\n[19.0, 1, {"train/loss": 0.25}]\n"no line"\n[NaN, 2, {"a": 1}]\n[20.0, 2, {"a": null}]\n[20.0, "x", {"a": 1}]\n')
    assert list(directory.read()) == [Scalar("train/loss", 1, 0.25, 19.0)], "what is cut off, or no line, is passed over"
    assert list(directory.read()) == []
    lines.with_name("new").write_text('[21.0, 1, {"train/loss": 0.125}]\n')
    lines.with_name("new").replace(lines)
    assert list(directory.read()) == [Scalar("train/loss", 1, 0.125, 21.0)]
    lines.unlink()
    lines.mkdir()
    assert list(directory.read()) == [] and "Is a directory" in directory.unreadable
    lines.rmdir()
    assert list(directory.read()) == [] and not directory.unreadable, "it is asked for again"


def test_event_files_of_an_earlier_release_are_read_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, writer = MetricDirectory(tmp_path), SummaryWriter(str(tmp_path))
    for step in range(2):
        writer.add_scalar("train/loss", 0.5, step, walltime=17.5)
        writer.add_text("note", "no number", step)
        writer.flush()
        assert list(directory.read()) == [Scalar("train/loss", step, 0.5, 17.5)]
    writer.close()
    assert not directory.unreadable
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    without = MetricDirectory(tmp_path)
    assert list(without.read()) == [] and "tensorboard" in without.unreadable
