"""JSONL by row: empty lines do not count, and whatever is wrong is told with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.data.jsonl import JsonLines
from shared.runtime.errors import ConfigError


def lines(tmp_path: Path, text: str | bytes) -> JsonLines:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return JsonLines(path, "data.prompt_data")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_are_read_in_any_order_and_know_their_line(tmp_path: Path, end: str) -> None:
    read = lines(tmp_path, end.join(["", '{"a": 1}', "", '{"a": "β"}', '{"a": 3}']))
    assert len(read) == 3
    assert [read[row]["a"] for row in (2, 0, 1, 0)] == [3, 1, "β", 1]
    assert [read.line(row) for row in range(3)] == [2, 4, 5]
    assert read.where(1) == f"{tmp_path}/prompts.jsonl:4"


def test_a_last_line_counts_with_or_without_its_end(tmp_path: Path) -> None:
    assert len(lines(tmp_path, '{"a": 1}\n{"a": 2}')) == len(lines(tmp_path, '{"a": 1}\n{"a": 2}\n')) == 2


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_a_line_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="holds no line"):
        lines(tmp_path, text)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            JsonLines(path, "data.prompt_data")
        assert caught.value.field == "data.prompt_data"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a": 1}\n{"a": ', "not JSON"),
        (b'{"a": 1}\n[1]', "expected a JSON object, found a list"),
        (b'{"a": 1}\n{"a": "\xff"}', r"not UTF-8: .* at byte 7 of the line; if it is Latin-1: iconv"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, text: bytes, words: str) -> None:
    read = lines(tmp_path, text)
    assert read[0] == {"a": 1}
    with pytest.raises(ConfigError, match=words) as caught:
        read[1]
    assert str(caught.value.value).endswith("prompts.jsonl:2")


def test_a_missing_key_is_told_with_the_keys_that_are_there(tmp_path: Path) -> None:
    read = lines(tmp_path, '{"question": "1+1", "answer": 2}')
    assert read.text(0, "question") == "1+1"
    with pytest.raises(ConfigError, match=r"has no key 'prompt'; its keys are \['answer', 'question'\]") as caught:
        read.text(0, "prompt")
    assert caught.value.field == "data.prompt_data:prompt"
    with pytest.raises(ConfigError, match="expected text, found 2"):
        read.text(0, "answer")
