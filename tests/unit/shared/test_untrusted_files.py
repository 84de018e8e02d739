"""Files that another account wrote: what is opened at all, and how deep JSON may be."""

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from shared.runtime.safe_files import MAX_DEPTH, is_plain_name, open_regular, parse_json, read_regular
from tests.support.tables import table


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
