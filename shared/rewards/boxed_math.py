"""Rewards for boxed answers: slime's ``math`` and ``deepscaler``."""

from functools import lru_cache
from typing import Any

from shared.rewards.boxed import extract_answer
from shared.rewards.hendrycks import grade_answer_mathd
from shared.rewards.symbolic import grade_answer_sympy

REMEMBERED = 200
"""The most characters of an answer that is compared once for all responses that give it: those of a group often agree."""

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
    """Returns 1 where the last box behind the thoughts has the right answer, else 0 (``deepscaler``).

    Behind the thoughts means after the last ``</think>``, without one after the first ``###Response``; without both the reward is 0.
    """
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
