"""A gateway and its sessions with the accounts' own rights on both servers."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from myxo.launch.launcher import erase_from_bus
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.schema.messages import Sampling
from shared.sessions.session import Session, SessionEnded, Turn, TurnBegun, TurnEnded, new_key
from shared.sessions.session_store import SessionStore
from shared.store.payload_store import Store, StoreRefused
from tests.support.gateways import ready_gateway, started_gateway
from tests.support.guarded_servers import GuardedServers
from tests.support.qwen3_tokenizer import write_qwen3_tokenizer
from tests.support.run_config import run_config


@pytest.fixture
async def stores(guarded: GuardedServers) -> AsyncIterator[dict[str, SessionStore]]:
    opened = {role: Store(guarded.redis_url(role), guarded.run) for role in ("rollout", "gateway", "reward", "buffer", "trainer")}
    yield {role: SessionStore(store, guarded.run) for role, store in opened.items()}
    for store in opened.values():
        await store.close()


async def test_replicas_open_sessions_gateways_play_them_and_nobody_else_sees_them(stores: dict[str, SessionStore]) -> None:
    rollout, gateway = stores["rollout"], stores["gateway"]
    key, digest = new_key("s9")
    fields = {"group": "g1", "rollout": 0, "attempt": 0, "deadline": time.time() + 60}
    session = Session(id="s9", key_digest=digest, sampling=Sampling(temperature=1.0, max_new_tokens=8), **fields)
    for role in ("gateway", "reward", "buffer", "trainer"):
        with pytest.raises(StoreRefused):
            await stores[role].open(session)
    await rollout.open(session)
    for role in ("reward", "buffer", "trainer"):
        with pytest.raises(StoreRefused):
            await stores[role].find(key)
        with pytest.raises(StoreRefused):
            await stores[role].gateway_key()
    log, now = await gateway.find(key), time.time()
    await gateway.begin(log, TurnBegun(request="r1", holder="a", at=now, until=now + 9, rest=np.arange(2)))
    drawn = {"completion": np.arange(3), "log_probs": np.zeros(3, np.float32), "spans": ((0, 3, 0),), "finish": "stop"}
    assert isinstance(await gateway.append(log, TurnEnded(request="r1", holder="a", **drawn)), Turn)
    await gateway.end("s9", SessionEnded(at=now, reward=1.0))
    assert list((await rollout.read("s9")).turns) == ["r1"]
    assert await rollout.make_gateway_key() == await rollout.make_gateway_key() == await gateway.gateway_key()
    removal = ("UNLINK", rollout._names.session_key("s9"))
    for role in ("gateway", "reward"):
        with pytest.raises(StoreRefused):
            await stores[role]._command("removal", removal)
    await rollout._command("removal", removal)


@pytest.mark.extra
async def test_a_gateway_serves_with_its_own_account(guarded: GuardedServers, tmp_path: Path) -> None:
    """It reads the config, finds the replicas, and shows itself; the servers refuse it nothing that it asks."""
    model = write_qwen3_tokenizer(tmp_path / "model")
    inbox = Subjects(guarded.run).inbox("operator")
    bus = await Bus.connect(guarded.nats_url("operator"), "test", inbox=inbox)
    try:
        config = run_config(tmp_path, run={"name": guarded.run}, model={"hf_checkpoint": str(model)}, gateway={"gateway_replicas": 1})
        await runs.create(bus, config, guarded.redis_url("rollout"))
        with started_gateway(0, tmp_path, guarded.environment("gateway")) as process:
            assert (await ready_gateway(Registry(bus, guarded.run), 0, process)).startswith("http://127.0.0.1:")
            assert process.stop() == 0
            assert "ermission" not in process.words() and "registry_not_read" not in process.words(), process.words()
    finally:
        await erase_from_bus(bus, guarded.run)  # others find the servers without a run
        await bus.close()
