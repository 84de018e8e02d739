"""What a start compiles, kernels and bytecode, is kept for the next one, and nobody's own choice is overruled."""

import sys
from pathlib import Path

import pytest

from shared.config.engine_limits import PREFILL_GRAPHS, captures_prefill
from shared.config.sglang_flags import CATALOGUE, FURTHER, EngineFlags
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
