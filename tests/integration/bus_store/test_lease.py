"""The leader's lease on a real server, with one holder at a time; and the services' statuses, there while they are renewed."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.bus import runs, streams
from shared.bus.connection import Bus
from shared.bus.leader_lease import LeaderLease, LeaseLost, LeaseTiming
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import EmbeddedNats, EmbeddedServer
from shared.runtime.errors import MyxoError
from shared.schema.service_messages import LeaseStatus, ServiceStatus
from tests.support.run_config import run_config
from tests.support.waiting import until

LONG = LeaseTiming(600.0)
"""Runs out in no test."""

SHORT = LeaseTiming(0.6)


@pytest.fixture
async def run(bus: Bus, run_name: str, tmp_path: Path) -> RunConfig:
    config = run_config(tmp_path, run={"name": run_name})
    await runs.create(bus, config, None)
    return config


def lease(bus: Bus, config: RunConfig, instance: str, timing: LeaseTiming = LONG) -> LeaderLease:
    return LeaderLease(bus, config.run.name, "job", instance, timing)


async def status(bus: Bus, config: RunConfig) -> LeaseStatus:
    value = await bus.get(Subjects(config.run.name).leases_bucket, "job")
    assert value is not None
    return LeaseStatus.decode(value)


async def test_one_of_many_gets_it(bus: Bus, run: RunConfig) -> None:
    leases = [lease(bus, run, str(number)) for number in range(8)]
    got = await asyncio.gather(*(one.attempt() for one in leases))
    assert sorted(got) == [False] * 7 + [True]
    winner = got.index(True)
    await leases[winner].held()
    assert (await status(bus, run)).holder == str(winner)
    assert not any([await one.attempt() for number, one in enumerate(leases) if number != winner])


async def test_a_lease_that_was_released_is_taken_at_once(bus: Bus, run: RunConfig) -> None:
    first, second = lease(bus, run, "first"), lease(bus, run, "second")
    assert await first.attempt() and not await second.attempt()
    await first.release()
    with pytest.raises(LeaseLost, match="was released"):
        await first.held()
    assert await second.attempt()
    await second.held()
    await first.release()
    assert (await status(bus, run)).holder == "second", "who holds nothing releases nothing"


async def test_a_lease_of_a_process_that_is_dead_is_taken_at_once(bus: Bus, run: RunConfig) -> None:
    if sys.platform != "linux":
        pytest.skip("nobody can tell elsewhere")
    said = subprocess.run(
        [sys.executable, "-c", "from shared.runtime.host import process_mark; print(process_mark())"], capture_output=True, text=True
    )
    dead = LeaseStatus(holder="dead", term="t", mark=said.stdout.strip(), at=time.time())
    await bus.put(Subjects(run.run.name).leases_bucket, "job", dead.encode())
    assert await lease(bus, run, "heir").attempt()


async def test_one_that_fell_silent_is_followed_and_ends_when_it_would_go_on(bus: Bus, run: RunConfig) -> None:
    silent, heir = lease(bus, run, "silent", SHORT), lease(bus, run, "heir", SHORT)
    await until(silent.attempt, "a lease")  # one that is confirmed later than it lasts is none
    await until(heir.attempt, "the lease of one that does not renew it")
    waiting = asyncio.create_task(silent.held())
    with pytest.raises(LeaseLost, match="heir has it now"):
        await silent.keep()
    with pytest.raises(LeaseLost, match="heir has it now"):
        await waiting


@pytest.mark.extra
async def test_one_that_fell_silent_goes_on_where_nobody_took_its_place(bus: Bus, run: RunConfig) -> None:
    only = lease(bus, run, "only", SHORT)
    await until(only.attempt, "a lease")
    await asyncio.sleep(2 * SHORT.duration)  # however much longer this takes, the lease has run out
    fenced = asyncio.create_task(only.held())
    await asyncio.sleep(0)
    assert not fenced.done()
    keeping = asyncio.create_task(only.keep())
    await asyncio.wait_for(fenced, 60)
    keeping.cancel()


async def test_a_renewal_whose_confirmation_was_lost_is_known_again(bus: Bus, run: RunConfig) -> None:
    holder = lease(bus, run, "holder", SHORT)
    await until(holder.attempt, "a lease")
    bucket = Subjects(run.run.name).leases_bucket
    stored = await bus.put(bucket, "job", (await status(bus, run)).encode())
    keeping = asyncio.create_task(holder.keep())

    async def renewed() -> bool:
        assert not keeping.done()
        return (await bus.js.get_last_msg(f"KV_{bucket}", f"$KV.{bucket}.job")).seq > stored + 1

    await until(renewed, "renewals that follow the one that was not confirmed")
    keeping.cancel()


@pytest.mark.extra
async def test_who_waits_while_the_server_is_away_waits_on(mortal_nats: EmbeddedNats, tmp_path: Path, crash: Callable[..., None]) -> None:
    server: EmbeddedServer = mortal_nats
    bus, other = await Bus.connect(mortal_nats.url, "holder"), await Bus.connect(mortal_nats.url, "waiter")
    config = run_config(tmp_path)
    await runs.create(bus, config, None)
    holder, waiter = lease(bus, config, "holder", SHORT), lease(other, config, "waiter", SHORT)
    await until(holder.attempt, "a lease")
    keeping = asyncio.create_task(holder.keep())
    assert not await waiter.attempt()
    crash(server)
    for _ in range(3):
        assert not await waiter.attempt()
    await asyncio.sleep(SHORT.duration)
    server.start()
    await until(lambda: bus.connection.is_connected and other.connection.is_connected, "both connections")
    assert not await waiter.attempt(), "the time of the outage does not count"
    await asyncio.wait_for(holder.held(), 60)
    assert not keeping.done()
    keeping.cancel()
    await bus.close()
    await other.close()


async def test_without_its_bucket_the_run_is_named(bus: Bus, tmp_path: Path) -> None:
    with pytest.raises(MyxoError, match="no bucket for the lease job of run none: does the run exist there?"):
        await lease(bus, run_config(tmp_path, run={"name": "none"}), "x").attempt()


TTL = 1.0


@pytest.fixture
async def registry(bus: Bus, run_name: str, tmp_path: Path) -> Registry:
    await streams.create(bus, run_config(tmp_path, run={"name": run_name}))
    return Registry(bus, run_name)


def status_of(service: str, instance: str, **fields: object) -> ServiceStatus:
    return ServiceStatus(service=service, instance=instance, host="h", pid=1, http="127.0.0.1:1", state="ready", at=time.time(), **fields)


async def test_statuses_are_seen_by_kind_with_what_they_say(registry: Registry) -> None:
    await registry.renew(status_of("rollout", "r-1", version=3, gauges={"tokens_per_s": 5.0}))
    await registry.renew(status_of("rollout", "r-2"))
    await registry.renew(status_of("buffer", "b-1"))
    assert sorted(one.instance for one in await registry.alive()) == ["b-1", "r-1", "r-2"]
    assert [one.instance for one in await registry.alive("rollout")] == ["r-1", "r-2"]
    [first, _] = await registry.alive("rollout")
    assert (first.version, first.gauges) == (3, {"tokens_per_s": 5.0})
    assert await registry.alive("trainer") == []


async def test_who_leaves_is_gone_at_once(registry: Registry) -> None:
    await registry.renew(status_of("rollout", "r-1"))
    await registry.leave(status_of("rollout", "r-1"))
    assert await registry.alive() == []
    await registry.renew(status_of("rollout", "r-1"))
    assert len(await registry.alive()) == 1


async def test_a_status_of_another_schema_is_not_one_to_work_with(registry: Registry, bus: Bus, run_name: str) -> None:
    await bus.put(Subjects(run_name).services_bucket, "rollout.future", b"\x81\xa6schema\x63")
    await registry.renew(status_of("rollout", "r-1"))
    assert [one.instance for one in await registry.alive()] == ["r-1"]


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("rollout.r-2", ("rollout", "r-1")),  # another replica of the same account
        ("rollout.r-2", ("trainer", "trainer-1")),
        ("rollout.r.2", ("rollout.r", "2")),
    ],
)
async def test_a_status_that_does_not_belong_to_its_key_is_ignored_and_counted(
    key: str, named: tuple[str, str], registry: Registry, bus: Bus, run_name: str
) -> None:
    found: list[str] = []
    registry = Registry(bus, run_name, lambda: found.append(key))
    bucket = Subjects(run_name).services_bucket
    await registry.renew(status_of("rollout", "r-1"))
    await bus.put(bucket, key, status_of(*named, gauges={"onloaded": 1.0}).encode())
    for _ in range(2):
        assert [(one.service, one.instance, one.gauges) for one in await registry.alive()] == [("rollout", "r-1", {})]
        assert [one.instance for one in await registry.alive("rollout")] == ["r-1"]
        assert await registry.alive("trainer") == []
    assert found == [key]  # once, not at every look

    await bus.put(bucket, key, status_of(*key.split(".", 1)).encode())
    assert len(await registry.alive("rollout")) == 2
    await bus.put(bucket, key, status_of(*named).encode())
    assert len(await registry.alive("rollout")) == 1
    assert found == [key, key]


async def test_who_stops_renewing_is_gone_after_the_ttl_and_who_renews_stays(bus: Bus, run_name: str, tmp_path: Path) -> None:
    await streams.create(bus, run_config(tmp_path, run={"name": run_name}, bus={"registry_ttl": TTL}))
    registry = Registry(bus, run_name)
    await registry.renew(status_of("rollout", "silent"))
    start = time.monotonic()

    async def only_the_living() -> bool:
        await registry.renew(status_of("rollout", "living"))
        return [one.instance for one in await registry.alive()] == ["living"]

    await until(only_the_living, "the end of the silent status", pause=TTL / 20)
    assert time.monotonic() - start >= TTL * 0.9
