"""A table as one test fails where a row does, and names it."""

from pathlib import Path

import pytest

from tests.support.tables import table


def test_all_rows_are_tried_and_those_that_fail_are_named(tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []

    @table("number", [1, 2, 3])
    @table(("word", "good"), [("a", True), ("b", False)])
    def tried(number: int, word: str, good: bool, tmp_path: Path) -> None:
        (tmp_path / "own").mkdir()
        seen.append((number, word))
        assert good or number == 1

    with pytest.raises(AssertionError, match=r"(?s)2 of 3:\n\(2,\): .*1 of 2:\n\('b', False\).*\n\(3,\): "):
        tried(tmp_path=tmp_path)
    assert seen == [(number, word) for number in (1, 2, 3) for word in ("a", "b")]
