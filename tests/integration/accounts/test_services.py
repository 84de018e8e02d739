"""Services with the accounts' own rights on both servers: a gateway with sessions; an engine's nodes, whose secrets are theirs alone."""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from myxo.launch.launcher import erase_from_bus
from shared.accounts.permissions import rights_of
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.nodes.node_agent import NodeAgent
from shared.nodes.node_decisions import OwnRanks
from shared.runtime.errors import BadMessage
from shared.runtime.tasks import cancelled
from shared.schema.messages import Sampling
from shared.service.service_base import Service
from shared.sessions.session import Session, SessionEnded, Turn, TurnBegun, TurnEnded, new_key
from shared.sessions.session_store import SessionStore
from shared.store.payload_store import Store, StoreRefused
from tests.support import intended_rights as intended
from tests.support.gateways import ready_gateway, started_gateway
from tests.support.guarded_servers import GuardedServers
from tests.support.qwen3_tokenizer import write_qwen3_tokenizer
from tests.support.run_config import run_config, write_jsonl
from tests.support.waiting import until


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


RUN = "guarded"
NAMES = Subjects(RUN)
JOB = NAMES.engine_nodes("rollout-0")
OWN = [secrets.token_hex(16) for _ in range(2)]


class Ranks:
    """Ranks that compute nothing."""

    def __init__(self) -> None:
        self.own = OwnRanks()

    def begin(self, number: int, address: str, port: int) -> None:
        self.own = OwnRanks(number, port or 4711)

    def look(self) -> OwnRanks:
        return self.own

    def ask_to_stop(self) -> None:
        self.kill("")

    def kill(self, reason: str) -> None:
        self.own = OwnRanks(0, ended=self.own.running)


@pytest.fixture
async def engine(guarded: GuardedServers, tmp_path: Path) -> AsyncIterator[list[NodeAgent]]:
    """Both nodes of an engine, in an attempt."""
    operator = await Bus.connect(guarded.nats_url("operator"), "test", inbox=NAMES.inbox("operator"))
    write_jsonl(tmp_path / "prompts.jsonl")
    config = run_config(tmp_path, run={"name": RUN}, reward={"rm_type": "exact"})
    await runs.create(operator, config, None)
    await operator.js.add_stream(name=NAMES.commands_stream, subjects=[NAMES.command(">")])  # of `myxo serve` alone
    async with contextlib.AsyncExitStack() as stack:
        agents, work = [], []
        for rank, secret in enumerate(OWN):
            bus = await Bus.connect(guarded.nats_url("rollout"), "test", inbox=NAMES.inbox("rollout"))
            stack.push_async_callback(bus.close)
            service = Service("rollout", f"rollout-0-node-{rank}", RUN, bus, config, guarded.redis_url("rollout"))
            agents.append(NodeAgent(service, JOB, rank, 2, 60.0, Ranks(), command_port=lambda: 7000, secret=secret))
            work.append(asyncio.create_task(agents[-1].run()))
        await until(lambda: _begun(operator), "an attempt", 30)
        yield agents
        await cancelled(work)
    await erase_from_bus(operator, RUN)
    await operator.close()


async def _begun(operator: Bus) -> bool:
    return await operator.get(NAMES.leases_bucket, NAMES.attempt(JOB)) is not None


async def test_the_nodes_of_an_engine_read_each_others_secrets_and_no_other_account_finds_them_anywhere(
    guarded: GuardedServers, engine: list[NodeAgent]
) -> None:
    assert [await engine[1].secret_of(0), await engine[0].secret_of(1)] == OWN
    for role in intended.ROLES:
        if role in ("rollout", "environment"):
            continue
        bus = await Bus.connect(guarded.nats_url(role), "test", inbox=NAMES.inbox(role))
        try:
            read = await everything_readable(bus, role)
        finally:
            await bus.close()
        assert read, role
        assert not [secret for secret in OWN if secret.encode() in read], f"{role} reads an engine's secret"


async def everything_readable(bus: Bus, role: str) -> bytes:
    """All messages of all streams that the account can get, one after another, and the last of each key."""
    found = b""
    for stream in intended.every_stream(RUN):
        get = f"$JS.API.STREAM.MSG.GET.{stream}"
        if not intended.allowed(rights_of(role, RUN).bus.publish, get):
            continue
        info = await bus.js.stream_info(stream)
        for sequence in range(1, info.state.last_seq + 1):
            with contextlib.suppress(Exception):  # of one that was replaced
                found += (await bus.js.get_msg(stream, sequence)).data or b""
        found += json.dumps(info.config.as_dict()).encode()
    return found


async def test_a_secret_that_is_none_is_an_error_that_says_so(guarded: GuardedServers, engine: list[NodeAgent]) -> None:
    bus = await Bus.connect(guarded.nats_url("rollout"), "test", inbox=NAMES.inbox("rollout"))
    try:
        for garbage in (b"", b"\xff\xfe", b"{}", b"\x93\x01\x02\x03", b"a" * 32):
            await bus.put(NAMES.secrets_bucket, NAMES.node_lease(JOB, 0), garbage)
            with pytest.raises(BadMessage):
                await engine[1].secret_of(0)
    finally:
        await bus.close()
