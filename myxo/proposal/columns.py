"""What a file of prompts holds, by its first rows: the keys of prompt and answer, and the reward that can compare answers. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.data.prompts import chat_problem
from shared.data.rows import USUAL_LABELS, USUAL_PROMPTS
from shared.runtime.errors import ConfigError

_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")  # but commands of LaTeX
_CHOICE = re.compile(r"\(?[A-J]\)?\Z")
_TESTS = ("assert ", "def check(")

SHORT_ANSWER = 64
"""Characters up to which text without numbers counts as an answer to be compared as it is."""


@dataclass(frozen=True)
class Columns:
    """The keys of a file. ``chat``: prompts are lists of messages. ``rm_type``: the reward that fits the labels; ``reason``: why."""

    input_key: str
    label_key: str | None
    chat: bool
    rm_type: str
    reason: str


def guessed(rows: Sequence[Mapping[str, Any]], where: str, rm_type: str | None = None) -> Columns:
    """Returns what rows hold. Raises ConfigError where no key can be the prompt, or no reward is known.

    Args:
        where: the file, for errors. rm_type: the reward, if somebody knows it.
    """
    keys = [key for key in rows[0] if all(key in row for row in rows)]
    input_key = next((key for key in USUAL_PROMPTS if key in keys and all(_is_prompt(row[key]) for row in rows)), None)
    if input_key is None:
        raise ConfigError("DATA", where, f"no key of its rows ({', '.join(keys)}) is a usual name of a prompt: {', '.join(USUAL_PROMPTS)}")
    label_key = next((key for key in USUAL_LABELS if key in keys and key != input_key), None)
    found = (rm_type, "as it was said") if rm_type is not None else _reward(rows, label_key)
    return Columns(input_key, label_key, isinstance(rows[0][input_key], list), *found)


def _reward(rows: Sequence[Mapping[str, Any]], label_key: str | None) -> tuple[str, str]:
    """Returns the reward that fits the rows' answers, and why. Raises ConfigError."""
    told = "there is no key of answers"
    if label_key is not None:
        if (found := _reward_of([row[label_key] for row in rows])) is not None:
            return found
        told = f"the answers under {label_key!r} are of no known kind"
    raise ConfigError("--rm-type", None, f"{told}; name a reward (docs/rewards.md), or your own: --custom-rm-path module:function")


def _is_prompt(value: Any) -> bool:
    return (isinstance(value, str) and bool(value.strip())) or (isinstance(value, list) and chat_problem(value) is None)


def _reward_of(labels: Sequence[Any]) -> tuple[str, str] | None:
    """Returns the verifier that compares answers like these, and why."""
    if all(_is_tests(label) for label in labels):
        return "unit_tests", "the answers are tests of programs"
    texts = [str(label).strip() for label in labels if isinstance(label, str | int | float) and not isinstance(label, bool)]
    if len(texts) < len(labels):
        return None
    if all(_CHOICE.match(text) for text in texts):
        return "exact", "the answers are letters of a choice; the prompt must ask for the letter alone"
    answers = [text.rpartition("####")[2].strip() for text in texts]
    if all(re.search(r"\d", answer) and not _WORD.search(answer) for answer in answers):
        return "math_verify", "the answers are numbers or formulas"
    if all(len(text) <= SHORT_ANSWER for text in texts):
        return "exact", "the answers are short texts"
    return None


def _is_tests(label: Any) -> bool:
    if isinstance(label, dict):
        return {"inputs", "outputs"} <= label.keys() or {"test", "entry_point"} <= label.keys()
    if isinstance(label, list):
        return bool(label) and all(_is_tests(item) or (isinstance(item, dict) and {"input", "output"} <= item.keys()) for item in label)
    return isinstance(label, str) and any(mark in label for mark in _TESTS)
