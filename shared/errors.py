"""The few named errors of Myxo: each carries what an operator needs (what, whom, how long, what next)."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class MyxoError(Exception):
    """Base of every error that Myxo raises on purpose; its message is one line, fit for a terminal."""


class BadInput(MyxoError):
    """What a person gave cannot be used. Commands exit with code 2 on it."""


class ConfigError(BadInput):
    """Bad input that has a name: a config key, a flag, a path, a prompt file.

    Args:
        field: dotted name of the offending field, for example ``rollout.n_samples_per_prompt``.
        value: what was given.
        expected: what would be right, in words.
    """

    def __init__(self, field: str, value: object, expected: str) -> None:
        self.field, self.value, self.expected = field, value, expected
        super().__init__(f"{field} = {value!r}: {expected}")


class Problems(BadInput):
    """Several things are wrong with one input. ``problems``: at least two, in the order in which they are told."""

    def __init__(self, problems: Sequence[BadInput]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(map(str, problems)))


def problems_of(error: BadInput) -> list[BadInput]:
    """Returns the single problems that an error stands for."""
    return error.problems if isinstance(error, Problems) else [error]


def raise_problems(problems: Sequence[BadInput]) -> None:
    """Raises the only problem, or `Problems` where there are several; returns where there is none."""
    if len(problems) > 1:
        raise Problems(problems)
    for problem in problems:
        raise problem


class DeadlineExceeded(MyxoError):
    """A wait ran out.

    Args:
        what: the thing awaited. whom: who should have delivered it.
        seconds: how long was waited. then: what happens next.
    """

    def __init__(self, what: str, whom: str, seconds: float, then: str) -> None:
        self.what, self.whom, self.seconds, self.then = what, whom, seconds, then
        super().__init__(f"{what} did not come from {whom} within {seconds:g} s; {then}")


class BadMessage(MyxoError):
    """Received bytes that are not a message of this schema: named field, nothing is done with them."""


class PayloadMissing(MyxoError):
    """A reference whose payload the store no longer holds."""


class MessageTooLarge(MyxoError):
    """A message that the bus would refuse (payload and headers together over its limit); it was not sent."""


def nearest(name: str, valid: list[str]) -> str:
    """``did you mean …`` with the nearest valid names, or the list where none is near."""
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"valid are {', '.join(sorted(valid))}"
