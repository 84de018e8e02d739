"""Compares answers as expressions, by sympy: numbers, fractions, tuples and intervals, and expressions in at most two letters.

The rules are those of the grader of PRM800K (Lightman et al. 2023), which DeepScaleR and slime took over. Nothing here has a deadline, and
sympy may compute on a few characters for ever: the caller needs one.
"""

import logging
import re
from functools import cache
from typing import Any

_TEXT = re.compile(r"^\\text\{(.+?)\}$")

_REPLACED = (
    ("\\%", "%"),
    ("\\$", "$"),
    ("$", ""),
    ("%", ""),
    (" or ", " , "),
    (" and ", " , "),
    ("million", "*10^6"),
    ("billion", "*10^9"),
    ("trillion", "*10^12"),
)
"""What is replaced first, one after the other, and by what."""

_NAMES = "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard"
_UNITS = [re.compile(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?") for unit in _NAMES.split()]
"""Units that are left out, one after the other."""

_CIRCLE = re.compile(r"\^ *\\circ")
_SPACED_COMMA = re.compile(r",\\! *")
_MINUS = re.compile("- *")
_MIXED = re.compile("([0-9]) +([0-9])")
_THOUSANDS = re.compile(r"(\d),(\d\d\d)($|\D)")
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_SYMBOLS = str.maketrans({"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*"})
_BRACKETS = "()[]"

MOST_LETTERS = 2
"""The most different letters of an expression that is computed, those of ``sqrt`` and ``frac`` aside."""

_ENDLESS = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+")
"""Powers that sympy might compute on for ever."""

_WHOLE = 1e-7


def grade_answer_sympy(given_answer: str | None, ground_truth: str | None) -> bool:
    """Returns whether both mean the same. An integer has to be given as one, and a fraction as it stands, not reduced otherwise."""
    expected, found = normalize(ground_truth), normalize(given_answer)
    if expected is None:
        return False
    if expected == found:
        return True
    if not found:
        return False
    expected_parts, found_parts = split_tuple(expected), split_tuple(found)
    if len(expected_parts) != len(found_parts):
        return False
    if len(expected_parts) > 1 and (expected[0], expected[-1]) != (found[0], found[-1]):
        return False
    return all(map(_same_part, expected_parts, found_parts))


def _same_part(expected: str, found: str) -> bool:
    if _FRACTION.search(expected) and _FRACTION.search(found):
        return expected == found
    if _is_integer(expected) != _is_integer(found):
        return False
    return are_equal_under_sympy(expected, found)


def are_equal_under_sympy(expected: str, found: str) -> bool:
    """Returns whether sympy simplifies the difference to 0; False for what it cannot read, or may not."""
    difference = f"({expected})-({found})"
    if not should_allow_eval(difference):
        return False
    try:
        return bool(_simplified(difference) == 0)
    except Exception:  # sympy raises anything for what is no expression
        return False


def should_allow_eval(expression: str) -> bool:
    """Returns whether an expression may be computed."""
    return count_unknown_letters(expression) <= MOST_LETTERS and _ENDLESS.search(expression) is None


def count_unknown_letters(expression: str) -> int:
    """Returns how many different letters an expression has besides ``sqrt`` and ``frac``."""
    return len({letter for letter in expression.replace("sqrt", "").replace("frac", "") if letter.isalpha()})


def normalize(answer: str | None) -> str | None:
    """Returns an answer in sympy's notation, in small letters, without units, spaces and braces."""
    if answer is None:
        return None
    if (enclosed := _TEXT.search(answer)) is not None:
        answer = enclosed[1]
    for before, after in _REPLACED:
        answer = answer.replace(before, after)
    for unit in _UNITS:
        answer = unit.sub("", answer)
    answer = _CIRCLE.sub("", answer)
    if answer.startswith("{") and answer.endswith("}"):
        answer = answer[1:-1]
    answer = _plain(_SPACED_COMMA.sub("", answer))
    answer = _MIXED.sub("\\1+\\2", _MINUS.sub("-", answer))
    answer = answer.replace(" ", "").replace("{", "").replace("}", "").lower()
    return str(int(float(answer.replace(",", "")))) if _is_integer(answer) else answer


def _plain(answer: str) -> str:
    """Returns a whole number without its decimals, and LaTeX as plain text where it can be read."""
    try:
        number = float(answer)
        if _is_whole(number):
            answer = str(round(number))
    except ValueError:
        pass
    if "\\" not in answer:
        return answer
    try:
        return _plain_text(answer)
    except Exception:  # the parser of LaTeX raises anything for what is none
        return answer


def _plain_text(latex: str) -> str:
    for command in ("\\tfrac", "\\dfrac"):
        latex = latex.replace(command, "\\frac")
    text: str = _converter().latex_to_text(latex.replace("\\frac", " \\frac"))  # with the space a mixed fraction keeps its parts apart
    return text.translate(_SYMBOLS).strip()


def _is_whole(number: float) -> bool:
    try:
        return abs(number - round(number)) <= _WHOLE
    except (ValueError, OverflowError):  # NaN and the infinities
        return False


def _is_integer(text: str) -> bool:
    try:
        return _is_whole(float(without_thousands(text)))
    except ValueError:
        return False


def without_thousands(text: str) -> str:
    """Returns the text without the commas that set thousands apart; others separate the parts of a tuple."""
    while (shorter := _THOUSANDS.sub("\\1\\2\\3", text)) != text:
        text = shorter
    return text


def split_tuple(text: str) -> list[str]:
    """Returns the parts of a tuple or an interval, of anything else the text alone, of an empty one nothing."""
    text = without_thousands(text)
    inside = text[1:-1]
    if inside and text[0] in _BRACKETS and text[-1] in _BRACKETS and not any(bracket in inside for bracket in _BRACKETS):
        return [part.strip() for part in inside.split(",")]
    return [text] if text else []


@cache
def _converter() -> Any:
    from pylatexenc.latex2text import LatexNodes2Text

    logging.getLogger("pylatexenc").setLevel(logging.CRITICAL)  # it says of each response what is no LaTeX in it
    return LatexNodes2Text()


@cache
def _names() -> dict[str, Any]:
    """Returns what an expression may name: everything public of sympy, and nothing of Python."""
    import sympy

    return {"__builtins__": {}} | {name: value for name, value in vars(sympy).items() if not name.startswith("_")}


def _simplified(expression: str) -> Any:
    import sympy
    from sympy.parsing import sympy_parser

    rules = (*sympy_parser.standard_transformations, sympy_parser.implicit_multiplication_application)
    read = sympy_parser.parse_expr(expression.replace("^", "**"), local_dict={}, global_dict=dict(_names()), transformations=rules)
    return sympy.simplify(read)
