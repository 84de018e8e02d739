"""What every file of figures tells beside them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import command_line
from shared.config import devices


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
