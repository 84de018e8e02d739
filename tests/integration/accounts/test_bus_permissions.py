"""What NATS refuses: for every role, every subject that is not its own, to publish and to subscribe, in the log and at the client."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field

import nats
import pytest
from nats.aio.client import Client

from shared.bus import Bus, BusUnreachable, NotPermitted
from shared.messages import Accepted, Durable, WeightsLive
from shared.streams import generated_consumer
from shared.subjects import Subjects
from tests.support import intended_rights as intended
from tests.support.guarded_servers import GuardedServers
from tests.support.waiting import until

RUN, OTHER = "guarded", "guarded-2"
TABLE = intended.everything(RUN, OTHER)


@dataclass
class Listener:
    """A client of the library without anything of ours around it, and what the server told it."""

    client: Client = field(default_factory=Client)
    errors: list[str] = field(default_factory=list)

    async def on_error(self, error: Exception) -> None:
        self.errors.append(str(error))

    def refused(self, verb: str, subject: str) -> bool:
        return any(f'permissions violation for {verb} to "{subject.lower()}"' in error for error in self.errors)


async def listener(guarded: GuardedServers, role: str) -> Listener:
    one = Listener()
    await one.client.connect(guarded.nats_url(role), error_cb=one.on_error, allow_reconnect=False)
    return one


def is_subject(subject: str) -> bool:
    return not {"*", ">"} & set(subject.split("."))


@pytest.mark.parametrize("subject", TABLE)
@pytest.mark.parametrize("role", intended.ROLES)
async def test_a_subject_is_open_to_whom_it_is_meant_for_and_to_nobody_else(guarded: GuardedServers, role: str, subject: str) -> None:
    publishers, listeners = TABLE[subject]
    one = await listener(guarded, role)
    try:
        await one.client.subscribe(subject)
        if is_subject(subject):
            await one.client.publish(subject, b"")
        await one.client.flush()  # what the server refuses it says before it answers this
        assert one.refused("subscription", subject) == (role not in listeners)
        assert one.refused("publish", subject) == (role not in publishers and is_subject(subject))
        assert logged(guarded, "Subscription", role, subject) == (role not in listeners)
        assert logged(guarded, "Publish", role, subject) == (role not in publishers and is_subject(subject))
    finally:
        await one.client.close()


def logged(guarded: GuardedServers, verb: str, role: str, subject: str) -> bool:
    """Whether a line of the server's log has the refusal, with the user's name."""
    lines = guarded.nats.log_path.read_text().splitlines()
    return any(f"{verb} Violation" in line and f"{role}.{RUN}" in line and f'Subject "{subject}"' in line for line in lines)


async def connected(guarded: GuardedServers, role: str) -> Bus:
    return await Bus.connect(guarded.nats_url(role), "test", inbox=Subjects(RUN).inbox(role))


async def test_our_own_client_ends_with_the_refused_subject_and_does_not_wait_for_its_deadline(guarded: GuardedServers) -> None:
    names = Subjects(RUN)
    bus = await connected(guarded, "reward")
    try:
        news = WeightsLive(version=1, replicas=[], seconds=0, bytes=0, at=0)
        with pytest.raises(NotPermitted, match='publish to "guarded.weights.live"'):
            await bus.publish(names.event("weights", "live"), news, deadline=1000)
        for patient in (True, False):
            with pytest.raises(NotPermitted, match='publish to "guarded.buffer.durable"'):
                await bus.request(names.durable, Durable(steps=1), Accepted, deadline=5, whom="the buffer", patient=patient)
        with pytest.raises(NotPermitted, match='subscription to "guarded.buffer.durable"'):
            await bus.serve(names.durable, Durable, lambda _: asyncio.sleep(0, Accepted()))
        with pytest.raises(NotPermitted, match=r'publish to "\$js.api.stream.info.kv_guarded-weights"'):
            await bus.get(names.weights_bucket, "live", deadline=1000)
    finally:
        await bus.close()


async def test_a_client_with_another_roles_inbox_is_told_so_at_once(guarded: GuardedServers) -> None:
    with pytest.raises(BusUnreachable, match='subscription to "_inbox.guarded.buffer'):
        await Bus.connect(guarded.nats_url("reward"), "test", deadline=1000, inbox=Subjects(RUN).inbox("buffer"))


async def test_work_that_an_account_may_not_fetch_is_an_error_and_no_empty_queue(guarded: GuardedServers) -> None:
    from shared.config import BusSection
    from shared.messages import Generated
    from shared.queue import WorkQueue

    bus = await connected(guarded, "rollout")
    try:
        queue = WorkQueue(bus, generated_consumer(RUN, BusSection(), "math"), Generated)
        with pytest.raises(NotPermitted, match=r'publish to "\$js.api.consumer.msg.next.guarded-generated.math"'):
            await queue.fetch(1)
        with pytest.raises(NotPermitted, match=r'publish to "\$js.api.consumer.info.guarded-generated.math"'):
            await queue.depth(deadline=1000)
    finally:
        await bus.close()


@pytest.mark.parametrize("login", ["", "buffer.guarded:wrong@", "buffer.guarded:@", "nobody:x@", "buffer.guarded-2:x@"])
async def test_without_the_password_nothing_is_to_be_had(guarded: GuardedServers, login: str) -> None:
    url = guarded.nats.url.replace("//", f"//{login}")
    with pytest.raises(BusUnreachable, match="authorization violation") as caught:
        await Bus.connect(url, "test", deadline=1000)
    assert login.rstrip("@") in ("", "buffer.guarded:") or login.rstrip("@") not in str(caught.value)
    with pytest.raises(nats.errors.Error):
        await nats.connect(url, allow_reconnect=False)


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
