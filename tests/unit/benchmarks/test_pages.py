"""What benchmarks share: their tables in the docs, their command line, machine and ledgers."""

import importlib
import importlib.util
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import command_line, console, standby
from benchmarks.agents.site import Machine
from benchmarks.learning import learning_page
from shared.config import devices
from shared.schema.ledger import GroupsScored
from tests.support.service_process import ROOT

MARK = re.compile(r"^<!-- \w+: python -m (benchmarks\.\w+) --write -->$", re.MULTILINE)
BENCHMARKS = sorted({found for page in (ROOT / "docs").glob("*.md") for found in MARK.findall(page.read_text())})


def test_pages_have_tables_of_benchmarks() -> None:
    assert len(BENCHMARKS) > 10


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_a_pages_tables_are_of_the_repositorys_figures(benchmark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec(benchmark)
    assert spec is not None
    module: Any = importlib.import_module(f"{benchmark}.__main__" if spec.submodule_search_locations else benchmark)
    written: list[tuple[Path, str]] = []
    really_write = Path.write_text

    def write_text(path: Path, text: str) -> int:
        if not path.resolve().is_relative_to(ROOT):
            return really_write(path, text)
        written.append((path, text))
        return len(text)

    monkeypatch.setattr(Path, "write_text", write_text)
    monkeypatch.setattr(learning_page, "PICTURE", tmp_path / "learning.png")
    monkeypatch.setattr(sys, "argv", [benchmark, "--write"])
    assert not module.main()
    assert written
    for path, text in written:
        assert path.read_text() == text, f"{path.name} is out of date: python -m {benchmark} --write"


# --- what every file of figures tells beside them


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    command_line.told_gpus.cache_clear()
    yield tmp_path / "figures.json"
    command_line.told_gpus.cache_clear()


def test_the_gpus_are_told_by_name(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "nvidia-smi"
    told.write_text("#!/bin/sh\ntest \"$1\" = --query-gpu=name && printf 'NVIDIA H200\\nNVIDIA H200\\nNVIDIA L4\\n'\n")
    told.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    command_line.write(file, {"seconds": 1.0})
    assert json.loads(file.read_text()).items() >= {"seconds": 1.0, "gpu": "2 × NVIDIA H200, 1 × NVIDIA L4"}.items()


def test_nothing_is_told_where_there_are_none(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "QUERY_SECONDS", 0.0)  # nvidia-smi does not answer, if there is one
    command_line.write(file, {"seconds": 1.0})
    assert "gpu" not in json.loads(file.read_text()) and {"at", "cores", "load"} <= json.loads(file.read_text()).keys()


# --- ledgers that benchmarks write hold groups as a run's do: something of each is trained


def test_something_of_every_scored_sample_is_trained() -> None:
    records = itertools.chain(standby.ledger(200), console.history(4 * console.BATCH))
    samples = [sample for record in records if isinstance(record, GroupsScored) for group in record.groups for sample in group.samples]
    assert samples and all(0 < sample.trained <= sample.tokens for sample in samples)


# --- the GPUs of the engines that a benchmark starts by itself


def test_replicas_have_the_gpus_that_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [Machine("cuda", 2, "bfloat16").environment(replica) for replica in (0, 3)] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 1")
    assert [Machine("cuda", 1, "bfloat16").environment(replica) for replica in (0, 1)] == [{"CUDA_VISIBLE_DEVICES": "3"}] * 2
    assert Machine("cpu", 1, "float32").environment(0) == {}
