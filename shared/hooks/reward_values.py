"""Makes the score of a sample from a function's or an environment's result: one number that counts, and others by name."""

import math
from collections.abc import Mapping
from typing import Any

from shared.environment.protocol import shown
from shared.schema.message import LARGEST_REWARD, MAX_NAME, MAX_PARTS, is_part_name, is_reward
from shared.schema.sample import Score

REWARD = "reward"  # The name of the reward that counts where the run names no other


def read(value: object, key: str | None) -> Score:
    """Returns the score in the result of a user's function.

    Args:
        value: a number, or named ones; named values that are no numbers (slime's ``pred``) are left out. key: the name that counts.

    Raises ValueError that says what would be valid.
    """
    numbers = plain(value)
    return _counted(numbers, key) if isinstance(numbers, dict) else Score(reward=numbers)


def plain(value: object) -> float | dict[str, float]:
    """Returns a reward, or those by name, as numbers of Python's; what is no number among named ones is left out. Raises ValueError."""
    return named(value) if isinstance(value, Mapping) else _number(value, "a reward")


def named(value: Mapping[Any, Any]) -> dict[str, float]:
    """Returns rewards by name as numbers of Python's; what is no number is left out. Raises ValueError."""
    found = {str(name): number for name, number in ((name, _plain(entry)) for name, entry in value.items()) if number is not None}
    if len(found) > MAX_PARTS or not all(map(is_part_name, found)):
        raise ValueError(f"{len(found)} named rewards; expected at most {MAX_PARTS}, with names of 1 to {MAX_NAME} printable characters")
    for name, number in found.items():
        _number(number, name)
    return found


def counted(score: Score, key: str | None) -> Score:
    """Returns an environment's score by the reward named ``key``, or unchanged if it has no named rewards. Raises ValueError."""
    return _counted({REWARD: score.reward, **score.parts}, key) if score.parts and key not in (None, REWARD) else score


def _counted(named: dict[str, float], key: str | None) -> Score:
    wanted = key or REWARD
    if wanted not in named:
        there = f"there are {', '.join(named)}" if named else "there are none"
        raise ValueError(f"no reward is named {wanted}; {there} (reward.reward_key says which counts)")
    parts = [(name, number) for name, number in named.items() if name != REWARD or wanted != REWARD]
    return Score(reward=named[wanted], parts=dict(parts[:MAX_PARTS]))


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
    if not is_reward(number):
        raise ValueError(f"{name} is {shown(value)}; expected a number from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}")
    return number
