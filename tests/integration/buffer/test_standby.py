"""Two buffers: one is active, the other takes its place when it dies, stops, or falls silent; never do both record anything."""

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from services.buffer.ledger_writer import LedgerWriter
from shared.bus import runs
from shared.bus.registry import STANDBY, Registry
from shared.process.embedded_servers import EmbeddedNats, EmbeddedServer, EmbeddedValkey
from shared.runtime.errors import MyxoError
from shared.schema.ledger import GroupDead, GroupsAdmitted, GroupsScored, LedgerRepaired, VersionLive, group_id
from shared.schema.messages import Payload, RunDone
from shared.schema.service_messages import LeaseStatus
from tests.integration.buffer.conftest import SHORT, NewRun, on_mortal_servers
from tests.integration.buffer.player import Player
from tests.support.service_process import ServiceProcess
from tests.support.waiting import until

STEPS = 4
LEASE_SECONDS = 2.5
"""Half of the default: a loaded machine may hold a buffer up for a second."""


@asynccontextmanager
async def two_buffers(player: Player) -> AsyncIterator[tuple[ServiceProcess, ServiceProcess]]:
    """The active buffer ``buffer-1`` and ``buffer-2`` on standby."""
    with player.launch("buffer-1") as first:
        await player.ready(first, "buffer-1")
        with player.launch("buffer-2") as second:
            await player.says(second, "buffer-2", STANDBY)
            yield first, second


async def test_a_successor_frees_again_what_many_records_let_go(new_run: NewRun) -> None:
    player = await new_run()
    keys = [f"k{number}" for number in range(300)]
    await player.bus.publish(player.names.ledger("groups_admitted"), GroupsAdmitted(first=0, count=len(keys), version=0, at=0.0))
    ends = {key: GroupDead(group=group_id(at), reason="x", payload=Payload(keys=[key], bytes=1), at=0.0) for at, key in enumerate(keys)}
    await player.bus.publish_all(player.names.ledger("group_dead"), ends)

    async def allowed() -> None:
        raise AssertionError("nothing is written here")

    writer = LedgerWriter(player.bus, player.names.run, allowed, lambda state, record: None)
    await writer.follow()
    assert [*writer.released] == keys


@pytest.mark.parametrize("gone", [(2,), (3,)], ids=["in the middle", "at the end"])
async def test_a_torn_ledger_is_refused_until_it_is_repaired(new_run: NewRun, gone: tuple[int, ...]) -> None:
    player = await new_run()
    for number in range(3):
        await player.bus.publish(player.names.ledger("version_live"), VersionLive(version=number, at=0.0))
    for sequence in gone:
        await player.bus.js.delete_msg(player.names.ledger_stream, sequence)

    async def followed() -> LedgerWriter:
        writer = LedgerWriter(player.bus, player.names.run, AsyncMock(), lambda state, record: None)
        await writer.follow()
        return writer

    with pytest.raises(MyxoError, match=rf"records {gone[0]} to {gone[0]} of the ledger are gone: `myxo repair {player.names.run}`"):
        await followed()
    for sequence in {2, 3} - set(gone):
        await player.bus.js.delete_msg(player.names.ledger_stream, sequence)
    await runs.append(player.bus, player.names.run, LedgerRepaired(resume=0, cut_after=1, cut_last=3, at=0.0))
    writer = await followed()
    assert (writer.last, writer.state.live_version) == (4, 0)


async def test_a_buffer_leaves_the_payloads_of_another_run_of_its_name_alone(new_run: NewRun) -> None:
    """Only what the ledger and messages name is the run's: a copy, or a run with a NATS of its own, may share the store."""
    player = await new_run()
    let_go, foreign = (player.names.payload_key(group_id(0), 0, 0, generation) for generation in ("mine", "another"))
    ended = GroupDead(group=group_id(0), reason="x", payload=Payload(keys=[let_go], bytes=1), at=0.0)
    await player.bus.publish(player.names.ledger("groups_admitted"), GroupsAdmitted(first=0, count=1, version=0, at=0.0))
    await player.bus.publish(player.names.ledger("group_dead"), ended)
    await player.store.write(dict.fromkeys((let_go, foreign), b"1"))
    with player.launch("buffer-1"):

        async def freed() -> bool:
            return bool(await player.store.missing([let_go]))

        await until(freed, "the dead group's payload to be freed")
    assert await player.store.missing([foreign]) == []
    assert runs.frozen(player.config.run.root) == player.config, "which `myxo export` and `myxo eval` read"


async def play_to_the_end(player: Player, step: int) -> None:
    """Everything from ``step`` on, until the run is finished by the ledger's account."""
    for number in range(step, STEPS):
        assert (await player.batch(number, working=True)).step == number
        await player.trained(number)
        await player.durable(number + 1)

    async def over() -> bool:
        return isinstance(await player.ask(STEPS), RunDone)

    await until(over, "the end of the run")
    report = await player.audit()
    assert report.violations == []
    assert report.finished and report.in_flight == 0 and report.trained == 2 * STEPS
    assert await player.phase() == runs.FINISHED


async def scored(player: Player, count: int) -> bool:
    return sum(len(record.groups) for record in await player.records() if isinstance(record, GroupsScored)) == count


async def holder(player: Player) -> LeaseStatus:
    value = await player.bus.get(player.names.leases_bucket, "buffer")
    assert value is not None
    return LeaseStatus.decode(value)


async def test_after_a_kill_the_standby_answers_and_the_run_goes_on(new_run: NewRun) -> None:
    player = await new_run(bus={"ack_wait": 2.0, "lease_duration": LEASE_SECONDS})
    async with two_buffers(player) as (first, second):
        await player.live(0)
        had = await player.batch(0, working=True)
        [status] = [status for status in await Registry(player.bus, player.config.run.name).alive("buffer") if status.state == STANDBY]
        with urllib.request.urlopen(f"http://{status.http}/healthz", timeout=30) as answer:
            health = json.load(answer)
        assert (health["ok"], health["instance"], health["state"]) == (True, "buffer-2", STANDBY)
        assert '"event": "active"' not in second.words()
        first.kill()
        assert await player.batch(0, working=True) == had
        await player.says(second, "buffer-2", "ready")
        await play_to_the_end(player, 0)
        assert (await holder(player)).holder == "buffer-2"


@pytest.mark.extra(each=True)
async def test_a_buffer_that_is_asked_to_stop_hands_over(new_run: NewRun) -> None:
    player = await new_run(bus={"ack_wait": 2.0, "lease_duration": LEASE_SECONDS})
    async with two_buffers(player) as (first, second):
        await player.live(0)
        await player.batch(0, working=True)
        assert await asyncio.to_thread(first.stop) == 0
        await player.ready(second, "buffer-2")
        with player.launch("buffer-3") as third:
            await player.says(third, "buffer-3", STANDBY)
            assert await asyncio.to_thread(third.stop) == 0, "one on standby stops as well as any other"
        await play_to_the_end(player, 0)
        assert second.process.poll() is None


@pytest.mark.extra(each=True)
@pytest.mark.parametrize("outage", [0.3, SHORT["lease_duration"] + 1.0])
async def test_when_nats_was_away_exactly_one_goes_on(
    mortal_nats: EmbeddedNats,
    mortal_valkey: EmbeddedValkey,
    tiny_model: Path,
    tmp_path: Path,
    crash: Callable[[EmbeddedServer], None],
    outage: float,
) -> None:
    player, bus, store = await on_mortal_servers(mortal_nats, mortal_valkey, tmp_path, tiny_model, lease_duration=LEASE_SECONDS)
    async with two_buffers(player) as (first, second):
        await player.live(0)
        await player.batch(0, working=True)
        crash(mortal_nats)
        await asyncio.sleep(outage)
        mortal_nats.start()
        await play_to_the_end(player, 0)
        status = await holder(player)
        buffers = {"buffer-1": first, "buffer-2": second}
        active, other = buffers.pop(status.holder), buffers.popitem()[1]
        assert active.process.poll() is None
        if active is first:
            assert other.process.poll() is None
            assert '"event": "active"' not in other.words()
        else:  # the machine was too slow for the first to be back in time: it ends rather than continue
            assert await asyncio.to_thread(other.process.wait, 60) == 1
            assert "LeaseLost" in other.words()
    await bus.close()
    await store.close()


async def test_one_that_was_stopped_too_long_ends_without_recording_anything(new_run: NewRun) -> None:
    player = await new_run(bus={"ack_wait": 2.0, "lease_duration": LEASE_SECONDS})
    async with two_buffers(player) as (first, second):
        await player.live(0)
        await player.work_until(4)
        await until(lambda: scored(player, 4), "four scored groups")
        os.kill(first.process.pid, signal.SIGSTOP)
        await player.ready(second, "buffer-2")
        assert (await player.batch(0)).step == 0
        await player.trained(0)  # the stopped one has all of this before it when it continues: requests, the event, new groups
        await player.work_until(2)
        await until(lambda: scored(player, 6), "the two groups more")
        before = await player.records()
        assert sum(record.count for record in before if isinstance(record, GroupsAdmitted)) == 6
        os.kill(first.process.pid, signal.SIGCONT)
        assert await asyncio.to_thread(first.process.wait, 60) == 1
        assert "LeaseLost" in first.words() and "buffer-2 has it now" in first.words()
        assert await player.records() == before
        await play_to_the_end(player, 1)
        assert second.process.poll() is None
