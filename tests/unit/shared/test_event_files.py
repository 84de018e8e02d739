"""TensorBoard's own writer writes, this reader reads: while a file grows, when it ends in half a record, and when it is none."""

import math
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from shared.data.event_files import MAX_RECORD, EventDirectory, Scalar


def read(directory: EventDirectory) -> list[tuple[str, int, float]]:
    return [(scalar.tag, scalar.step, scalar.value) for scalar in directory.read()]


def test_what_is_added_is_read_once(tmp_path: Path) -> None:
    directory = EventDirectory(tmp_path / "tensorboard")
    assert read(directory) == [], "there is no such directory yet"
    writer = SummaryWriter(str(tmp_path / "tensorboard"))
    writer.add_scalar("train/loss", 0.5, 0, walltime=17.5)
    writer.add_scalar("rewards/größe/mean", math.inf, 2**31 - 1)
    writer.add_text("note", "no number", 1)
    writer.add_histogram("weights", np.array([1.0, 2.0]), 1)
    writer.flush()
    first = list(directory.read())
    assert first[0] == Scalar("train/loss", 0, 0.5, 17.5)
    assert [(scalar.tag, scalar.step, scalar.value) for scalar in first[1:]] == [("rewards/größe/mean", 2**31 - 1, math.inf)]
    assert read(directory) == []
    writer.add_scalar("train/loss", math.nan, 1)
    writer.close()
    ((tag, step, value),) = read(directory)
    assert (tag, step) == ("train/loss", 1) and math.isnan(value)
    assert directory.unreadable == {}


def test_half_a_record_is_read_when_it_is_whole(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path / "written"))
    for step in range(50):
        writer.add_scalar("a", step, step)
    writer.close()
    (source,) = (tmp_path / "written").iterdir()
    data, growing = source.read_bytes(), tmp_path / source.name
    directory, found = EventDirectory(tmp_path), list[tuple[str, int, float]]()
    for end in range(0, len(data) + 13, 13):
        growing.write_bytes(data[:end])
        found += read(directory)
    assert found == [("a", step, float(step)) for step in range(50)] and directory.unreadable == {}


def damaged(data: bytes) -> list[bytes]:
    """Returns event files that are none from the 10th record on."""
    begin = 0
    for _ in range(10):
        begin += int.from_bytes(data[begin : begin + 8], "little") + 16
    huge = (MAX_RECORD + 1).to_bytes(8, "little") + bytes(4)
    endless = (30).to_bytes(8, "little") + bytes(4) + b"\xff" * 34
    groups = (4).to_bytes(8, "little") + bytes(4) + b"\x0b\x0b\x0b\x0b" + bytes(4)
    cut = (4).to_bytes(8, "little") + bytes(4) + b"\x2a\x7f\x01\x02" + bytes(4)
    return [data[:begin] + rest + data[begin:] for rest in (huge, endless, groups, cut)]


@pytest.mark.parametrize("kind", range(4))
def test_a_damaged_file_is_named_and_what_lies_before_is_kept(tmp_path: Path, kind: int) -> None:
    writer = SummaryWriter(str(tmp_path))
    for step in range(50):
        writer.add_scalar("a", step, step)
    writer.close()
    (file,) = tmp_path.iterdir()
    file.write_bytes(damaged(file.read_bytes())[kind])
    directory = EventDirectory(tmp_path)
    assert read(directory) == [("a", step, float(step)) for step in range(9)], "the first record is the file's version"
    assert list(directory.unreadable) == [file.name] and "damaged" in directory.unreadable[file.name]
    assert read(directory) == []
