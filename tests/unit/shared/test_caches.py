"""What is kept between commands and between starts."""

import os
import sys
import time
from pathlib import Path

import pytest

from shared.config.engine_limits import PREFILL_GRAPHS, captures_prefill
from shared.config.sglang_flags import CATALOGUE, FURTHER, EngineFlags
from shared.runtime import user_cache
from shared.runtime.user_cache import OFF, PREFIX, VARIABLES, bytecode_variables, kernel_cache_variables


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MYXO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_kernels_lie_in_one_directory_but_where_somebody_said_otherwise(cache: Path) -> None:
    found = kernel_cache_variables({"TRITON_CACHE_DIR": "/elsewhere"})
    assert found.keys() == VARIABLES.keys() - {"TRITON_CACHE_DIR"}
    assert len(set(found.values())) == len(found) and all(Path(path).parent == cache / "kernels" for path in found.values())


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package without bytecode."""
    folder = tmp_path / "site" / "engine_of_tomorrow" / "srt"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "engine_of_tomorrow", raising=False)
    return folder


def test_bytecode_is_kept_in_the_cache_where_python_would_not_write_it(cache: Path, package: Path) -> None:
    name = "engine_of_tomorrow.srt"
    assert bytecode_variables({OFF: "1"}, name) == {PREFIX: str(cache / "bytecode"), OFF: ""}
    assert bytecode_variables({}, name) == {}, "Python writes it beside the sources"
    assert bytecode_variables({OFF: "1", PREFIX: "/mine"}, name) == {}
    assert bytecode_variables({OFF: "1"}, "not_installed.srt") == {}
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "model.cpython-311.pyc").touch()
    assert bytecode_variables({OFF: "1"}, name) == {}, "it is there, and would not be read with a prefix"


def test_engines_capture_prefill_only_where_flags_ask_for_it() -> None:
    assert (
        not captures_prefill({})
        and not captures_prefill({PREFILL_GRAPHS: "disabled"})
        and not captures_prefill({"cuda-graph-bs-decode": [1]})
    )
    assert captures_prefill({PREFILL_GRAPHS: "breakable"}) and captures_prefill({"cuda-graph-max-bs-prefill": 512})


def test_both_catalogues_know_the_flag_of_prefill_graphs() -> None:
    for path in (CATALOGUE, FURTHER):
        flags = EngineFlags.of_json(path.read_text())
        assert flags.parser and list(flags.problems({PREFILL_GRAPHS: "disabled", "mem-fraction-static": 0.5})) == []


# --- results that are kept for the user: read again, forgotten when unused, and never in the way


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
