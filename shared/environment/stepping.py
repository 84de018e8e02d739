"""Environments that step: the requests of an episode and their valid answers, part of protocol version 1. Pure.

``reset`` opens a session for one rollout, ``step`` takes the model's message and gives what it sees next, ``close`` ends the session. A
request may come twice, after a broken connection: an episode's id names its ``reset``, a session and a turn name a ``step``, and a repeat
is answered as the first one was.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from shared.environment.protocol import MAX_NAME, PROTOCOL, EnvironmentFailed, read_map, read_score, shown
from shared.schema.sample import Score

RESET, STEP, CLOSE = "reset", "step", "close"

MAX_MESSAGES, MAX_TOOLS = 64, 128
"""The most messages, and tools, of one answer."""

MAX_SESSION = 128
"""The most characters of a session's id."""

ROLES = ("system", "user", "tool")
"""Who an environment may speak as: what the model says is the model's."""

Reply = dict[str, Any]
"""A chat message: ``role``, ``content`` and what else a chat template reads of it, such as ``tool_call_id``."""


class ResetRequest(BaseModel):
    """Opens a session for one rollout of a prompt. ``episode`` names the request: the same one opens no second session.

    ``rollout``: which of the group's rollouts it is, from 0. ``evaluation``: the prompt is held out.
    """

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
    """Nobody steps this session any more. ``done``: the environment has said so itself."""

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
    """What came of a turn, checked."""

    messages: list[Reply]
    reward: Score | None
    done: bool


def read_reset(answer: object, environment: str) -> OpenedSession:
    """Checks the answer to ``reset``. Raises EnvironmentFailed."""
    fields = read_map(answer, environment)
    session = fields.get("session")
    if not isinstance(session, str) or not 0 < len(session) <= MAX_SESSION or not session.isprintable():
        found = f"session is {shown(session)}" if "session" in fields else "session is missing"
        raise EnvironmentFailed(environment, f"{found}; expected 1 to {MAX_SESSION} printable characters")
    tools = fields.get("tools") or []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS or not all(isinstance(tool, dict) for tool in tools):
        raise EnvironmentFailed(environment, f"tools is {shown(tools)}; expected a list of at most {MAX_TOOLS} objects")
    return OpenedSession(session, _messages(fields, environment), tools)


def read_step(answer: object, environment: str) -> TurnOutcome:
    """Checks the answer to ``step``. Raises EnvironmentFailed."""
    fields = read_map(answer, environment)
    done = fields.get("done")
    if not isinstance(done, bool):
        found = f"done is {shown(done)}" if "done" in fields else "done is missing"
        raise EnvironmentFailed(environment, f"{found}; expected true or false")
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
    if message.get("role") not in ROLES:
        raise EnvironmentFailed(environment, f"{path}.role is {shown(message.get('role'))}; expected one of {', '.join(ROLES)}")
    if not isinstance(message.get("content"), str):
        raise EnvironmentFailed(environment, f"{path}.content is {shown(message.get('content'))}; expected text")
    if not all(isinstance(name, str) and len(name) <= MAX_NAME for name in message):
        raise EnvironmentFailed(environment, f"{path} has names that are no text of at most {MAX_NAME} characters")
    return dict(message)
