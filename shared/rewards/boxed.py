"""Finds the answer in ``\\boxed{…}``."""

import re

BOX = "\\boxed{"

_BRACE = re.compile(r"[{}]")


def last_boxed(text: str, *marks: str) -> str | None:
    """Returns the last occurrence of the first of ``marks`` that occurs, up to the brace that closes it; None where there is none."""
    start = next((found for mark in marks if (found := text.rfind(mark)) >= 0), None)
    if start is None:
        return None
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if brace[0] == "}" and depth == 0:
            return text[start : brace.end()]
    return None


def last_boxed_only_string(text: str) -> str | None:
    """Returns the last ``\\boxed{…}``, of a text without any the last ``\\fbox{…}``; None where it is not closed."""
    return last_boxed(text, "\\boxed", "\\fbox")


def remove_boxed(boxed: str | None) -> str | None:
    """Returns what stands inside of ``\\boxed{…}``; None for anything else."""
    return boxed[len(BOX) : -1] if boxed is not None and boxed.startswith(BOX) and boxed.endswith("}") else None


def extract_boxed_answer(solution: str) -> str | None:
    """Returns what stands in the last box; None where there is none, or another box than ``\\boxed{…}``."""
    return remove_boxed(last_boxed_only_string(solution))


def extract_answer(passage: str) -> str | None:
    """Returns what stands in the last ``\\boxed{…}`` of a text that has one, else None."""
    return extract_boxed_answer(passage) if "\\boxed" in passage else None
