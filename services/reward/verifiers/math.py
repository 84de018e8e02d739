"""Mathematical equality by the library math-verify; plain numbers are compared without it, which is a thousand times cheaper."""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = re.compile(r"[-+]?\d{1,40}(\.\d{1,40})?\Z", re.ASCII)
_PLAIN_ENDING = re.compile(
    r"""(?:\s*(?=[-+\d])            # nothing but the number,
        |\s*\((?:\d+\s+)+\d+\)\s*   # its working, which is numbers in brackets,
        |[^\d\\$^/=]*[a-z]{2}:?\s+  # or a sentence without a digit or markup
        )(?P<number>(?:(?<!\S)[-+]|(?<![-+]))\d{1,40}(?:\.\d{1,40})?)\.?\s*\Z""",
    re.ASCII | re.IGNORECASE | re.VERBOSE,
)
_BRACE = re.compile(r"\\[{}]|\\boxed\{|[{}]")


def math(response: str, label: str) -> float:
    """1.0 where the answer in ``response`` (the last ``\\boxed{}``, else its last expression) equals ``label``; else 0.0."""
    truth, ending = _plain(label), _PLAIN_ENDING.match(response)
    if truth is not None and ending is not None:
        return 1.0 if Fraction(ending["number"]) == truth else 0.0
    from math_verify import parse, verify  # sympy takes seconds to import: only where it is needed

    gold = parse(f"${label}$") or parse(label)
    return 1.0 if gold and verify(gold, parse(_answer(response))) else 0.0


def _answer(response: str) -> str:
    """The last ``\\boxed{…}`` that is closed, else all of it: math-verify takes several boxes for a set of answers."""
    answer = response
    opened: list[int | None] = []  # where each open brace began a box; None for other braces
    for brace in _BRACE.finditer(response):
        if brace[0] == "}" and opened:
            start = opened.pop()
            answer = response[start : brace.end()] if start is not None else answer
        elif brace[0] in ("{", "\\boxed{"):
            opened.append(None if brace[0] == "{" else brace.start())
    return answer


def _plain(text: str) -> Fraction | None:
    text = text.strip()
    return Fraction(text) if _NUMBER.match(text) else None
