"""The search example: its index, and what a model may ask of it; its data holds no answer to what it asks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.search.local_index import LocalIndex
from examples.search.search_agent import arguments_query, searched
from tests.support.tables import table

DOCUMENTS = ["a cat and a dog", "the cat sat, the cat ate, cat", "nothing of the kind", "Ärger mit O'Neill"]


@table(
    ("words", "found"),
    [
        ("cat", [1, 0]),
        ("DOG cat", [0, 1]),
        ("arger", [3]),
        ("O'Neill", [3]),
        ('cat" OR "kind', [2, 1, 0]),
        ("NOT (cat NEAR", [1, 0]),
        ("text:cat*", [1, 0]),
        ("_ \0 ^ *", []),
        ("", []),
        ("zebra", []),
    ],
)
def test_whatever_is_asked_is_words(words: str, found: list[int]) -> None:
    assert LocalIndex(DOCUMENTS).search(words, 3) == [DOCUMENTS[number] for number in found]


def test_no_more_is_shown_than_asked_for() -> None:
    assert LocalIndex(["x"] * 9).search("x", 4) == ["x"] * 4


@table("arguments", ["", "{", "[]", "null", '{"q": "x"}', '{"query": 3}', '{"query": ["x"]}'])
def test_a_call_that_names_no_query_finds_nothing(arguments: str, tmp_path: Path) -> None:
    assert arguments_query(arguments) == ""
    corpus = tmp_path / "documents.jsonl"
    corpus.write_text('{"text": "x"}\n\n')
    assert searched("", {"corpus": str(corpus)}) == "nothing was found\n"
    assert searched("x", {"corpus": str(corpus)}) == "x\n"


@pytest.mark.extra
def test_no_demonstration_tells_what_is_asked_later(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "examples.search.prepare", str(tmp_path)], check=True, timeout=300)
    rows = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("*.jsonl")}
    asked = [row["prompt"].removeprefix("colour of ").removesuffix("?") for row in rows["train"] + rows["heldout"]]
    shown = {row["prompt"][len("colour of ") :].partition("?")[0] for row in rows["sft"]}
    assert len(set(asked)) == len(asked) and not shown & set(asked)
    told = {row["text"] for row in rows["documents"]}
    assert told == {f"{name} is {row['label']}" for name, row in zip(asked, rows["train"] + rows["heldout"], strict=True)}
