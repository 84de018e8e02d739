"""docs/reading.md names files and names that exist, as few as it promises, and each file of a walk is next to another one of it."""

import re
from pathlib import Path

import grimp
import pytest

from docs.size import walks
from tests.support.tables import table

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "reading.md").read_text()
WALKS = PAGE.split("\n## ")[1:]
STATION = re.compile(r"^\d+\. `([\w/]+\.py)` (.*?)(?=^\d+\. |^$)", re.MULTILINE | re.DOTALL)
MOST_FILES = {"One sample": 45, "One version of the weights": 25, "One value of a config": 12}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("services", "shared", "myxo", exclude_type_checking_imports=False)


@pytest.mark.parametrize(("title", "files"), walks())
def test_a_walk_is_short_and_its_files_know_each_other(title: str, files: list[str], graph: grimp.ImportGraph) -> None:
    assert len(set(files)) == len(files) <= MOST_FILES[title]
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files}
    for module in modules:
        near = graph.find_modules_directly_imported_by(module) | graph.find_modules_that_directly_import(module)
        assert near & modules, f"{module} neither imports another file of the walk nor is it imported by one"


@table(("path", "text"), [station for walk in WALKS for station in STATION.findall(walk)])
def test_a_station_is_there_and_has_what_the_page_names(path: str, text: str) -> None:
    source = (ROOT / path).read_text()
    named = [name for group in re.findall(r"\(((?:`\w+`(?:, )?)+)\)", text) for name in re.findall(r"`(\w+)`", group)]
    assert named, "a station says where to look"
    for name in named:
        assert re.search(rf"^(class|def|async def) {name}\b", source, re.MULTILINE), f"{path} has no {name}"
