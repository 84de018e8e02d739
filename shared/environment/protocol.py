"""The environment protocol, version 1: its requests and valid answers, to score groups and to play episodes. And the class of its clients.

Every map is the same over HTTP (JSON) and over NATS (MessagePack). Answers are checked strictly, because they decide what a model learns:
an invalid answer is refused with the environment, the field and what was expected. Unknown fields are ignored.

A request may come twice, after a broken connection: an episode's id names its ``reset``, a session and a turn name a ``step``, and a repeat
is answered as the first one was.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_serializer
from pydantic.functional_serializers import SerializerFunctionWrapHandler

from shared.runtime.errors import MyxoError
from shared.schema.message import LARGEST_REWARD, MAX_NAME, MAX_PARTS, is_part_name, is_reward
from shared.schema.sample import Score

PROTOCOL = 1
DESCRIBE, SCORE = "describe", "score"
OF_PROMPT = "prompt", "label", "metadata"  # Fields of a group to score; a sample has its own where they differ

MAX_ANSWER = 4 << 20  # The most bytes of an answer
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
    """Error for an address at which nothing can be connected to, or a broken connection: the same request may be sent again.

    Args:
        environment: the environment, by name and address. reason: why. broke: whether a connection broke, perhaps by the request itself.
    """

    def __init__(self, environment: str, reason: str, broke: bool = False) -> None:
        self.environment, self.reason, self.broke = environment, reason, broke
        super().__init__(f"{environment} cannot be reached: {reason}")


class ScoreSample(BaseModel):
    """One response. ``tokens``: its length. ``prompt``, ``label``, ``metadata``: its own, present only where they are not the group's."""

    index: int
    response: str
    tokens: int
    finish: Literal["stop", "length", "abort"]
    prompt: str | list[dict[str, Any]] = ""
    label: str | None = None
    metadata: dict[str, Any] = {}

    @model_serializer(mode="wrap")
    def _given_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if name in self.model_fields_set}


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
    ``session_ttl``: seconds after which it forgets a session that no one steps."""

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
    spoken = f"{PROTOCOL}, the version that is spoken here"
    _field(fields, "protocol", lambda value: value == PROTOCOL and not isinstance(value, bool | float), spoken, environment)
    try:
        description = Description.model_validate(fields)
    except ValidationError as error:
        raise EnvironmentFailed(environment, first_problem(error)) from None
    if not (description.scores or description.steps):
        expected = f"expected a list with {SCORE!r}, or with 'reset' and 'step'"
        raise EnvironmentFailed(environment, f"verbs is {shown(description.verbs)}; {expected}")
    return description


def read_scores(answer: object, count: int, environment: str) -> list[Score]:
    """Checks the answer to ``score`` for a group of ``count`` samples. Raises EnvironmentFailed."""
    fields = read_map(answer, environment)
    rewards = _field(fields, "rewards", lambda value: isinstance(value, list), "a list with one entry a sample", environment)
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
        path = f"{field}.{name}" if name.isidentifier() else f"{field}[{shown(name)}]"
        parts[name] = _number(value, path, environment, "a finite number")
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


def _field(fields: Mapping[str, object], name: str, fits: Callable[[Any], bool], expected: str, environment: str, path: str = "") -> Any:
    """Returns a field of an answer. Raises EnvironmentFailed where it does not fit."""
    if fits(value := fields.get(name)):
        return value
    found = f"is {shown(value)}" if name in fields else "is missing"
    raise EnvironmentFailed(environment, f"{path}{name} {found}; expected {expected}")


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


RESET, STEP, CLOSE = "reset", "step", "close"

MAX_MESSAGES, MAX_TOOLS = 64, 128  # The most messages, and tools, of one answer
MAX_SESSION = 128  # The most characters of a session's id
ROLES = ("system", "user", "tool")  # Who an environment may speak as: what the model says is the model's
Reply = dict[str, Any]  # A chat message: ``role``, ``content`` and what else a chat template reads of it, such as ``tool_call_id``


class ResetRequest(BaseModel):
    """Opens a session for one rollout of a prompt. ``episode`` names the request: the same one opens no second session. ``rollout``: which
    of the group's rollouts it is, from 0. ``evaluation``: the prompt is held out."""

    protocol: int = PROTOCOL
    run: str
    episode: str
    group: str
    attempt: int
    rollout: int
    prompt: str | list[dict[str, Any]]
    label: str | None
    metadata: dict[str, Any]
    evaluation: bool = False


class StepRequest(BaseModel):
    """The model's message of a turn, from 0 in each session. ``finish``: whether it ended by itself (stop) or was cut off (length)."""

    protocol: int = PROTOCOL
    run: str
    session: str
    turn: int
    message: dict[str, Any]
    finish: Literal["stop", "length"]


class CloseRequest(BaseModel):
    """Ends a session that is not stepped any more. ``done``: the environment has said so itself."""

    protocol: int = PROTOCOL
    run: str
    session: str
    done: bool


class ResetAnswer(BaseModel):
    """The answer to ``reset``, for its JSON schema. ``messages``: what the model sees behind the prompt; ``tools``: for its template."""

    session: Annotated[str, Field(min_length=1, max_length=MAX_SESSION)]
    messages: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] = []
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] = []


class StepAnswer(BaseModel):
    """The answer to ``step``, for its JSON schema. ``messages``: what the model sees next; ``reward``: of this turn, if it has one."""

    messages: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] = []
    reward: float | dict[str, float] | None = None
    done: bool


@dataclass(frozen=True)
class OpenedSession:
    """A session as an environment has opened it, checked."""

    session: str
    messages: list[Reply]
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class TurnOutcome:
    """The outcome of a turn, checked."""

    messages: list[Reply]
    reward: Score | None
    done: bool


def read_reset(answer: object, environment: str) -> OpenedSession:
    """Checks the answer to ``reset``. Raises EnvironmentFailed."""
    fields = read_map(answer, environment)

    def is_session(value: object) -> bool:
        return isinstance(value, str) and 0 < len(value) <= MAX_SESSION and value.isprintable()

    def are_tools(value: object) -> bool:
        return not value or (isinstance(value, list) and len(value) <= MAX_TOOLS and all(isinstance(tool, dict) for tool in value))

    session = _field(fields, "session", is_session, f"1 to {MAX_SESSION} printable characters", environment)
    tools = _field(fields, "tools", are_tools, f"a list of at most {MAX_TOOLS} objects", environment)
    return OpenedSession(session, _messages(fields, environment), tools or [])


def read_step(answer: object, environment: str) -> TurnOutcome:
    """Checks the answer to ``step``. Raises EnvironmentFailed."""
    fields = read_map(answer, environment)
    done = _field(fields, "done", lambda value: isinstance(value, bool), "true or false", environment)
    messages = _messages(fields, environment)
    if not done and not messages:
        raise EnvironmentFailed(environment, "messages is empty and done is false; expected what the model is to answer")
    reward = fields.get("reward")
    return TurnOutcome(messages, None if reward is None else read_score(reward, "reward", environment), done)


def _messages(fields: Mapping[str, object], environment: str) -> list[Reply]:
    messages = fields.get("messages", [])
    if not isinstance(messages, list) or len(messages) > MAX_MESSAGES:
        raise EnvironmentFailed(environment, f"messages is {shown(messages)}; expected a list of at most {MAX_MESSAGES}")
    return [_message(message, f"messages[{index}]", environment) for index, message in enumerate(messages)]


def _message(message: object, path: str, environment: str) -> Reply:
    if not isinstance(message, dict):
        raise EnvironmentFailed(environment, f"{path} is {shown(message)}; expected an object with role and content")
    _field(message, "role", lambda value: value in ROLES, f"one of {', '.join(ROLES)}", environment, f"{path}.")
    _field(message, "content", lambda value: isinstance(value, str), "text", environment, f"{path}.")
    if not all(isinstance(name, str) and len(name) <= MAX_NAME for name in message):
        raise EnvironmentFailed(environment, f"{path} has names that are no text of at most {MAX_NAME} characters")
    return dict(message)


class Environment(ABC):
    """An environment outside of Myxo. It must be made, used and closed in one event loop. ``name``: its name in the run. ``shown``: its
    address without credentials."""

    def __init__(self, name: str, shown: str) -> None:
        self.name, self.shown = name, shown
        self.label = f"environment {name} at {shown}"
        self.content_type: str | None = None  # The content type of the newest answer, where its transport has one

    @abstractmethod
    async def ask(self, verb: str, question: dict[str, Any] | None, deadline: float) -> object:
        """Sends one request and returns the decoded answer, unchecked.

        Args:
            question: plain values; None for a verb without any. deadline: seconds for everything, connecting included.

        Raises:
            EnvironmentAway: there is no connection, or it broke. The request may be sent again.
            EnvironmentFailed: the answer is an error status or a redirect, is too large, or cannot be decoded.
            DeadlineExceeded: the connection was made, but no complete answer came in time.
        """

    async def describe(self, deadline: float) -> Description:
        """Returns the environment's description, checked. Raises as `ask` does."""
        return read_description(await self.ask(DESCRIBE, None, deadline), self.label)

    async def score(self, request: ScoreRequest, deadline: float) -> list[Score]:
        """Returns one checked score a sample, in order. Raises as `ask` does."""
        return read_scores(await self.ask(SCORE, request.model_dump(), deadline), len(request.samples), self.label)

    async def reset(self, request: ResetRequest, deadline: float) -> OpenedSession:
        """Returns the session that was opened, checked. Raises as `ask` does."""
        return read_reset(await self.ask(RESET, request.model_dump(), deadline), self.label)

    async def step(self, request: StepRequest, deadline: float) -> TurnOutcome:
        """Returns what came of a turn, checked. Raises as `ask` does."""
        return read_step(await self.ask(STEP, request.model_dump(), deadline), self.label)

    async def end(self, request: CloseRequest, deadline: float) -> None:
        """Ends a session; its answer may be any map. Raises as `ask` does."""
        read_map(await self.ask(CLOSE, request.model_dump(), deadline), self.label)

    async def close(self) -> None:
        """Closes its own connections; the bus stays open."""
        return
