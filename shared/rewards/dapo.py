"""slime's ``dapo``: the answer behind ``Answer:``, compared with an integer as text; 1 where it is right, -1 where not.

The normalisation is that of Minerva (Lewkowycz et al. 2022, appendix D.1).
"""

import re
from typing import Any

from shared.rewards.boxed import BOX, last_boxed

LAST_CHARACTERS = 300
"""The characters at a response's end that are looked at."""

LAST_OF_BOX = 100
"""The same where the answer has to stand in a box."""

ANSWER = r"(?i)Answer\s*:\s*([^\n]+)"
INVALID = "[INVALID]"
"""The prediction of a response that names no answer."""

_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)

# fmt: off
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points", "feet", "minutes",
    "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples",
    "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ",
    "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots", "<|im_end|>", "<|endoftext|>",
)
# fmt: on
"""What is left out, one after the other."""

_REWRITTEN = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r".*?\$(.*?)\$.*", r"$\1$"),
        (r"\\text\{(.*?)\}", r"\1"),
        (r"\\textbf\{(.*?)\}", r"\1"),
        (r"\\overline\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),
        (r"sqrt([^{])", r"sqrt{\1}"),
    )
)
"""Enclosing commands, and arguments without braces."""


def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> dict[str, Any]:
    """Returns ``score``, 1.0 or -1.0; ``acc``, whether the answer is right; ``pred``, the answer as it was read.

    Raises ValueError for a ``ground_truth`` that is no number.
    """
    right, found = verify(solution_str[-LAST_CHARACTERS:], ground_truth, strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": found}


def verify(
    response: str, answer: Any, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> tuple[bool, str | None]:
    """Returns whether the answer is right, and what was read; with ``strict_box_verify`` the box has to hold just the text."""
    if strict_box_verify:
        score, found = is_correct_strict_box(response, answer, pause_tokens_index)
        return score == 1, found
    return is_correct_minerva(response, answer)


def is_correct_minerva(response: str, truth: Any, gt_need_extract: bool = False, answer_pattern: str = ANSWER) -> tuple[bool, str]:
    """Returns whether the last match of the pattern, normalised, is the integer ``truth``, and what it is."""
    named = re.findall(answer_pattern, response)
    found = normalize_final_answer(named[-1] if named else INVALID)
    expected = remove_boxed(last_boxed_only_string(truth)) if gt_need_extract else truth
    return found == str(int(float(normalize_final_answer(expected)))), found


def is_correct_strict_box(response: str, truth: str, pause_tokens_index: list[int] | None = None) -> tuple[int, str | None]:
    """Returns 1 where the last box in the last characters holds just ``truth``, else -1, and what it holds."""
    if pause_tokens_index is None:
        tail = response[-LAST_OF_BOX:]
    elif len(pause_tokens_index) == 4:
        tail = response[pause_tokens_index[-1] - LAST_OF_BOX :]
    else:
        raise AssertionError(f"pause_tokens_index has {len(pause_tokens_index)} entries; expected 4")
    boxed = last_boxed_only_string(tail)
    found = None if boxed is None else remove_boxed(boxed)
    return (1 if found == truth else -1), found


def last_boxed_only_string(text: str) -> str | None:
    """Returns the last ``\\boxed{…}``; None where there is none, or it is not closed."""
    return last_boxed(text, BOX)


def remove_boxed(boxed: str | None) -> str:
    """Returns what stands inside of ``\\boxed{…}``. Raises AssertionError for anything else."""
    if boxed is None or not (boxed.startswith(BOX) and boxed.endswith("}")):
        raise AssertionError(f"box error: {boxed}")
    return boxed[len(BOX) : -1]


def normalize_final_answer(answer: Any) -> str:
    """Returns an answer without articles, units and markup, with braces around arguments."""
    text = str(answer).rpartition("=")[2]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for removed in _REMOVED:
        text = text.replace(removed, "")
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()
