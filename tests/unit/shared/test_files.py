"""Files: those that appear whole or not at all, and those that another account wrote."""

import json
import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from shared.runtime.safe_files import (
    MAX_DEPTH,
    is_plain_name,
    open_regular,
    parse_json,
    private_directory,
    publish,
    read_regular,
    replace_file,
    replaced_by,
    replacement,
    scratch,
    settle,
)
from tests.support.small_disk import small_disk
from tests.support.tables import table


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


# --- files that another account wrote: what is opened at all, and how deep JSON may be


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_names_are_plain_or_none() -> None:
    assert all(map(is_plain_name, ("a", ".metadata", "model-00001-of-00002.safetensors", "größe.json", "x" * 255)))
    bad = ("", ".", "..", "/etc/passwd", "../x", "a/b", "a\0b", "a\nb", "\x1b[2J", "\ud800", "a\u202eb", "x" * 256, None, 3, b"a")
    assert not any(map(is_plain_name, bad))


@table("kind", ["link", "dangling", "directory link", "directory", "pipe", "socket", "missing", "nul"])
def test_only_regular_files_are_opened_and_nothing_blocks(kind: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("inside")
    path = tmp_path / "file"
    if kind == "link":
        path.symlink_to(tmp_path / "secret")
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "directory link":
        (tmp_path / "linked").symlink_to(tmp_path / "real")
        path = tmp_path / "linked" / "file"
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        path = Path(os.path.relpath(path))  # a socket's path is short
        socket.socket(socket.AF_UNIX).bind(str(path))
    elif kind == "nul":
        path = tmp_path / "file\0"
    failed: list[BaseException] = []

    def read() -> None:
        try:
            read_regular(path, 100)
        except OSError as error:
            failed.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(30)
    assert failed, "it was read, or the reader still waits"


def test_a_link_of_the_operators_own_is_followed_where_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"weights")
    (tmp_path / "model").symlink_to(tmp_path / "blob")
    assert read_regular(tmp_path / "model", 7, links=True) == b"weights"
    with pytest.raises(OSError, match="more than 6 bytes"):
        read_regular(tmp_path / "model", 6, links=True)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "to_pipe", links=True)


def test_json_is_read_to_a_depth() -> None:
    assert parse_json(nested(MAX_DEPTH)) is not None
    assert parse_json(json.dumps({"a": [{"b": 1}]})) == {"a": [{"b": 1}]}
    for depth in (MAX_DEPTH + 1, 500, 1_000, 1_000_000):
        with pytest.raises(ValueError, match="nested more than 64 deep"):
            parse_json(nested(depth))
    with pytest.raises(ValueError, match="nested"):
        parse_json('{"a":' * 100_000)
    for bad in ("", "{", b"\xff\xfe", "1" * 10_000):
        with pytest.raises(ValueError):
            parse_json(bad)
