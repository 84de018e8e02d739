"""Agents for ``rollout.agent`` that write their turns into the session themselves, as a gateway does: what base URL and key stand for here
is the store, and the session in it. Good ones, and ones that misbehave.

They run in processes of their own; what they note in the directory of the variable `DIRECTORY` is for the tests to read.
"""

import asyncio
import base64
import io
import json
import os
import random
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shared.sessions.session import SessionEnded, SessionLog, TurnBegun, TurnEnded
from shared.sessions.session_store import SessionStore
from shared.store.payload_store import Store

DIRECTORY = "AGENT_DIRECTORY"

ASKED, SAID, TOOL, SAID_THEN = [5, 6, 7], [10, 11], [20, 21, 22], [12, 13, 14]
"""The tokens of a prompt, a first turn, a tool's answer and a second turn."""

LONG_S = 600.0


class Played:
    """A session that is being played."""

    def __init__(self, store: SessionStore, log: SessionLog) -> None:
        self._store, self.log = store, log

    async def turn(self, prompt: list[int], completion: list[int], version: int = 0, parent: str | None = None) -> str:
        """Draws a turn. Returns its request id."""
        request, shared = uuid.uuid4().hex, 0 if parent is None else len(self.log.turns[parent].tokens)
        names = {"request": request, "holder": "test"}
        begun = TurnBegun(**names, at=time.time(), until=time.time() + 60, parent=parent, shared=shared, rest=np.array(prompt, np.int32))
        await self._store.begin(self.log, begun)
        drawn = TurnEnded(
            **names,
            completion=np.array(completion, np.int32),
            log_probs=np.full(len(completion), -0.5, np.float32),
            spans=((0, len(completion), version),),
            finish="stop",
        )
        await self._store.append(self.log, drawn)
        return request

    async def end(self, reward: float) -> None:
        await self._store.end(self.log.session.id, SessionEnded(at=time.time(), reward=reward))


@asynccontextmanager
async def played(base_url: str, api_key: str) -> AsyncIterator[Played]:
    url, run = base_url.rsplit("#", 1)
    store = Store(url, run)
    try:
        sessions = SessionStore(store, run)
        yield Played(sessions, await sessions.find(api_key))
    finally:
        await store.close()


def note(data: dict[str, Any], base_url: str = "", api_key: str = "") -> int:
    """Notes a call. Returns how many there were of this rollout before it."""
    directory = Path(os.environ[DIRECTORY])
    before = sum((call["group"], call["rollout"]) == (data["group"], data["rollout"]) for call in calls(directory))
    entry = directory / f"call-{time.monotonic_ns():020d}-{uuid.uuid4().hex}.json"
    entry.with_suffix(".part").write_text(json.dumps({**data, "base_url": base_url, "api_key": api_key, "pid": os.getpid()}))
    entry.with_suffix(".part").rename(entry)
    return before


def calls(directory: Path) -> list[dict[str, Any]]:
    """What agents were called with, in order."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob("call-*.json"))]


async def two_turns(data: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Two turns with a tool between them, the second under version 1."""
    note(data, base_url, api_key)
    async with played(base_url, api_key) as session:
        first = await session.turn(ASKED, SAID)
        await session.turn(TOOL, SAID_THEN, version=1, parent=first)
    return {"reward": float(data["rollout"]), "format": 0.5}


async def one_turn(data: dict[str, Any], base_url: str, api_key: str) -> float:
    note(data, base_url, api_key)
    async with played(base_url, api_key) as session:
        await session.turn(ASKED, SAID)
    return 1.0


def plain(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """A function that is not async."""
    return asyncio.run(one_turn(data, base_url, api_key))


async def unscored(data: dict[str, Any], base_url: str, api_key: str) -> None:
    await one_turn(data, base_url, api_key)


async def forks(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Two answers to one prompt, and a conversation of its own."""
    async with played(base_url, api_key) as session:
        first = await session.turn(ASKED, SAID)
        await session.turn(TOOL, SAID_THEN, parent=first)
        await session.turn([30], [15], parent=first)
        await session.turn([40, 41], [16])
    return 2.0


async def unlucky(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Raises at the first call of each rollout, in the middle of its session."""
    before = note(data)
    async with played(base_url, api_key) as session:
        await session.turn(ASKED, SAID)
        if not before:
            raise RuntimeError("the tool is away")
    return 1.0


async def bad(data: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Does of the metadata's ``bad`` what it says, for the rollouts that it names; the others are good."""
    kind, of = data["metadata"]["bad"]
    if data["rollout"] not in of:
        return await one_turn(data, base_url, api_key)
    note(data)
    if kind == "silent":
        return 1.0
    async with played(base_url, api_key) as session:
        await session.turn(ASKED, SAID)
        if kind == "hangs":
            await asyncio.sleep(LONG_S)
        if kind == "blocks":
            time.sleep(LONG_S)
        if kind == "leaves":
            os._exit(3)
        if kind == "crashes":
            os.abort()
    if kind == "unspeakable":
        raise Unspeakable
    return {"nan": float("nan"), "text": "good", "unnamed": {"style": 1.0}, "raises": None}[kind] if kind != "raises" else 1 / 0


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has no words")


async def waits(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Rollout 0 ends; the others wait for their end, and note it."""
    if data["rollout"] == 0:
        return await one_turn(data, base_url, api_key)
    async with played(base_url, api_key) as session:
        await session.turn(ASKED, SAID)
        note(data, base_url, api_key)
        try:
            await asyncio.sleep(LONG_S)
        finally:
            (Path(os.environ[DIRECTORY]) / f"cancelled-{data['rollout']}").touch()
    return 0.0


async def until_told(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Ends once there is a file ``go-on``."""
    reward = await one_turn(data, base_url, api_key)
    while not (Path(os.environ[DIRECTORY]) / "go-on").exists():
        await asyncio.sleep(0.05)
    return reward


async def ends_itself(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Ends its session with a reward, as a client may at the gateway, and then returns another."""
    async with played(base_url, api_key) as session:
        await session.turn(ASKED, SAID)
        await session.end(0.25)
    return 0.75


async def named(data: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Plays as the function does that the metadata names."""
    return await globals()[data["metadata"]["as"]](data, base_url, api_key)


async def opens(base_url: str, api_key: str) -> bool:
    """Whether turns may still be drawn under the key."""
    async with played(base_url, api_key) as session:
        return session.log.ended is None


def two_arguments(data: dict[str, Any], base_url: str) -> float:
    return 0.0


def client_of(base_url: str, api_key: str, **options: Any) -> Any:
    """OpenAI's client."""
    from openai import AsyncOpenAI  # half a second to import, for every process that plays: only where it is needed

    return AsyncOpenAI(base_url=base_url, api_key=api_key, **options)


async def over_a_push(data: dict[str, Any], base_url: str, api_key: str) -> None:
    """Over the gateway: a turn, then, once `go_on` is there, another one."""
    async with client_of(base_url, api_key, max_retries=0) as client:
        messages = list(data["messages"])
        for _ in range(2):
            completion = await client.chat.completions.create(model=data["model"], messages=messages)
            messages += [completion.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and 3+3?"}]
            note(data, base_url, api_key)
            while not (Path(os.environ[DIRECTORY]) / "go_on").exists():
                await asyncio.sleep(0.05)


async def duel(data: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Two roles play against each other, each by its own key; the left one wins rollout 0. What it gives says the metadata's ``duel``."""
    note(data, base_url, api_key)
    assert next(iter(data["roles"].values())) == api_key
    for role, key in data["roles"].items():
        async with played(base_url, key) as session:
            first = await session.turn(ASKED, SAID)
            if role == "left":
                await session.turn(TOOL, SAID_THEN, parent=first)
            elif data["metadata"].get("duel") == "ends":
                await session.end(0.5)
    won = 1.0 if data["rollout"] == 0 else -1.0
    by_role = {"left": won, "right": {"reward": -won, "moves": 1.0}}
    return {"shared": won, "half": {"left": won}, "scored": {"left": won, "right": None}}.get(data["metadata"].get("duel"), by_role)


async def three_turns(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Over the gateway: three turns, each by weights that are no older than those of the turn before. One in ten is gone in the middle."""
    async with client_of(base_url, api_key, max_retries=40) as client:
        messages, newest, leaves = list(data["messages"]), 0, random.random() < 0.1
        for _ in range(3):
            asked = client.chat.completions.create(model=data["model"], messages=messages, extra_body={"min_version": newest})
            if leaves and len(messages) > 1:
                await asyncio.wait([asyncio.ensure_future(asked)], timeout=0.3)
                raise RuntimeError("gone")
            completion = await asked
            newest = completion.model_extra["weight_versions"]["newest"]
            messages += [completion.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and 3+3?"}]
    return float(len(completion.choices[0].message.content or "") % 2)


OUTCOMES, TURN_REWARDS = [0.25, 1.0, 0.0], [[0.5], [1.0, -1.0], [None, 2.0, 0.25]]
"""The reward of each rollout of `rewards_its_turns`, and those of its turns; None: none is posted."""


async def rewards_its_turns(data: dict[str, Any], base_url: str, api_key: str) -> float:
    async with client_of(base_url, api_key) as client:
        messages: list[Any] = data["messages"]
        for number, reward in enumerate(TURN_REWARDS[data["rollout"]]):
            answer = await client.chat.completions.create(model=data["model"], messages=messages)
            if reward is not None:
                turn = answer.id if number % 2 else number  # by its id, or by its number
                await client.post("/session/reward", body={"turn": turn, "reward": reward}, cast_to=object)
            again = {"role": "user", "content": "Again."}
            messages = [*messages, answer.choices[0].message.model_dump(exclude_none=True), again]
    return OUTCOMES[data["rollout"]]


async def zooms(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Shows the model the middle of the prompt's picture, or sound, when it calls for that, twice at most; asks on where it does not."""
    messages = list(data["messages"])
    async with client_of(base_url, api_key, max_retries=8) as client:
        for _ in range(3):
            completion = await client.chat.completions.create(model=data["model"], messages=messages, tools=ZOOM)
            answer = completion.choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            [shown] = [middle_of(part) for part in messages[0]["content"] if part["type"] != "text"]
            calls = [{"role": "tool", "tool_call_id": call.id, "content": [shown]} for call in answer.tool_calls or ()]
            messages += calls or [{"role": "user", "content": [{"type": "text", "text": "look"}, shown]}]
    return float(len(messages))


ZOOM: Any = [{"type": "function", "function": {"name": "zoom", "parameters": {"type": "object", "properties": {}}}}]


def middle_of(part: dict[str, Any]) -> dict[str, Any]:
    """The middle of a picture or of a sound, as a part of a message, too."""
    import soundfile
    from PIL import Image

    if part["type"] == "input_audio":
        waves, rate = soundfile.read(io.BytesIO(base64.b64decode(part["input_audio"]["data"])))
        soundfile.write(made := io.BytesIO(), waves[len(waves) // 4 : -(len(waves) // 4)], rate, format="WAV")
        return {"type": "input_audio", "input_audio": {"data": base64.b64encode(made.getvalue()).decode(), "format": "wav"}}
    picture = Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))
    width, height = picture.size
    picture.crop((width // 4, height // 4, width - width // 4, height - height // 4)).save(made := io.BytesIO(), "PNG")
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(made.getvalue()).decode()}}
