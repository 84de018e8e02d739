"""The environment protocol, version 1: its requests and valid answers. Pure.

Every map is the same over HTTP (JSON) and over NATS (MessagePack). Answers are checked strictly, because they decide what
a model learns: an invalid answer is refused with the environment, the field and what was expected. Unknown fields are ignored.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.runtime.errors import MyxoError
from shared.schema.message import LARGEST_REWARD, MAX_NAME, MAX_PARTS, is_part_name, is_reward
from shared.schema.sample import Score

PROTOCOL = 1
DESCRIBE, SCORE = "describe", "score"

MAX_ANSWER = 4 << 20
"""The most bytes of an answer."""

_SHOWN = 80


class EnvironmentFailed(MyxoError):
    """The environment answered something that cannot be used, or an error of its own.

    Args:
        environment: the environment, by name and address. reason: the field and what was expected. own_words: what it says itself.
    """

    def __init__(self, environment: str, reason: str, own_words: str = "") -> None:
        self.environment, self.own_words = environment, own_words
        self.reason = f"{reason}: {own_words}" if own_words else reason
        super().__init__(f"{environment}: {self.reason}")


class EnvironmentAway(MyxoError):
    """Nobody can be connected to at the environment's address, or the connection broke: the same request may be sent again.

    Args:
        environment: the environment, by name and address. reason: why.
    """

    def __init__(self, environment: str, reason: str) -> None:
        self.environment, self.reason = environment, reason
        super().__init__(f"{environment} cannot be reached: {reason}")


class ScoreSample(BaseModel):
    """One response. ``tokens``: its length."""

    index: int
    response: str
    tokens: int
    finish: Literal["stop", "length", "abort"]


class ScoreRequest(BaseModel):
    """A whole group to score: the ``samples`` of one prompt. After a broken connection the same group and attempt is asked for again."""

    protocol: int = PROTOCOL
    run: str
    group: str
    attempt: int
    prompt: str | list[dict[str, Any]]
    label: str | None
    metadata: dict[str, Any]
    samples: list[ScoreSample]


class Description(BaseModel):
    """An environment's description of itself. ``timeout``: the most seconds that one score or step may need, as the environment states.

    ``session_ttl``: seconds after which it forgets a session that nobody steps.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    protocol: int
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    verbs: list[str]
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    session_ttl: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @property
    def scores(self) -> bool:
        """Returns whether it scores groups."""
        return SCORE in self.verbs

    @property
    def steps(self) -> bool:
        """Returns whether episodes can be played in it."""
        return {"reset", "step"} <= set(self.verbs)


def read_description(answer: object, environment: str) -> Description:
    """Checks the answer to ``describe``. Raises EnvironmentFailed."""
    fields = read_map(answer, environment)
    version = fields.get("protocol")
    if version != PROTOCOL or isinstance(version, bool | float):
        said = f"protocol is {shown(version)}" if "protocol" in fields else "protocol is missing"
        raise EnvironmentFailed(environment, f"{said}; expected {PROTOCOL}, the version that is spoken here")
    try:
        description = Description.model_validate(fields)
    except ValidationError as error:
        raise EnvironmentFailed(environment, first_problem(error)) from None
    if not (description.scores or description.steps):
        raise EnvironmentFailed(
            environment, f"verbs is {shown(description.verbs)}; expected a list with {SCORE!r}, or with 'reset' and 'step'"
        )
    return description


def read_scores(answer: object, count: int, environment: str) -> list[Score]:
    """Checks the answer to ``score`` for a group of ``count`` samples. Raises EnvironmentFailed."""
    fields = read_map(answer, environment)
    rewards = fields.get("rewards")
    if not isinstance(rewards, list):
        found = f"rewards is {shown(rewards)}" if "rewards" in fields else "rewards is missing"
        raise EnvironmentFailed(environment, f"{found}; expected a list with one entry a sample")
    if len(rewards) != count:
        raise EnvironmentFailed(environment, f"rewards has {len(rewards)} entries; expected {count}, one a sample")
    return [read_score(entry, f"rewards[{index}]", environment) for index, entry in enumerate(rewards)]


def read_score(entry: object, field: str, environment: str) -> Score:
    """Checks one reward: a number, or an object of named ones. Raises EnvironmentFailed."""
    if not isinstance(entry, Mapping):
        return Score(reward=_number(entry, field, environment, "a finite number, or an object with reward"))
    if "reward" not in entry:
        raise EnvironmentFailed(environment, f"{field}.reward is missing; expected a finite number")
    if len(entry) > MAX_PARTS + 1:
        raise EnvironmentFailed(environment, f"{field} has {len(entry)} entries; expected at most {MAX_PARTS} beside reward")
    parts = {}
    for name, value in entry.items():
        if not isinstance(name, str) or not is_part_name(name):
            raise EnvironmentFailed(environment, f"{field} has the name {shown(name)}; expected 1 to {MAX_NAME} printable characters")
        parts[name] = _number(
            value, f"{field}.{name}" if name.isidentifier() else f"{field}[{shown(name)}]", environment, "a finite number"
        )
    return Score(reward=parts.pop("reward"), parts=parts)


def _number(value: object, field: str, environment: str, expected: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if is_reward(number):
            return number
        if math.isfinite(number):
            expected = f"a number from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
    raise EnvironmentFailed(environment, f"{field} is {shown(value)}; expected {expected}")


def read_map(answer: object, environment: str) -> Mapping[str, object]:
    """Returns an answer that is a map and no error. Raises EnvironmentFailed."""
    if not isinstance(answer, dict):
        raise EnvironmentFailed(environment, f"the answer is {shown(answer)}; expected an object")
    error = answer.get("error")
    if error is not None:
        raise EnvironmentFailed(environment, "says", words(error))
    return answer


def first_problem(error: ValidationError) -> str:
    """Returns the first thing that is wrong with an answer: the field, what it is, and what pydantic says of it."""
    first = error.errors()[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    found = "is missing" if first["type"] == "missing" else f"is {shown(first['input'])}"
    return f"{where} {found}; {first['msg'][0].lower()}{first['msg'][1:]}"


def words(text: object) -> str:
    """Returns an environment's own words on one line of bounded length, with nothing in it that a terminal would obey."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in str(text)).split())
    return line if len(line) <= 3 * _SHOWN else line[: 3 * _SHOWN] + " …"


def shown(value: object) -> str:
    """Returns a value of an answer as an error shows it: short, with its kind where the text alone would mislead."""
    if isinstance(value, Mapping):
        return f"an object of {len(value)}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) > 8:
        return f"a list of {len(value)}"
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a huge integer"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " …"
