"""Files that appear whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from shared.runtime.safe_files import private_directory, publish, replace_file, replaced_by, replacement, scratch, settle
from tests.support.small_disk import small_disk


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    replace_file(path, b"1")
    replace_file(path, b"2", durable=True)
    assert path.read_bytes() == b"2" and list(tmp_path.iterdir()) == [path]


def test_permissions_are_what_was_asked_for_whatever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"")
    path.chmod(0o644)
    replace_file(path, b"x", mode=0o400)
    assert path.stat().st_mode & 0o777 == 0o400


def test_what_fails_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), replacement(path) as out:
        out.write(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file_whole_and_nothing_half_written(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        path = disk.path / "a"
        replace_file(path, b"old", durable=True)
        disk.fill(free=64 << 10)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                replace_file(path, bytes(1 << 20), durable=True)
            assert path.read_bytes() == b"old" and len(list(disk.path.iterdir())) == 2, "the file, and what fills the disk"
        disk.clear()
        replace_file(path, bytes(1 << 20), durable=True)
        assert path.stat().st_size == 1 << 20


def test_a_directory_takes_the_place_of_another(tmp_path: Path) -> None:
    target = tmp_path / "target"
    for content in ("one", "two"):
        (scratch(target) / "file").write_text(content)
        publish(tmp_path / ".target.partial", target)
    assert (target / "file").read_text() == "two" and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("finished", [True, False])
def test_a_kill_between_the_two_renames_is_mended(tmp_path: Path, finished: bool) -> None:
    target, replaced = tmp_path / "target", tmp_path / ".target.replaced"
    replaced.mkdir()
    (replaced / "old").touch()
    if finished:
        target.mkdir()
    assert replaced_by(replaced) == target
    settle(target)
    assert list(tmp_path.iterdir()) == [target] and (target / "old").exists() is not finished


@pytest.mark.parametrize("mode", [0o700, 0o750])
def test_a_private_directory_has_its_mode_whatever_the_umask_and_whoever_made_it(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o022)
    try:
        private_directory(tmp_path / "runs" / "mine", mode)
        (tmp_path / "older").mkdir(mode=0o755)
        private_directory(tmp_path / "older", mode)
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("runs/mine", "older", "runs")] == [mode, mode, 0o755]
