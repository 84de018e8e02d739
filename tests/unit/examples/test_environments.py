"""The examples' environments, and the one that searches."""

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from examples.search.local_index import LocalIndex
from examples.search.search_agent import arguments_query, searched
from tests.support.quickstart_reward import quickstart_reward
from tests.support.tables import table

EXAMPLES = Path(__file__).parents[3] / "examples"


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_python_example_rewards_sums_as_the_quick_start_does() -> None:
    example = loaded(EXAMPLES / "environments" / "python-fastapi" / "environment.py")
    rng = random.Random(0)
    for _ in range(30):
        total = rng.randint(100, 999) + rng.randint(100, 999)
        working = f"({rng.randint(0, 18):02d} {rng.randint(0, 18):02d} {rng.randint(0, 18):02d})"
        responses = [str(total), f"{working}{total}", f"{working}{total + 10}", str(total - 1), f"{total}.", f" {total}", "", "no idea"]
        group = example.Group.model_validate({"label": str(total), "samples": [{"response": text} for text in responses]})
        rewards = example.score(group)["rewards"]
        assert [entry["reward"] for entry in rewards] == [quickstart_reward(text, str(total)) for text in responses]
        assert [entry["worked"] for entry in rewards] == [float(text.startswith("(")) for text in responses]


@pytest.mark.parametrize("name", ["node", "python-fastapi"])
def test_an_example_joins_from_outside_and_is_allowed_little(name: str) -> None:
    compose: dict[str, Any] = yaml.safe_load((EXAMPLES / "environments" / name / "compose.yaml").read_text())
    [(host, service)] = compose["services"].items()
    assert host == f"arithmetic-{name.removesuffix('-fastapi')}"
    assert service["networks"] == ["environments"]
    assert compose["networks"]["environments"] == {"name": "${MYXO_ENVIRONMENTS_NETWORK:-myxo-environments}", "external": True}
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert "ports" not in service
    lines = (EXAMPLES / "environments" / name / "Dockerfile").read_text().splitlines()
    assert "USER 65534:65534" in lines
    assert any(line.startswith("HEALTHCHECK") for line in lines)


# --- the search example: its index, and what a model may ask of it; its data holds no answer to what it asks

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
