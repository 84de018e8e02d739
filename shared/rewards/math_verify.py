"""Mathematical equality by the library math-verify; plain numbers are compared without it, which is a thousand times cheaper.

Numbers in labels and answers are read as people write them: with fences, a currency sign, thousands set apart, a unit, an exponent. slime's
rewards read fewer forms, and some wrongly (``2 1/2`` as 21/2). What they would compare wrongly is read here, or refused. docs/math-
rewards.md lists the cases.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from shared.rewards.text_rewards import normalize_final_answer

FENCES = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}"), ("\\text{", "}"), ("\\mathrm{", "}"))
_COMMANDS = ("emph", "textbf", "textit", "texttt", "mathbf", "mathit")
_EMPHASIS = (("**", "**"), ("*", "*"), ("`", "`"), *((f"\\{name}{{", "}") for name in _COMMANDS))
PERCENT = re.compile(r"\s*\\?%\s*\Z")
BRACE = re.compile(r"\\[{}]|\\boxed\{|[{}]")

_NUMBER = re.compile(r"[-+]?\d{1,40}(\.\d{1,40})?\Z", re.ASCII)
_EXPONENT = re.compile(r"[-+]?\d{1,40}(\.\d{1,40})?e[-+]?\d{1,2}\Z", re.ASCII | re.IGNORECASE)
_GROUPED = re.compile(r"[-+]?[1-9]\d{0,2}(?:(?:,|\{,\}|\\,|\\ |[ \u00a0\u202f])\d{3})+(?:\.\d{1,40})?\Z", re.ASCII)
_MIXED = re.compile(r"([-+]?)(\d{1,40}) +(\d{1,40})/(\d{1,40})\Z", re.ASCII)
_UNIT = re.compile(
    r"(?<=\d)\s+(?:[cdkm]?m|in|ft|yd|mi|[km]?g|lb|oz|m?s|min|h|hr|m?l|k?W|k?J|V|N|Hz|mph)(?:\^\{?[23]\}?|[\u00b2\u00b3])?"
    r"(?:/(?:[cdkm]?m|ft|[km]?g|m?s|min|h|hr|m?l)(?:\^\{?[23]\}?|[\u00b2\u00b3])?)?\Z",
    re.IGNORECASE,
)
_CURRENCY = re.compile(r"\A\\?\$\s*(?=[-+\d])")
_SHOWN = 60


def bare(text: str, fences: tuple[tuple[str, str], ...] = FENCES) -> str:
    """Returns the text without white space, fences and a currency sign around it."""
    text = text.strip().replace("\u2212", "-")
    for left, right in fences:
        inside = text[len(left) : -len(right)]
        if text.startswith(left) and text.endswith(right) and inside and (_balanced(inside) if right == "}" else right not in inside):
            return bare(inside, fences)
    return _CURRENCY.sub("", text)


def _balanced(text: str) -> bool:
    """Returns whether every brace that closes was opened in the text."""
    depth = 0
    for brace in BRACE.finditer(text):
        depth += {"{": 1, "\\boxed{": 1, "}": -1}.get(brace[0], 0)
        if depth < 0:
            return False
    return depth == 0


def decimal(text: str) -> str | None:
    """Returns a number in plain decimal digits, of one that stands so or has thousands set apart, an exponent, a unit; else None."""
    text = _UNIT.sub("", text.strip())
    if _NUMBER.match(text):
        return text
    if _GROUPED.match(text):
        return re.sub(r"[^-+\d.]", "", text)
    return f"{Decimal(text):f}" if _EXPONENT.match(text) else None


def mixed(text: str) -> tuple[str, str, str, str] | None:
    """Returns sign, whole, numerator and denominator of a mixed fraction such as ``2 1/2``; None where it is none."""
    found = _MIXED.match(text)
    return (found[1], found[2], found[3], found[4]) if found and int(found[3]) < int(found[4]) else None


def shown(label: str) -> str:
    """Returns a label as errors show it."""
    return repr(label if len(label) <= _SHOWN else f"{label[:_SHOWN]}…")


@lru_cache(64)  # the samples of a group have one label
def math_labels(label: str) -> tuple[str, ...]:
    """Returns the label in the forms that ``math`` and ``deepscaler`` are to compare answers with: right is what is one of them. That is
    the label itself, and besides, where a number stands in it in a form that they may not read (``5 km/h``), that number. They read a mixed
    fraction rightly only as a sum. Raises ValueError for a negative one, which they take for ``-2 + 1/2``."""
    text = bare(label)
    if (parts := mixed(text)) is not None:
        sign, whole, above, below = parts
        if sign == "-":
            raise ValueError(f"the label {shown(label)} is read as -{whole} + {above}/{below}; give one fraction or a decimal number")
        return (f"{whole}+{above}/{below}",)
    percent = PERCENT.search(text)
    number = decimal(text[: percent.start()] if percent else text)
    return (label,) if number in (None, label) else (label, str(number))


def integer_label(label: str) -> str:
    """Returns the integer that slime's ``dapo`` reads in a label. Raises ValueError where that is none, or not the label's own."""
    text = normalize_final_answer(label)
    number = decimal(text) or decimal(bare(label))
    if number is None or Fraction(number) != int(float(number)):
        raise ValueError(f"the label {shown(label)} is no integer that dapo can compare: it cuts decimals off, and keeps 15 digits")
    return str(int(float(number)))


LONGEST_ANSWER = 1000
"""The most characters that are read as an answer: of a marked one, which is wrong if it is longer, of a label, which is refused, and of a
response that marks none, the last ones. Parsing takes time that grows faster than the text; responses that loop have 100,000 and more."""

_FUNCTION = re.compile(r"(?<![\\a-z])(sin|cos|tan|log|ln|exp|pi)(?![a-z])", re.IGNORECASE)
_ROOT = re.compile(r"(?<![\\a-z])sqrt\(([^()]*)\)")
_PLAIN_ENDING = re.compile(
    r"""(?:\s*(?=[-+\d])            # nothing but the number,
        |[^\d\\$^/=]*[a-z]{2}:?\s+  # or a sentence without a digit or markup
        )(?P<number>(?:(?<!\S)[-+]|(?<![-+]))\d{1,40}(?:\.\d{1,40})?)\.?\s*\Z""",
    re.ASCII | re.IGNORECASE | re.VERBOSE,
)
_FINAL, _THOUGHT = "####", "</think>"
_WORDS = re.compile(r"[^\W\d_]+(?:[\s'.-]+[^\W\d_]+)*\.?\Z")
_PROSE = re.compile(r"(?<!\\)\b(?!(?:arc)?(?:sin|cos|tan)|sqrt|log|exp|(?:and|max|min|inf)\b)[^\W\d_]{3,}\b", re.IGNORECASE)
_FULL_STOP = re.compile(r"(?<!\.)\.\Z")
# A short text without two words in it (``3 x`` is none), and no word of several letters, which would be their product
_TERM = re.compile(r"(?![^\W\d_]{2,}\Z|.*(?<![\\\w])(?!\d+\s+[^\W\d_](?!\w))\w+\s+\w).{1,100}\Z", re.DOTALL)
_STRESSED = re.compile(r"\A(\*\*?|`)(\$?[-+\u2212]?\d[\d,./]*\s[^*`\d]*)\1\.?\s*\Z")  # one number and words behind it
_DIGITS = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?", re.ASCII)


@dataclass(frozen=True)
class _Truth:
    """A parsed label: a number as plain decimal digits, a text in small letters, or the parse of ``expression`` by math-verify."""

    number: str | None = None
    text: str | None = None
    expression: str = ""
    percent: bool = False

    def equals(self, number: str) -> float:
        """Returns 1.0 where the number is exactly this one or, for a percentage, its hundredth."""
        truth, found = Fraction(self.number or 0), Fraction(number)
        return 1.0 if found == truth or (self.percent and found * 100 == truth) else 0.0


def math_verify(response: str, label: str) -> float:
    """Returns 1.0 where the answer in ``response`` equals ``label``, else 0.0.

    The answer is, after ``</think>``, the last ``\\boxed{}`` that is closed, else what follows the last ``####``, else the last expression
    in its last `LONGEST_ANSWER` characters. It has no deadline of its own.
    Raises ValueError for a label in which nothing can be compared.
    """
    truth, said = _truth(label), response.rpartition(_THOUGHT)[2]
    response = said if said.strip() else response
    if (answer := _marked(response)) is not None:
        return _compared(answer, _latex, truth) if len(answer) <= LONGEST_ANSWER else 0.0
    response = _tail(response)
    if truth.number is not None and (ending := _PLAIN_ENDING.match(response)) is not None:
        return truth.equals(ending["number"])
    return _compared(response, _mixed, truth)


@lru_cache(1024)  # the responses of a group often give the same answer
def _compared(said: str, expression: Callable[[str], str], truth: _Truth) -> float:
    """Compares an answer; ``expression`` gives it as math-verify is to read it, where it is no number. One term counts as in a box, too."""
    answer = _plain(said)
    same = answer.rstrip(".").casefold() == (truth.text or truth.expression.casefold())
    if truth.text is not None:
        return float(same)
    number = decimal(answer)
    if truth.number is not None and number is not None:
        return truth.equals(number)
    found = _parse(f"${number}$" if number is not None else expression(said))
    if number is None and "\\boxed" not in said and (same or _TERM.match(_latex(answer))):
        found += _parse(f"${_latex(answer)}$")
    truths = [truth.number or truth.expression, *([f"{truth.number}\\%"] if truth.percent else [])]
    return 1.0 if any(bool(_library().verify(_parsed(expected), found, timeout_seconds=None)) for expected in truths) else 0.0


def read(label: str) -> str:
    """Returns the label as `math_verify` compares answers with it: a number, a text or an expression. Raises ValueError as that does."""
    truth = _truth(label)
    return truth.number or truth.text or truth.expression


@lru_cache(64)  # the samples of a group have one label
def _truth(label: str) -> _Truth:
    answer = label if (marked := _marked(label)) is None else marked
    if len(answer) > LONGEST_ANSWER:
        raise ValueError(f"the label {shown(answer)} has {len(answer)} characters; an answer has at most {LONGEST_ANSWER}")
    text = _plain(answer)
    percent = PERCENT.search(text)
    if (number := decimal(text[: percent.start()] if percent else text)) is not None:
        return _Truth(number=number, percent=percent is not None)
    prose = "\\" not in text and _PROSE.search(text) is not None  # fewer letters are a product of symbols
    if prose and _WORDS.match(text):
        return _Truth(text=text.rstrip(".").casefold())
    if prose:
        numbers = _DIGITS.findall(text)
        if len(numbers) != 1:
            found = f"{len(numbers)} numbers among words" if numbers else "words and no number"
            raise ValueError(f"the label {shown(label)} has {found}; expected the answer alone, in \\boxed{{}} or after {_FINAL}")
        return _Truth(expression=(decimal(numbers[0]) or numbers[0]))
    expression = _latex(text)
    if not _parsed(expression):
        raise ValueError(f"no number, expression or word is read in the label {shown(label)}")
    return _Truth(expression=expression)


@lru_cache(256)  # labels: parsing takes most of the time
def _parsed(expression: str) -> list[Any]:
    """Returns math-verify's parse; empty where that is only the text itself."""
    found = _parse(f"${expression}$") or _parse(expression)
    return found if any(not isinstance(expression, str) for expression in found) else []


def _parse(text: str) -> list[Any]:
    return list(_library().parse(text, parsing_timeout=None))  # its own deadline takes the alarm from ours


@cache
def _library() -> Any:
    """Returns math-verify; sympy takes seconds to import. Its log repeats whole responses, and says that it has no deadline."""
    import math_verify as library

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return library


def _marked(response: str) -> str | None:
    """Returns the last ``\\boxed{…}`` that is closed, else what follows the last ``####`` on its line; None where there is neither.

    math-verify takes several boxes for a set of answers.
    """
    found: tuple[int, int] | None = None
    opened: list[int | None] = []  # where each open brace began a box; None for other braces
    for brace in BRACE.finditer(response):
        if brace[0] == "}" and opened:
            start = opened.pop()
            found = (start, brace.end()) if start is not None else found
        elif brace[0] in ("{", "\\boxed{"):
            opened.append(None if brace[0] == "{" else brace.start())
    if found is not None:
        return response[slice(*found)]
    if _FINAL not in response:
        return None
    lines = response.rpartition(_FINAL)[2].strip().splitlines()
    return lines[0] if lines else ""


def _tail(response: str) -> str:
    """Returns the last `LONGEST_ANSWER` characters, from a word's beginning."""
    if len(response) <= LONGEST_ANSWER:
        return response
    tail = response[-LONGEST_ANSWER:]
    return tail.partition(" ")[2] or tail


def _plain(text: str) -> str:
    """Returns the text as `bare` does, without emphasis and a full stop, too."""
    inside = bare(_FULL_STOP.sub("", text.strip()), (*FENCES, *_EMPHASIS))
    return inside if inside == text else _plain(inside)


def _latex(text: str) -> str:
    """Returns ``sin x``, ``sqrt(2)``, ``x**2`` and ``2 1/2`` as LaTeX, and ``**18 eggs**`` without the stars."""
    return _ROOT.sub(r"\\sqrt{\1}", _FUNCTION.sub(r"\\\1", _mixed(_STRESSED.sub(r"\2", text)).replace("**", "^")))


def _mixed(text: str) -> str:
    """Returns ``2 1/2`` as LaTeX, which math-verify adds up, and any other text as it is."""
    found = mixed(_plain(text))
    return f"${found[0]}({found[1]}+\\frac{{{found[2]}}}{{{found[3]}}})$" if found else text
