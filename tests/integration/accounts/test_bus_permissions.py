"""What NATS refuses: for every role, every subject that is not its own, also as one that the client names for an answer."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig

from examples.environments.guessing.guessing import GuessingGame
from myxo.launch.launcher import erase_from_bus
from myxo.run.run_access import connect
from shared.accounts.permissions import rights_of
from shared.bus import runs
from shared.bus.connection import Bus, BusUnreachable, NotPermitted
from shared.bus.streams import generated_consumer
from shared.bus.subjects import Subjects
from shared.bus.work_queue import WorkQueue
from shared.config.service_sections import BusSection
from shared.environment.serving import ServedEnvironment, serve_on_bus
from shared.runtime.errors import ConfigError
from shared.schema.messages import Accepted, Durable, Generated
from shared.schema.weight_messages import WeightsLive
from tests.support import intended_rights as intended
from tests.support.guarded_servers import GuardedServers
from tests.support.run_config import run_config, write_jsonl
from tests.support.waiting import until

RUN, OTHER = "guarded", "guarded-2"
AREAS = {
    "subjects": intended.subjects(RUN),
    "buckets": intended.buckets(RUN),
    "JetStream": intended.interface(RUN),
    "another run": {subject: (intended.NOBODY, intended.NOBODY) for subject in intended.everything(OTHER, OTHER)} | intended.server(),
}


@dataclass
class Listener:
    """A client of the library without anything of ours around it, and what the server told it."""

    client: Client = field(default_factory=Client)
    errors: list[str] = field(default_factory=list)

    async def on_error(self, error: Exception) -> None:
        self.errors.append(str(error))

    def refused(self, verb: str) -> set[str]:
        """Subjects, in the lower case in which the library hands on the server's words."""
        matches = (re.search(f'permissions violation for {verb} to "([^"]*)"', error) for error in self.errors)
        return {found[1] for found in matches if found}


async def listener(guarded: GuardedServers, role: str) -> Listener:
    one = Listener()
    await one.client.connect(guarded.nats_url(role), error_cb=one.on_error, allow_reconnect=False)
    return one


def is_subject(subject: str) -> bool:
    return not {"*", ">"} & set(subject.split("."))


@pytest.mark.parametrize("area", AREAS)
@pytest.mark.parametrize("role", intended.ROLES)
async def test_a_subject_is_open_to_whom_it_is_meant_for_and_to_nobody_else(guarded: GuardedServers, role: str, area: str) -> None:
    table = AREAS[area]
    one = await listener(guarded, role)
    try:
        for subject in table:
            await one.client.subscribe(subject)
            if is_subject(subject):
                await one.client.publish(subject, b"")
        for _ in range(2):  # the client's ping overtakes what it has not sent yet; refusals come before the second one's answer
            await one.client.flush()
    finally:
        await one.client.close()
    deaf = {subject for subject, (_, listeners) in table.items() if role not in listeners}
    mute = {subject for subject, (publishers, _) in table.items() if is_subject(subject) and role not in publishers}
    assert deaf or mute
    assert one.refused("subscription") == {subject.lower() for subject in deaf}
    assert one.refused("publish") == {subject.lower() for subject in mute}
    assert deaf <= logged(guarded, "Subscription", role)
    assert mute <= logged(guarded, "Publish", role)


def logged(guarded: GuardedServers, verb: str, role: str) -> set[str]:
    """The subjects that the server's log says were refused to the role's user, by name."""
    lines = [line for line in guarded.nats.log_path.read_text().splitlines() if f"{verb} Violation" in line and f"{role}.{RUN}" in line]
    return {found[1] for line in lines if (found := re.search(r'Subject "([^"]*)"', line))}


async def connected(guarded: GuardedServers, role: str) -> Bus:
    return await Bus.connect(guarded.nats_url(role), "test", inbox=Subjects(RUN).inbox(role))


async def test_our_own_client_ends_with_the_refused_subject_and_does_not_wait_for_its_deadline(
    guarded: GuardedServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.bus.connection.ATTEMPT_SECONDS", 1)  # one try's length, at whose end it is known
    names = Subjects(RUN)
    bus = await connected(guarded, "reward")
    try:
        news = WeightsLive(version=1, replicas=[], seconds=0, bytes=0, at=0)
        with pytest.raises(NotPermitted, match='publish to "guarded.weights.live"'):
            await bus.publish(names.event("weights", "live"), news, deadline=1000)
        for patient in (True, False):
            with pytest.raises(NotPermitted, match='publish to "guarded.buffer.durable"'):
                await bus.request(names.durable, Durable(steps=1), Accepted, deadline=2, awaited_from="the buffer", patient=patient)
        with pytest.raises(NotPermitted, match='subscription to "guarded.buffer.durable"'):
            await bus.serve(names.durable, Durable, lambda _: asyncio.sleep(0, Accepted()))
        with pytest.raises(NotPermitted, match=r'publish to "\$js.api.stream.info.kv_guarded-leases"'):
            await bus.get(names.leases_bucket, "buffer", deadline=1000)
    finally:
        await bus.close()


async def test_a_client_with_another_roles_inbox_is_told_so_at_once(guarded: GuardedServers) -> None:
    with pytest.raises(BusUnreachable, match='subscription to "_inbox.guarded.buffer'):
        await Bus.connect(guarded.nats_url("reward"), "test", deadline=1000, inbox=Subjects(RUN).inbox("buffer"))


async def test_an_environment_that_steps_finds_by_its_own_account_that_another_instance_is_there(guarded: GuardedServers) -> None:
    for served in (serving(guarded), serving(guarded)):
        async with served:
            with pytest.raises(ConfigError, match="is there already"):
                async with serving(guarded):
                    pass


@asynccontextmanager
async def serving(guarded: GuardedServers) -> AsyncIterator[None]:
    async with aclosing(await connect(guarded.nats_url("environment"), RUN)) as bus:
        await serve_on_bus(ServedEnvironment("game", GuessingGame()), bus.connection, RUN, "game")
        yield


@pytest.mark.extra
async def test_work_that_an_account_may_not_fetch_is_an_error_and_no_empty_queue(guarded: GuardedServers) -> None:
    bus = await connected(guarded, "rollout")
    try:
        queue = WorkQueue(bus, generated_consumer(RUN, BusSection(), "math"), Generated)
        with pytest.raises(NotPermitted, match=r'publish to "\$js.api.consumer.msg.next.guarded-generated.verifiers-sympy"'):
            await queue.fetch(1)
        with pytest.raises(NotPermitted, match=r'publish to "\$js.api.consumer.info.guarded-generated.verifiers-sympy"'):
            await queue.depth(deadline=1000)
    finally:
        await bus.close()


@pytest.mark.parametrize("login", ["", "buffer.guarded:wrong@", "buffer.guarded:@", "nobody:x@", "buffer.guarded-2:x@"])
async def test_without_the_password_nothing_is_to_be_had(guarded: GuardedServers, login: str) -> None:
    url = guarded.nats.url.replace("//", f"//{login}")
    with pytest.raises(BusUnreachable, match="authorization violation") as caught:
        await Bus.connect(url, "test", deadline=1000)
    assert login.rstrip("@") in ("", "buffer.guarded:") or login.rstrip("@") not in str(caught.value)


async def test_a_raw_connection_that_does_not_log_in_gets_no_message(guarded: GuardedServers) -> None:
    def talk() -> bytes:
        with socket.create_connection(("127.0.0.1", guarded.nats.port), timeout=30) as link:
            link.recv(4096)
            link.sendall(b'CONNECT {"verbose":false}\r\nSUB > 1\r\nSUB guarded.> 2\r\nPING\r\n')
            heard = b""
            while part := link.recv(4096):  # until the server closes
                heard += part
            return heard

    assert (await asyncio.to_thread(talk)).startswith(b"-ERR 'Authorization Violation'")


async def test_the_log_names_who_was_turned_away(guarded: GuardedServers) -> None:
    with pytest.raises(BusUnreachable):
        await Bus.connect(guarded.nats.url.replace("//", "//stranger:x@"), "test")
    await until(lambda: 'authentication error - User "stranger"' in guarded.nats.log_path.read_text(), "the log line")
    assert not any(secret in guarded.nats.log_path.read_text() for secret in guarded.secrets)


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
            clients.append(await client_of(guarded, listener))
            await clients[-1].subscribe(subject, cb=on_message)
            await clients[-1].flush()
    attacker = await client_of(guarded, role)
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


async def client_of(guarded: GuardedServers, role: str) -> Client:
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
    attacker = await client_of(guarded, role)
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
    attacker = await client_of(guarded, "rollout")
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
