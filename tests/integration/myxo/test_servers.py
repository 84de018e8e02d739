"""The launcher's own servers: restarted where they died, with what they stored, at the same addresses."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from myxo.launch.run_servers import RunServers
from myxo.run.run_access import GivenServers
from myxo.run.run_directory import RunDirectory
from shared.bus.connection import Bus
from shared.config.service_sections import StoreSection
from shared.process.embedded_servers import EmbeddedServer, hold_port
from tests.integration.myxo.command import wait_for
from tests.support.small_disk import small_disk
from tests.support.waiting import until


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[RunServers]:
    kept = RunServers(RunDirectory(tmp_path), GivenServers(None, None), StoreSection(appendfsync="always"))
    kept.start()
    yield kept
    kept.stop()


def crash(servers: RunServers, name: str) -> None:
    (server,) = [managed.server for managed in servers.managed if managed.server.name == name]
    assert isinstance(server, EmbeddedServer)
    assert server.process is not None
    server.process.kill()
    server.process.wait(30)


def restarts(servers: RunServers) -> dict[str, int]:
    return {server.instance: server.restarts for server in servers.restarts()}


def test_given_servers_are_not_run_here(tmp_path: Path) -> None:
    servers = RunServers(RunDirectory(tmp_path), GivenServers("nats://elsewhere:1", "redis://elsewhere:2"), StoreSection())
    servers.start()
    assert (servers.nats_url, servers.redis_url) == ("nats://elsewhere:1", "redis://elsewhere:2")
    assert restarts(servers) == {}
    assert list(tmp_path.iterdir()) == []
    servers.stop()


async def test_a_port_that_is_taken_before_its_server_starts_is_drawn_anew(tmp_path: Path) -> None:
    servers = RunServers(RunDirectory(tmp_path), GivenServers(None, None), StoreSection())
    [address] = [managed.server.address for managed in servers.managed if managed.server.name == "nats-server"]
    before, listeners = servers.nats_url, [socket.create_server(address)]
    try:
        servers.start()
        assert servers.nats_url != before and servers.guest_urls[0] == servers.nats_url
        assert restarts(servers) == {"nats-server": 0, "valkey-server": 0}, "it is no death of the server's"
        after = servers.nats_url
        bus = await Bus.connect(after, "test")
        await bus.close()
        crash(servers, "nats-server")
        [address] = [managed.server.address for managed in servers.managed if managed.server.name == "nats-server"]
        listeners.append(socket.create_server(address))
        servers.tick(time.monotonic())
        assert (servers.nats_url, servers.managed[0].due is None) == (after, False), "its clients know no other address"
    finally:
        servers.stop()
        for listener in listeners:
            listener.close()


def test_a_port_that_is_held_is_drawn_by_nobody_else_and_can_be_listened_at() -> None:
    with hold_port() as held, socket.socket() as other:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", port))  # as `free_port` asks
        with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)):
            assert server.accept()


async def test_a_killed_server_is_back_with_what_it_stored(servers: RunServers) -> None:
    """One that lives is left alone."""
    for _ in range(3):
        servers.tick(time.monotonic())
    assert restarts(servers) == {"nats-server": 0, "valkey-server": 0} and servers.troubled == float("-inf")
    bus = await Bus.connect(servers.nats_url, "test")
    try:
        await bus.js.add_stream(name="kept", subjects=["kept.>"])
        await bus.js.publish("kept.one", b"1")
        crash(servers, "nats-server")
        before = time.monotonic()
        servers.tick(before)
        assert restarts(servers) == {"nats-server": 1, "valkey-server": 0}
        assert servers.troubled >= before
    finally:
        await bus.close()
    again = await Bus.connect(servers.nats_url, "test")
    assert (await again.js.stream_info("kept")).state.messages == 1
    await again.close()
    redis.Redis.from_url(servers.redis_url).set("kept", b"1")
    crash(servers, "valkey-server")
    servers.tick(time.monotonic())
    wait_for("the blob", lambda: redis.Redis.from_url(servers.redis_url).get("kept") == b"1")
    assert restarts(servers) == {"nats-server": 1, "valkey-server": 1}


def test_a_server_that_keeps_dying_is_given_pauses(servers: RunServers) -> None:
    for death in range(1, 4):
        crash(servers, "nats-server")
        wait_for("the restart", lambda death=death: (servers.tick(time.monotonic()), restarts(servers)["nats-server"] == death)[1])
    crash(servers, "nats-server")
    servers.tick(time.monotonic())
    assert restarts(servers)["nats-server"] == 3, "the fourth start waits"


@pytest.mark.parametrize("name", ["nats-server", pytest.param("valkey-server", marks=pytest.mark.extra)])
def test_a_frozen_server_is_killed_and_started_again(tmp_path: Path, name: str) -> None:
    """Its port takes connections all the same: only an answer shows that it lives."""
    servers = RunServers(RunDirectory(tmp_path), GivenServers(None, None), StoreSection(), frozen_timeout=8.0)
    servers.start()
    try:
        process = next(managed.server.process for managed in servers.managed if managed.server.name == name)
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        away = []

        def back() -> bool:
            servers.tick(time.monotonic())
            away.extend(f"{server}: {gone.why}" for server, gone in servers.away().items())
            return restarts(servers)[name] == 1

        wait_for("the frozen server to be started again", back)
        assert any("its process runs, and does not answer" in why for why in away), "the words come before the kill"
        reason = next(server.reason for server in servers.restarts() if server.instance == name)
        assert "it was frozen, without an answer for 8 s, and was killed" in reason
        assert sum(restarts(servers).values()) == 1, "the other one continues"
    finally:
        servers.stop()


@pytest.mark.extra
async def test_a_nats_server_that_refuses_writes_although_there_is_room_again_is_restarted(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        servers = RunServers(RunDirectory(disk.path), GivenServers(None, None), StoreSection())
        servers.start()
        bus = await Bus.connect(servers.nats_url, "test")
        bus.full.patience_s = 120.0
        try:
            await bus.js.add_stream(name="kept", subjects=["kept.>"])
            await bus.publish("kept.one", bytes(5000), msg_id="one")
            disk.fill()
            second = asyncio.create_task(bus.publish("kept.two", bytes(5000), msg_id="two", deadline=12.0))
            await until(lambda: str(bus.full), "the publisher to notice", deadline=60)
            assert "the bus confirms nothing although it is connected" in str(bus.full)

            def full() -> str:
                servers.tick(time.monotonic())
                return servers.full()

            await until(full, "the refusal in the log", deadline=60)
            assert "No space left on device" in full() and restarts(servers)["nats-server"] == 0, "it waits for room"
            disk.clear()

            def back() -> bool:
                servers.tick(time.monotonic())
                return restarts(servers)["nats-server"] == 1

            await until(back, "the server to be started again", deadline=60)
            assert await second == 2, "nothing was given up meanwhile"
        finally:
            await bus.close()
            servers.stop()
    reason = next(server.reason for server in servers.restarts() if server.instance == "nats-server")
    assert "no space was left on the device for" in reason and "streams/kept" in reason
    assert [(event.instance, reason in event.detail) for event in servers.restarted] == [("nats-server", True)]
