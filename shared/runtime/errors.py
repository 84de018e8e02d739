"""The few named errors of Myxo. Each names what an operator needs: what was awaited, from whom, for how long, and what happens next."""

import difflib
import errno
import re
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

Fault = Literal["", "infrastructure", "task", "policy"]
"""What was at fault where a group could not be trained. ``infrastructure``: processes, servers and networks; the same group may do well
another time. ``task``: its prompt, label, function or environment. ``policy``: what the model wrote. Empty: not known."""

INFRASTRUCTURE: Fault = "infrastructure"
TASK: Fault = "task"
POLICY: Fault = "policy"


class MyxoError(Exception):
    """Base of every error that Myxo raises on purpose; its message is one line, fit for a terminal. ``fault``: what is at fault where a
    group dies of it."""

    fault: ClassVar[Fault] = TASK


def no_room(error: BaseException) -> bool:
    """Returns whether an error says that a disk is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


LONGEST_VALUE = 400  # characters of a value that are shown: a path is whole, a table or a prompt is not


def shown(value: object) -> str:
    """Returns a value as it is shown in an error, the middle of a long one left out."""
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE // 2]} … ({len(text):,} characters) … {text[-40:]}"


class BadInput(MyxoError):
    """The input of a person cannot be used. Commands exit with code 2 on it."""


class ConfigError(BadInput):
    """Bad input in a named place: a config key, a flag, a path, a prompt file.

    Args:
        field: dotted name of the offending field, for example ``rollout.n_samples_per_prompt``.
        value: what was given.
        expected: what is expected instead, in words.
    """

    def __init__(self, field: str, value: object, expected: str) -> None:
        self.field, self.value, self.expected = field, value, expected
        super().__init__(f"{field} = {shown(value)}: {expected}")


class ServerUnreachable(MyxoError):
    """NATS or the store does not answer. ``refused``: it does, and takes neither this client nor another attempt."""

    fault = INFRASTRUCTURE

    def __init__(self, message: str, *, refused: bool = False) -> None:
        self.refused = refused
        super().__init__(message)


class Problems(BadInput):
    """Several errors in one input. ``problems``: at least two, in the order in which they are reported."""

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
    """A wait reached its deadline.

    Args:
        awaited: the thing that did not come. awaited_from: who should have delivered it.
        seconds: how long was waited. next_action: what happens now.
    """

    fault = INFRASTRUCTURE

    def __init__(self, awaited: str, awaited_from: str, seconds: float, next_action: str) -> None:
        self.awaited, self.awaited_from, self.seconds, self.next_action = awaited, awaited_from, seconds, next_action
        super().__init__(f"{awaited} did not come from {awaited_from} within {seconds:g} s; {next_action}")


class BadMessage(MyxoError):
    """Received bytes are not a message of this schema; the error names the field, and nothing is done with them."""


class PayloadMissing(MyxoError):
    """The store no longer holds the payload of a reference."""

    fault = INFRASTRUCTURE


class PayloadChanged(BadMessage):
    """The store holds other blobs under a reference than those that were announced; they are not used."""


class MessageTooLarge(MyxoError):
    """The bus would refuse a message (payload and headers together are over its limit); it was not sent."""


NEAR, NEAR_WORD = 0.7, 0.75  # The least similarity of two names, and of two words in them, by `difflib`: a hint further off would mislead


def near(name: str, valid: Iterable[str]) -> str | None:
    """Returns the valid name that was probably meant, or None: each word of ``name`` is nearly a word of it, or short for one."""
    words = _words(name)
    best, found = 0.0, None
    for candidate in valid:
        parts = _words(candidate)
        runs = ["".join(parts[start:end]) for start in range(len(parts)) for end in range(start + 1, len(parts) + 1)]
        if not words or not all(any(_meant(word, run) for run in runs) for word in words):
            continue
        alike = 1.0 if len(words) > 1 and set(words) <= set(parts) else _alike("".join(words), "".join(parts))
        if alike >= NEAR and (alike, -len(candidate)) > (best, -len(found or "")):
            best, found = alike, candidate
    return found


def nearest(name: str, valid: list[str]) -> str:
    """Returns ``did you mean …`` with the nearest valid name, or the list where none is near."""
    found = near(name, valid)
    return f"did you mean {found}?" if found is not None else f"valid are {', '.join(sorted(valid))}"


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def _meant(word: str, run: str) -> bool:
    """Returns whether the two are spelt nearly alike, or one is short for the other as ``attn`` is for attention."""
    short, long = sorted((word, run), key=len)
    letters = iter(long)
    return _alike(word, run) >= NEAR_WORD or (len(short) > 2 and short[0] == long[0] and all(letter in letters for letter in short))


def _alike(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name, other).ratio()
