"""The list of sessions in flight, over a real store: who plays, how far they are, and that those that have ended are gone from it."""

import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from services.console.run_source import RunSource
from shared.bus import runs
from shared.bus.connection import Bus
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.schema.messages import Sampling
from shared.sessions.session import Session, SessionEnded, SessionLog, TurnBegun, TurnEnded, TurnExtended, new_key
from shared.sessions.session_store import SessionStore
from shared.store.payload_store import Store
from tests.integration.console.test_run_api import answer, served
from tests.support.run_config import run_config

GATEWAY = "gateway-0.abcd"


async def opened(sessions: SessionStore, number: int) -> SessionLog:
    name = f"g{number:08d}.1.2.{uuid.uuid4().hex}"
    now = time.time()
    session = Session(
        id=name, group=f"g{number:08d}", rollout=2, attempt=1, key_digest=new_key(name)[1], deadline=now + 600, opened=now,
        replica="rollout-7", sampling=Sampling(temperature=1.0, max_new_tokens=8),
    )  # fmt: skip
    await sessions.open(session)
    return await sessions.read(name)


def drawn(tokens: int, version: int) -> dict[str, Any]:
    return {
        "completion": np.arange(tokens, dtype=np.int32),
        "log_probs": np.zeros(tokens, np.float32),
        "spans": ((0, tokens, version),),
        "replica": "rollout-3",
        "holder": GATEWAY,
    }


async def begun(sessions: SessionStore, log: SessionLog, request: str, prompt: int, **more: Any) -> None:
    now = time.time()
    rest = np.arange(prompt, dtype=np.int32)
    await sessions.begin(log, TurnBegun(request=request, holder=GATEWAY, at=now, until=now + 60, rest=rest, **more))


async def test_sessions_are_listed_while_they_are_played(nats: EmbeddedNats, valkey: EmbeddedValkey, tmp_path: Path) -> None:
    run = f"sessions-{uuid.uuid4().hex[:8]}"
    config = run_config(tmp_path, run={"name": run}, rollout={"agent": "examples.agents.openai_calculator:run"})
    bus, store = await Bus.connect(nats.url, "test"), Store(valkey.url, run)
    try:
        await runs.create(bus, config, valkey.url)
        sessions = SessionStore(store, run)
        logs = [await opened(sessions, number) for number in range(4)]
        await sessions.make_gateway_key()
        await begun(sessions, logs[0], "one", 10)
        await sessions.append(logs[0], TurnEnded(request="one", finish="stop", **drawn(5, 1)))
        await begun(sessions, logs[0], "two", 3, parent="one", shared=15)
        await sessions.extend(logs[0], TurnExtended(request="two", start=0, until=time.time() + 60, **drawn(4, 2)))
        await sessions.end(logs[2].session.id, SessionEnded(at=time.time(), reward=1.0))
        async with served(RunSource(run, nats.url, valkey.url, None)) as get:
            found = await answer(get, "samples/sessions", there=lambda page: page["total"] == 3)
            assert [row["group"] for row in found["sessions"]] == ["g00000000", "g00000001", "g00000003"] and found["agents"]
            first, second, _ = found["sessions"]
            figures = ("turns", "drawing", "tokens", "context", "oldest", "newest", "gateway", "engine", "replica", "rollout", "attempt")
            assert [first[name] for name in figures] == [1, 1, 9, 22, 1, 2, "gateway-0", "rollout-3", "rollout-7", 2, 1]
            assert first["opened"] <= first["asked"] <= found["now"] < first["deadline"]
            assert (second["turns"], second["drawing"], second["asked"], second["oldest"]) == (0, 0, None, None)
            status, page = await get("samples/sessions", ("offset", 2), ("limit", 2))
            assert status == 200 and [row["group"] for row in page["sessions"]] == ["g00000003"]
            await sessions.append(logs[0], TurnEnded(request="two", finish="length", **drawn(6, 2)))
            await sessions.end(logs[1].session.id, SessionEnded(at=time.time()))
            await opened(sessions, 9)
            wanted = ["g00000000", "g00000003", "g00000009"]
            later = await answer(get, "samples/sessions", there=lambda page: [row["group"] for row in page["sessions"]] == wanted)
            assert [later["sessions"][0][name] for name in ("turns", "drawing", "tokens", "context")] == [2, 0, 11, 24]
    finally:
        await store.close()
        await bus.close()
