"""Makes a score of what a function or an environment gave for a sample: one number that counts, the others beside it by name."""

import math
from collections.abc import Mapping
from typing import Any

from shared.environment.protocol import MAX_NAME, MAX_PARTS, shown
from shared.schema.messages import Score

REWARD = "reward"
"""The name of the reward that counts where the run names no other."""


def read(value: object, key: str | None) -> Score:
    """Returns the score that a function of the user's own gave.

    Args:
        value: a number, or named ones; what is no number among those (slime's ``pred``) is left out. key: which of them counts.

    Raises ValueError, saying what would be right.
    """
    if not isinstance(value, Mapping):
        return Score(reward=_number(value, "a reward"))
    named = {str(name): number for name, number in ((name, _plain(entry)) for name, entry in value.items()) if number is not None}
    if len(named) > MAX_PARTS or any(not 0 < len(name) <= MAX_NAME for name in named):
        raise ValueError(f"{len(named)} named rewards; expected at most {MAX_PARTS}, with names of 1 to {MAX_NAME} characters")
    for name, number in named.items():
        _number(number, name)
    return _counted(named, key)


def counted(score: Score, key: str | None) -> Score:
    """Returns an environment's score by the reward named ``key``; one that came without others counts as it is. Raises ValueError."""
    return _counted({REWARD: score.reward, **score.parts}, key) if score.parts and key not in (None, REWARD) else score


def _counted(named: dict[str, float], key: str | None) -> Score:
    wanted = key or REWARD
    if wanted not in named:
        there = f"there are {', '.join(named)}" if named else "there are none"
        raise ValueError(f"no reward is named {wanted}; {there} (reward.reward_key says which counts)")
    parts = named if wanted != REWARD else {name: number for name, number in named.items() if name != REWARD}
    return Score(reward=named[wanted], parts=parts)


def _plain(value: Any) -> float | None:
    """Returns a number of any kind (numpy's, a tensor of one element) as a float, None for anything else."""
    if not isinstance(value, int | float | str | bytes) and callable(getattr(value, "item", None)):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):  # an array of several
            return None
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _number(value: object, name: str) -> float:
    number = _plain(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"{name} is {shown(value)}; expected a finite number")
    return number
