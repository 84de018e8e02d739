"""Rewards for boxed answers: slime's ``math`` and ``deepscaler``.

Answers are compared as the MATH data set does (Hendrycks et al. 2021), as LaTeX text after a number of rewritings, or as expressions by
sympy, by the rules of PRM800K's grader (Lightman et al. 2023), which DeepScaleR and slime took over. Nothing here has a deadline, and sympy
may compute on a few characters for ever: the caller needs one.
"""

import logging
import re
from functools import cache, lru_cache
from typing import Any

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


_TEXT = re.compile(r"^\\text\{(.+?)\}$")

# What is replaced first, one after the other, and by what
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
    text, *units = text.split(_UNIT)
    if len(units) > 1:
        raise _Unreadable(text)
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    left, *right = ("0" + text if text.startswith(".") else text).split("=")
    if len(right) == 1 and len(left) <= 2:  # a symbol of one or two letters, and what it is said to equal
        left, right = right[0], []
    head, *roots = "=".join([left, *right]).split("\\sqrt")
    text = head + "".join("\\sqrt" + (part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}") for part in roots)
    text = _braced_fractions(text.replace(" ", ""))
    return _built_fraction(_HALF if text == "0.5" else text)


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


_ENCLOSED = re.compile(r"^\\text\{(.+?)\}$")

# What is replaced first, one after the other, and by what
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
_NAMES = "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard"
_UNITS = [re.compile(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?") for unit in _NAMES.split()]  # Units that are left out, one after the other
_CIRCLE = re.compile(r"\^ *\\circ")
_SPACED_COMMA = re.compile(r",\\! *")
_MINUS = re.compile("- *")
_MIXED = re.compile("([0-9]) +([0-9])")
_THOUSANDS = re.compile(r"(\d),(\d\d\d)($|\D)")
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_SYMBOLS = str.maketrans({"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*"})
_BRACKETS = "()[]"

MOST_LETTERS = 2  # The most different letters of an expression that is computed, those of ``sqrt`` and ``frac`` aside
_ENDLESS = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+")  # Powers that sympy might compute on for ever
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
    letters = {letter for letter in difference.replace("sqrt", "").replace("frac", "") if letter.isalpha()}
    if len(letters) > MOST_LETTERS or _ENDLESS.search(difference) is not None:
        return False
    try:
        import sympy
        from sympy.parsing import sympy_parser

        rules = (*sympy_parser.standard_transformations, sympy_parser.implicit_multiplication_application)
        read = sympy_parser.parse_expr(difference.replace("^", "**"), local_dict={}, global_dict=dict(_names()), transformations=rules)
        return bool(sympy.simplify(read) == 0)
    except Exception:  # sympy raises anything for what is no expression
        return False


def normalize(answer: str | None) -> str | None:
    """Returns an answer in sympy's notation, in small letters, without units, spaces and braces."""
    if answer is None:
        return None
    if (enclosed := _ENCLOSED.search(answer)) is not None:
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
    latex = answer.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac")  # keeps a mixed fraction apart
    try:
        return str(_converter().latex_to_text(latex)).translate(_SYMBOLS).strip()
    except Exception:  # the parser of LaTeX raises anything for what is none
        return answer


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


REMEMBERED = 200  # The most characters of an answer that is compared once for all responses that give it: those of a group often agree
_THOUGHT, _RESPONSE = "</think>", "###Response"


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Returns whether the answer in the response's last box is right (``math``). A response without a box is wrong."""
    if not ground_truth:
        return False
    expected: str | None = str(ground_truth)
    if "\\boxed" in str(ground_truth):
        expected = extract_answer(str(ground_truth))
    given = extract_answer(solution_str)
    return given is not None and same_answer(given, expected)


def get_deepscaler_rule_based_reward(response: str, label: str | float) -> int:
    """Returns 1 where the last box behind the thoughts has the right answer, else 0 (``deepscaler``). Behind the thoughts means after the
    last ``</think>``, without one after the first ``###Response``; without both the reward is 0."""
    if _THOUGHT in response:
        solution = response.rpartition(_THOUGHT)[2]
    elif _RESPONSE in response:
        solution = response.split(_RESPONSE)[1]
    else:
        return 0
    given = extract_answer(solution)
    if given is None or label == "":
        return 0
    if not isinstance(label, str | float | int):
        raise TypeError(f"the label is a {type(label).__name__}; expected text or a number")
    expected = extract_answer(str(label)) if "\\boxed" in str(label) else str(label)
    return int(expected is not None and same_answer(given, expected))


def same_answer(given: str, expected: str | None) -> bool:
    """Returns whether an answer is right as the MATH data set compares it, or by sympy."""
    return (_graded if len(given) <= REMEMBERED else _graded.__wrapped__)(given, expected)


@lru_cache(1024)
def _graded(given: str, expected: str | None) -> bool:
    return grade_answer_mathd(given, expected) or grade_answer_sympy(given, expected)
