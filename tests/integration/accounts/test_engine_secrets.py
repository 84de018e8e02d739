"""The secrets of an engine over several nodes: its nodes exchange them over the bus, and no other account than theirs can read them."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from myxo.launch.launcher import erase_from_bus
from shared.accounts.permissions import rights_of
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.nodes.node_agent import NodeAgent
from shared.nodes.node_decisions import OwnRanks
from shared.runtime.errors import BadMessage
from shared.runtime.tasks import cancelled
from shared.service.service_base import Service
from tests.support import intended_rights as intended
from tests.support.guarded_servers import GuardedServers
from tests.support.run_config import run_config, write_jsonl
from tests.support.waiting import until

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
