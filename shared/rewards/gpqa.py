"""slime's ``gpqa``: the letter of a multiple-choice question, or the text of its answer."""

import re
import string
from collections.abc import Iterable
from typing import Any

LETTERS = list(string.ascii_uppercase[:10])
"""The letters of a question that says neither its letters nor its choices."""

ANSWERS = ("correct_letter", "correct_answer", "answer_text")
"""The fields of a question's metadata that say what is right."""

_NAMED = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?:answer|option|choice)\s*(?:is|:)?\s*([A-Z])",
        r"([A-Z])\s*(?:is\s*(?:the)?\s*correct)",
        r"final\s*(?:answer|option)\s*(?:is|:)?\s*([A-Z])",
    )
]
"""How a response names its letter, tried one after the other."""

_LONE = re.compile(r"\b([A-Z])\b")
_OTHER = re.compile(r"[^a-z0-9]+")
_THOUGHT = "</think>"


def compute_gpqa_reward(response: str | None, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """Returns 1.0 where the response names the right letter, or without a letter has the right answer's text in it; else 0.0.

    Args:
        label: the letter, the number of the choice from 0, or the text of the choice.
        metadata: ``choices`` (a list, or an object by letter), ``valid_letters``, ``correct_letter``; ``correct_answer`` and
            ``answer_text`` name texts that are right, too.
    """
    if response is None:
        return 0.0
    metadata = metadata or {}
    choices = _choices(metadata.get("choices"))
    letters = _letters(metadata.get("valid_letters"), choices)
    text = label.strip() if isinstance(label, str) else None
    right = _right_letter(label, text, metadata.get("correct_letter"), letters) or _letter_of(text, choices or [], letters)
    given = extract_letter(response, letters)
    if given and right:
        return float(given == right)
    texts = [str(choice) for letter, choice in zip(letters, choices or [], strict=False) if letter == right][:1]
    texts += [str(metadata[key]) for key in ("correct_answer", "answer_text") if metadata.get(key)]
    return _by_text(response, [*texts, *([text] if text else [])], given, right, text)


def extract_letter(response: str, letters: Iterable[str]) -> str | None:
    """Returns the letter that the response names after its thoughts, else the last lone capital one; None where there is none."""
    if not response:
        return None
    said, valid = response.rpartition(_THOUGHT)[2], {letter.upper() for letter in letters}
    named = (found[1].upper() for pattern in _NAMED if (found := pattern.search(said)) is not None)
    lone = reversed(_LONE.findall(said))
    return next((letter for letter in (*named, *lone) if letter in valid), None)


def _by_text(response: str, texts: list[str], given: str | None, right: str | None, label: str | None) -> float:
    said = _words(response.rpartition(_THOUGHT)[2])
    if any(wanted and wanted in said for wanted in map(_words, texts)):
        return 1.0
    return float(bool(given and not right and label and given == label.upper()))


def _choices(given: Any) -> list[Any] | None:
    return list(given.values() if isinstance(given, dict) else given) if given is not None else None


def _letters(valid: Any, choices: list[Any] | None) -> list[str]:
    if valid:
        return [str(letter).upper() for letter in valid]
    return list(string.ascii_uppercase[: len(choices)]) if choices else LETTERS


def _right_letter(label: Any, text: str | None, named: Any, letters: list[str]) -> str | None:
    """Returns the letter that the metadata or the label name; a number as label goes before the metadata."""
    right = named.strip().upper() if isinstance(named, str) else None
    if text is not None:
        return text.upper() if not right and len(text) == 1 and text.upper() in letters else right
    if isinstance(label, int | float) and 0 <= int(label) < len(letters):
        return letters[int(label)]
    return right


def _letter_of(text: str | None, choices: list[Any], letters: list[str]) -> str | None:
    named = (letters[index] for index, choice in enumerate(choices) if _words(str(choice)) == _words(text or ""))
    return next(named, None) if text else None


def _words(text: str) -> str:
    return _OTHER.sub(" ", text.lower()).strip()
