"""docs/reading.md names files and names that exist, and few of them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "reading.md").read_text()
WALKS = PAGE.split("\n## ")[1:]
STATION = re.compile(r"^\d+\. `([\w/]+\.py)` (.*?)(?=^\d+\. |^$)", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("walk", WALKS, ids=["one sample", "one version of the weights"])
def test_a_walk_goes_through_at_most_twenty_files(walk: str) -> None:
    stations = STATION.findall(walk)
    assert 15 <= len(stations) <= 20
    assert len({path for path, _ in stations}) == len(stations)


@pytest.mark.parametrize(("path", "text"), [station for walk in WALKS for station in STATION.findall(walk)])
def test_a_station_is_there_and_has_what_the_page_names(path: str, text: str) -> None:
    source = (ROOT / path).read_text()
    named = [name for group in re.findall(r"\(((?:`\w+`(?:, )?)+)\)", text) for name in re.findall(r"`(\w+)`", group)]
    assert named, "a station says where to look"
    for name in named:
        assert re.search(rf"^(class|def|async def) {name}\b", source, re.MULTILINE), f"{path} has no {name}"
