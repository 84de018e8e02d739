"""The leader's lease on a real server: one holder at a time, handed over by release, death or silence, and by nothing else."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.leader_lease import LeaderLease, LeaseLost, LeaseTiming
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import EmbeddedNats, EmbeddedServer
from shared.runtime.errors import MyxoError
from shared.schema.service_messages import LeaseStatus
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
