"""Reads numbers in labels and answers as people write them: with fences, a currency sign, thousands set apart, a unit, an exponent.

slime's rewards read fewer forms, and some wrongly (``2 1/2`` as 21/2). What they would compare wrongly is read here, or refused.
"""

import re
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from shared.rewards.dapo import normalize_final_answer

FENCES = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}"), ("\\text{", "}"), ("\\mathrm{", "}"))
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


def bare(text: str) -> str:
    """Returns the text without white space, fences and a currency sign around it."""
    text = text.strip().replace("\u2212", "-")
    for left, right in FENCES:
        inside = text[len(left) : -len(right)]
        if text.startswith(left) and text.endswith(right) and inside and (_balanced(inside) if right == "}" else right not in inside):
            return bare(inside)
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


def math_label(label: str) -> str:
    """Returns the label as slime's ``math`` and ``deepscaler`` read it rightly. Raises ValueError where they cannot: see `math_labels`."""
    return math_labels(label)[0]


@lru_cache(64)  # the samples of a group have one label
def math_labels(label: str) -> tuple[str, ...]:
    """Returns the label in the forms that ``math`` and ``deepscaler`` are to compare answers with: right is what is one of them.

    That is the label itself, and besides, where a number stands in it in a form that they may not read (``5 km/h``), that number. They read
    a mixed fraction rightly only as a sum. Raises ValueError for a negative one, which they take for ``-2 + 1/2``.
    """
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
