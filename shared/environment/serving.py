"""Serves an environment that is a Python object, over HTTP or on a run's bus: ``myxo env run module:Class``.

The object has ``score(request)``, or ``reset(request)`` and ``step(state, message, request)``, plain or async. What the protocol asks of an
environment that steps is done here: sessions with a lifetime, a repeated ``reset`` or ``step`` that is answered as the first one was, turns
in order, no step after the end.
"""

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgpack
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError

from shared.bus.subjects import Subjects
from shared.environment.protocol import CLOSE, DESCRIBE, OF_PROMPT, PROTOCOL, RESET, SCORE, STEP
from shared.runtime.errors import BadMessage, ConfigError
from shared.runtime.tasks import called
from shared.schema import codec

# Seconds after which a session that no one steps is forgotten, and the most sessions at once; of more, the oldest go
SESSION_TTL, MOST_SESSIONS = 3600.0, 10_000
MOST_OPENING = 256  # Episodes whose resets are remembered beyond twice the sessions that are open


class EpisodeRefused(Exception):
    """A request that the environment does not take; the text is its answer's ``error``."""


@dataclass
class _Session:
    """``state``: the object's own, of this episode. ``answer``: to the newest turn."""

    id: str
    state: Any
    opened: dict[str, Any]
    touched: float
    turns: int = 0
    answer: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ServedEnvironment:
    """The verbs of one object. ``name``: for people. ``made``: the object. ``timeout``: the most seconds that one of its calls may need."""

    def __init__(self, name: str, made: Any, timeout: float = 30.0, session_ttl: float = SESSION_TTL) -> None:
        self.name, self._made, self._timeout, self._ttl = name, made, timeout, session_ttl
        has_step = all(callable(getattr(made, verb, None)) for verb in (RESET, STEP))
        self.verbs = [*([SCORE] if callable(getattr(made, SCORE, None)) else []), *([RESET, STEP, CLOSE] if has_step else [])]
        if not self.verbs:
            raise ValueError(f"{type(made).__name__} has neither score, nor reset and step")
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._opening: dict[str, asyncio.Task[_Session]] = {}

    async def answer(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request. Raises EpisodeRefused, and what the object raises."""
        if verb == DESCRIBE:
            own = {"session_ttl": self._ttl} if RESET in self.verbs else {}
            return {"protocol": PROTOCOL, "name": self.name, "verbs": self.verbs, "timeout": self._timeout, **own}
        if verb not in self.verbs:
            raise EpisodeRefused(f"no such verb: {verb}; there are describe, {', '.join(self.verbs)}")
        return await {SCORE: self._score, RESET: self._reset, STEP: self._step, CLOSE: self._close}[verb](request)

    async def _score(self, request: dict[str, Any]) -> dict[str, Any]:
        shared = {name: request[name] for name in OF_PROMPT if name in request}
        samples = [{**shared, **sample} for sample in request["samples"]]
        rewards = await called(self._made.score, {**request, "samples": samples})
        return {"rewards": [_number(one) for one in rewards] if isinstance(rewards, list | tuple) else rewards}

    async def _reset(self, request: dict[str, Any]) -> dict[str, Any]:
        self._forget()
        episode = _text(request, "episode")
        known = self._opening.get(episode)
        if known is None or (known.done() and known.result().id not in self._sessions):
            self._opening[episode] = asyncio.ensure_future(self._opened(request))
        try:
            session = await asyncio.shield(self._opening[episode])
        except Exception:
            self._opening.pop(episode, None)
            raise
        return session.opened

    async def _opened(self, request: dict[str, Any]) -> _Session:
        state, messages, *tools = await called(self._made.reset, request)
        name = secrets.token_urlsafe(16)
        opened = {"session": name, "messages": messages, **({"tools": tools[0]} if tools else {})}
        session = self._sessions[name] = _Session(name, state, opened, time.monotonic())
        return session

    async def _step(self, request: dict[str, Any]) -> dict[str, Any]:
        session, turn = self._session(request), request.get("turn")
        async with session.lock:
            if turn == session.turns - 1:  # a repeat: the answer was lost
                return session.answer
            if session.done:
                raise EpisodeRefused(f"session {session.id} is done: its last turn was {session.turns - 1}")
            if turn != session.turns:
                raise EpisodeRefused(f"turn is {turn!r}; expected {session.turns}, the next one, or the one before it again")
            messages, reward, done = await called(self._made.step, session.state, request.get("message") or {}, request)
            session.answer = {"messages": messages, "done": bool(done), **({} if reward is None else {"reward": _number(reward)})}
            session.turns, session.done, session.touched = session.turns + 1, bool(done), time.monotonic()
            self._sessions.move_to_end(session.id)
            return session.answer

    async def _close(self, request: dict[str, Any]) -> dict[str, Any]:
        self._sessions.pop(_text(request, "session"), None)
        return {}

    def _session(self, request: dict[str, Any]) -> _Session:
        self._forget()
        name = _text(request, "session")
        if name not in self._sessions:
            raise EpisodeRefused(f"no session {name[:80]!r}: it was closed, or forgotten after {self._ttl:g} s")
        return self._sessions[name]

    def _forget(self) -> None:
        late = time.monotonic() - self._ttl
        while self._sessions and (len(self._sessions) > MOST_SESSIONS or next(iter(self._sessions.values())).touched < late):
            self._sessions.popitem(last=False)
        if len(self._opening) < 2 * len(self._sessions) + MOST_OPENING:
            return
        for episode, opening in list(self._opening.items()):
            if opening.done() and (opening.cancelled() or opening.exception() or opening.result().id not in self._sessions):
                del self._opening[episode]


def _text(request: dict[str, Any], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str) or not value:
        raise EpisodeRefused(f"{name} is {value!r:.80}; expected text")
    return value


def _number(reward: Any) -> Any:
    if isinstance(reward, dict):
        return {name: _number(value) for name, value in reward.items()}
    return reward.item() if getattr(reward, "size", None) == 1 or (hasattr(reward, "numel") and reward.numel() == 1) else reward


def plain(value: Any) -> Any:
    """Returns what stands in an answer for what does not travel: plain numbers for a library's and its arrays, else text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


async def serve_on_bus(environment: ServedEnvironment, connection: Client, run: str, name: str) -> None:
    """Subscribes to the environment's subjects, in a queue group of its name: instances share the work. Raises ConfigError where it steps
    and another is there already: sessions are in one process."""
    subjects = Subjects(run)
    with contextlib.suppress(NoRespondersError):
        if RESET in environment.verbs:
            with contextlib.suppress(TimeoutError):  # it is slow, but there, or its host died minutes ago
                await connection.request(subjects.environment(name, DESCRIBE), codec.pack({}), timeout=5.0)
            told = "is there already, or was on a host that died minutes ago, and sessions of what steps are in one process"
            raise ConfigError("--nats", name, f"{told}: use another name for each")
    running: set[asyncio.Task[None]] = set()
    for verb in (DESCRIBE, *environment.verbs):

        async def on_request(message: Msg, verb: str = verb) -> None:  # a long call must not hold up the next one
            task = asyncio.create_task(_respond(environment, verb, message))
            running.add(task)
            task.add_done_callback(running.discard)

        await connection.subscribe(subjects.environment(name, verb), queue=name, cb=on_request)


async def _respond(environment: ServedEnvironment, verb: str, message: Msg) -> None:
    try:
        question = codec.unpack(message.data)
        if not isinstance(question, dict):
            raise BadMessage("expected a map")
        await message.respond(msgpack.packb(await environment.answer(verb, question), default=plain, unicode_errors="backslashreplace"))
    except Exception as error:  # of the user's code, too, and where its answer does not go into a message
        await message.respond(codec.pack({"error": f"{type(error).__name__}: {error}"}))
