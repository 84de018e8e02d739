"""Results that are kept for the user: read again, forgotten when unused, and never in the way."""

import os
import time
from pathlib import Path

import pytest

from shared.runtime import user_cache


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MYXO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_result_is_read_again(kept: Path) -> None:
    assert user_cache.read("a") is None
    user_cache.write("a", b"1")
    user_cache.write("a", b"2")
    assert user_cache.read("a") == b"2"
    assert [path.name for path in kept.iterdir()] == ["a"]


def test_what_was_not_used_for_long_is_removed(kept: Path) -> None:
    for name in ("old", "used"):
        user_cache.write(name, b"")
        os.utime(kept / name, (0, time.time() - user_cache.KEEP_SECONDS - 9))
    assert user_cache.read("used") == b""
    user_cache.write("new", b"")
    assert sorted(path.name for path in kept.iterdir()) == ["new", "used"]


def test_a_place_that_cannot_be_written_does_not_matter(kept: Path) -> None:
    kept.write_text("a file in the way")
    user_cache.write("a", b"1")
    assert user_cache.read("a") is None
