"""The tables of measurements in the docs are those of the repository's figures."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning import learning_page
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
