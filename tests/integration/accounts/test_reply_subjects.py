"""What the server publishes for a client, to a subject that the client names: no account reaches one that it may not publish to."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig

from myxo.launch.launcher import erase_from_bus
from shared.accounts.permissions import rights_of
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.schema.messages import Accepted, Durable
from tests.support import intended_rights as intended
from tests.support.guarded_servers import GuardedServers
from tests.support.run_config import run_config, write_jsonl

RUN = "guarded"
NAMES = Subjects(RUN)
EVIL = b"evil"
SERVED = {
    NAMES.durable: "buffer",
    NAMES.event("weights", "live"): "buffer",
    NAMES.replica_weights("rollout-0", "begin"): "rollout",
    NAMES.environment("math", "score"): "environment",
}
"""Subjects on which services act, and the role that listens there."""
WRITING = (
    NAMES.ledger("groups_admitted"),
    NAMES.task("train"),
    NAMES.scored("reward"),
    NAMES.event("trainer", "step"),
    f"$KV.{NAMES.config_bucket}.config",
    f"$KV.{NAMES.weights_bucket}.live",
    f"$KV.{NAMES.leases_bucket}.buffer",
    f"$KV.{NAMES.services_bucket}.rollout.rollout-0",
    f"$JS.API.STREAM.PURGE.{NAMES.ledger_stream}",
)
"""Subjects that change what is stored."""
WORST = ("rollout", "reward", "gateway", "environment", "console")
"""Those that run on others' machines, or that others speak to."""
ATTACKERS = [pytest.param(role, marks=() if role in WORST else pytest.mark.extra) for role in intended.ROLES if role != "operator"]


def requests(role: str) -> list[tuple[str, bytes]]:
    """Every request of JetStream's that the role may send, with a body by which the answer holds a stored message."""
    found = []
    for pattern in rights_of(role, RUN).bus.publish:
        subject = pattern.replace("*", "exact")
        stream = subject.rsplit(".", 1)[1] if "MSG.NEXT" not in subject else ""
        if not subject.startswith("$JS.API."):
            continue
        body: dict[str, object] = {"seq": 1} if stream else {"batch": 1, "expires": 200_000_000}
        found.append((subject, json.dumps(body).encode()))
    return found


@pytest.fixture
async def operator(guarded: GuardedServers, tmp_path: Path) -> AsyncIterator[Bus]:
    """The operator's connection to a run of which every stream and bucket holds a message of an attacker's choice."""
    bus = await Bus.connect(guarded.nats_url("operator"), "test", inbox=NAMES.inbox("operator"))
    write_jsonl(tmp_path / "prompts.jsonl")
    await runs.create(bus, run_config(tmp_path, run={"name": RUN}, reward={"rm_type": "exact"}), None)
    await bus.js.add_stream(name=NAMES.commands_stream, subjects=[NAMES.command(">")])  # of `myxo serve` alone
    for subject in WRITING[:-1]:
        await bus.js.publish(subject.replace(".config", ".phase") if "-config" in subject else subject, EVIL)
    await bus.js.publish(NAMES.generated("exact"), EVIL)
    yield bus
    await erase_from_bus(bus, RUN)
    await bus.close()


async def stored(bus: Bus) -> dict[str, int]:
    return {stream: (await bus.js.stream_info(stream)).state.last_seq for stream in intended.every_stream(RUN)} | {
        "messages of the ledger": (await bus.js.stream_info(NAMES.ledger_stream)).state.messages
    }


@pytest.mark.parametrize("role", ATTACKERS)
async def test_no_reply_subject_writes_for_an_account_or_speaks_to_a_service(guarded: GuardedServers, operator: Bus, role: str) -> None:
    before = await stored(operator)
    heard: list[tuple[str, bytes]] = []
    clients: list[Client] = []

    async def on_message(message: Msg) -> None:
        heard.append((message.subject, message.data))

    for subject, listener in SERVED.items():
        if listener != role:
            clients.append(await connected(guarded, listener))
            await clients[-1].subscribe(subject, cb=on_message)
            await clients[-1].flush()
    attacker = await connected(guarded, role)
    clients.append(attacker)
    try:
        asked, own = requests(role), rights_of(role, RUN).bus.publish
        assert asked
        replies = [subject for subject in (*WRITING, *SERVED) if not intended.allowed(own, subject)]
        for subject, body in asked:
            for reply in replies:
                await attacker.publish(subject, body, reply=reply)
        await attacker.flush()
        await operator.js.stream_info(NAMES.ledger_stream)  # behind them in the server's queue
        await asyncio.sleep(0.5)  # what must not come has no sign of its own
        assert await stored(operator) == before
        assert heard == []
    finally:
        for client in clients:
            await client.close()


async def connected(guarded: GuardedServers, role: str) -> Client:
    client = Client()

    async def on_error(_: Exception) -> None:
        pass  # refusals are what the other tests are about

    await client.connect(guarded.nats_url(role), error_cb=on_error, allow_reconnect=False)
    return client


@pytest.mark.parametrize("role", ATTACKERS)
async def test_no_account_makes_a_consumer_or_a_stream_that_delivers_to_a_subject_of_its_choice(
    guarded: GuardedServers, operator: Bus, role: str
) -> None:
    before = await stored(operator)
    attacker = await connected(guarded, role)
    try:
        config = ConsumerConfig(name="evil", deliver_subject=f"$KV.{NAMES.config_bucket}.config", ack_policy=AckPolicy.NONE).as_dict()
        for stream in intended.every_stream(RUN):
            body = json.dumps({"stream_name": stream, "config": config}).encode()
            for subject in (f"CREATE.{stream}.evil", f"CREATE.{stream}", f"DURABLE.CREATE.{stream}.evil"):
                await attacker.publish(f"$JS.API.CONSUMER.{subject}", body)
        await attacker.publish("$JS.API.STREAM.CREATE.evil", json.dumps({"name": "evil", "sources": [{"name": stream}]}).encode())
        await attacker.flush()
        await asyncio.sleep(0.3)
        assert await stored(operator) == before
        assert "evil" not in {info.config.name for info in await operator.js.streams_info()}
    finally:
        await attacker.close()


async def test_a_request_that_a_stream_delivered_is_dropped(guarded: GuardedServers, operator: Bus) -> None:
    """Replicas share an account: one may have a stored message delivered to the subject of another, which does not take it for an order."""
    orders: list[Durable] = []
    rollout = await Bus.connect(guarded.nats_url("rollout"), "test", inbox=NAMES.inbox("rollout"))
    attacker = await connected(guarded, "rollout")
    try:

        async def handle(order: Durable) -> Accepted:
            orders.append(order)
            return Accepted()

        subject = NAMES.replica_weights("rollout-0", "begin")
        await rollout.serve(subject, Durable, handle)
        await operator.js.publish(NAMES.task("train"), Durable(steps=666).encode())
        task = f"{NAMES.task_stream}.train"
        await attacker.publish(f"$JS.API.CONSUMER.MSG.NEXT.{task}", b'{"batch": 5, "expires": 1000000000}', reply=subject)
        trainer = await Bus.connect(guarded.nats_url("trainer"), "test", inbox=NAMES.inbox("trainer"))
        await asyncio.sleep(0.5)
        assert await trainer.request(subject, Durable(steps=1), Accepted, deadline=30, awaited_from="rollout-0")
        await trainer.close()
        assert [order.steps for order in orders] == [1]
    finally:
        await attacker.close()
        await rollout.close()
