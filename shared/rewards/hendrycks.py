"""Compares answers as the MATH data set does (Hendrycks et al. 2021): as LaTeX text, after a number of rewritings."""

import re

_TEXT = re.compile(r"^\\text\{(.+?)\}$")

_REWRITTEN = (
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
)
"""What is replaced first, one after the other, and by what."""

_UNIT = "\\text{ "
_HALF = "\\frac{1}{2}"


class _Unreadable(Exception):
    """A text that the rewritings do not fit; it is compared as it stands."""


def grade_answer_mathd(given_answer: str | None, ground_truth: str | None) -> bool:
    """Returns whether both are the same text after the rewritings."""
    return mathd_normalize_answer(ground_truth) == mathd_normalize_answer(given_answer)


def mathd_normalize_answer(answer: str | None) -> str | None:
    """Returns the answer rewritten; as it stands, without white space around it, where that fails."""
    if answer is None:
        return None
    answer = answer.strip()
    if (enclosed := _TEXT.search(answer)) is not None:
        answer = enclosed[1].strip()
    try:
        return strip_string(answer)
    except (_Unreadable, IndexError):
        return answer


def strip_string(text: str) -> str:
    """Returns LaTeX in one form of the several that mean the same. Raises an exception for a root or a fraction of nothing."""
    for before, after in _REWRITTEN:
        text = text.replace(before, after)
    text = _without_unit(text).replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = _right_side("0" + text if text.startswith(".") else text)
    text = _braced_fractions(_braced_roots(text).replace(" ", ""))
    return _built_fraction(_HALF if text == "0.5" else text)


def _without_unit(text: str) -> str:
    number, *units = text.split(_UNIT)
    if len(units) > 1:
        raise _Unreadable(text)
    return number


def _right_side(text: str) -> str:
    """Returns what a symbol of one or two letters is said to equal."""
    left, *right = text.split("=")
    return right[0] if len(right) == 1 and len(left) <= 2 else text


def _braced_roots(text: str) -> str:
    head, *rest = text.split("\\sqrt")
    return head + "".join("\\sqrt" + (part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}") for part in rest)


def _braced_fractions(text: str) -> str:
    """Returns ``\\frac12`` as ``\\frac{1}{2}``; the text as it stands where a fraction has less than two characters."""
    head, *rest = text.split("\\frac")
    for part in rest:
        if part[0] != "{":
            if len(part) < 2:
                return text
            part = f"{{{part[0]}}}" + (part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}")
        head += "\\frac" + part
    return head


def _built_fraction(text: str) -> str:
    """Returns ``a/b`` of two plain integers as ``\\frac{a}{b}``."""
    parts = text.split("/")
    if len(parts) != 2:
        return text
    try:
        above, below = map(int, parts)
    except ValueError:
        return text
    return f"\\frac{{{above}}}{{{below}}}" if text == f"{above}/{below}" else text
