"""A buffer whose store or ledger is full says why, waits and goes on; one whose groups all fail ends the run, with the reason."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from services.buffer.run_failure import STATE
from shared.bus import runs, streams
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.streams import scored_consumer
from shared.bus.subjects import TRAIN
from shared.bus.work_queue import WorkQueue
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.schema.ledger import GroupDead
from shared.schema.messages import Batch, BatchPending, Failed, Outcome, RunDone, Wanted
from shared.schema.service_messages import ServiceStatus
from tests.integration.buffer.conftest import Launched, on_mortal_servers
from tests.integration.buffer.player import Player
from tests.support.waiting import until


async def held_back(player: Player) -> str:
    statuses = await Registry(player.bus, player.config.run.name).alive("buffer")
    return statuses[0].held_back if statuses else ""


async def test_a_full_store_holds_admission_back_until_payloads_are_freed(
    mortal_nats: EmbeddedNats, tmp_path: Path, tiny_model: Path
) -> None:
    valkey = EmbeddedValkey(tmp_path / "small", max_bytes=8 << 20)
    valkey.start()
    player, bus, store = await on_mortal_servers(mortal_nats, valkey, tmp_path, tiny_model, registry_ttl=2.0)
    with player.launch() as buffer:
        await player.ready(buffer)
        await player.live(0)
        [waiting] = await player.all_tasks(1)
        await player.batch(0, working=True)
        junk: list[str] = []

        async def filled() -> str:
            while (await store.memory(5.0))[0] < 0.93 * (8 << 20):  # more than it is held back for: connections come and go, then as well
                await store.write({f"other:{len(junk)}": bytes(128 << 10)})
                junk.append(f"other:{len(junk)}")
            return await held_back(player)

        assert "no new group is admitted" in await until(filled, "a buffer that holds back")
        await player.say(Wanted(group=waiting.message.group, attempt=0, count=3, by="a rollout function"))
        await until(lambda: _heard(player), "the request for more groups", 60)
        assert (await player.audit()).admitted == 4, "a rollout function gets no more than others, and asks again"
        await waiting.hand_back()
        await player.trained(0)
        await player.batch(1, working=True)  # of groups that were admitted before
        await player.trained(1)
        admitted = (await player.audit()).admitted
        pending = await player.ask(2)
        assert isinstance(pending, BatchPending) and pending.store_full and "% full" in pending.waiting_for, pending
        assert (await player.audit()).admitted == admitted and not await player.waiting(), "no new work is handed out"
        await store.free(list(junk))
        await until(lambda: _nothing(player), "a buffer that continues")
        for step in (2, 3):
            await player.batch(step, working=True)
            await player.trained(step)
        report = await player.audit()
        assert report.ok and report.steps == 4 and not report.dead, report
    await bus.close()
    await store.close()
    valkey.stop()


async def _heard(player: Player) -> bool:
    return not any(await WorkQueue(player.bus, scored_consumer(player.config.run.name, player.config.bus), Outcome).depth())


async def _nothing(player: Player) -> bool:
    return not await held_back(player)


@pytest.mark.extra
async def test_a_full_ledger_holds_the_run_back_until_it_has_more_room(
    mortal_nats: EmbeddedNats, mortal_valkey: EmbeddedValkey, tmp_path: Path, tiny_model: Path
) -> None:
    player, bus, store = await on_mortal_servers(mortal_nats, mortal_valkey, tmp_path, tiny_model, registry_ttl=2.0)
    with player.launch() as buffer:
        await player.ready(buffer)
        await player.live(0)
        await until(lambda: player.waiting(), "tasks")
        await _ledger_bytes(player, bus, 1)
        await player.work_until(2)
        said = await until(lambda: held_back(player), "a buffer that holds back")
        assert "maximum bytes exceeded" in said and ".ledger." in said
        asking = asyncio.create_task(player.batch(0))
        assert buffer.process.poll() is None
        await streams.create(bus, player.config)  # what `myxo up` and `myxo submit` do: the limits of the config
        await asking
        await until(lambda: _nothing(player), "a buffer that continues")
        assert (await player.audit()).ok
    await bus.close()
    await store.close()


async def _ledger_bytes(player: Player, bus: Bus, limit: int) -> None:
    stream = (await bus.js.stream_info(player.names.ledger_stream)).config
    await bus.js.update_stream(stream.evolve(max_bytes=limit))


REASON = "rollout-0: rollout.custom_generate_function_path = x:y: ValueError: \x1b[2J no"


async def fail(player: Player, groups: int, kind: str = TRAIN) -> None:
    """Gives up so many groups, as a replica does whose hook raises."""
    done = 0

    async def enough() -> bool:
        nonlocal done
        for lease in await player.tasks(groups - done, kind):
            failed = Failed(group=lease.message.group, attempt=lease.message.attempt, reason=REASON[11:], by="rollout-0")
            await player.say(failed)
            await lease.ack()
            done += 1
        return done >= groups

    await until(enough, f"{groups} tasks to fail")


async def card(player: Player) -> ServiceStatus:
    [found] = await Registry(player.bus, player.config.run.name).alive("buffer")
    return found


async def failed(player: Player) -> str:
    async def over() -> str:
        phase, reason = await runs.phase_and_reason(player.bus, player.config.run.name)
        return reason if phase == runs.FAILED else ""

    reason: str = await until(over, "the run's failure")
    return reason


async def test_a_run_whose_groups_all_fail_ends_with_the_reason_and_goes_on_when_it_is_created_again(launched: Launched) -> None:
    player, buffer = await launched(rollout={"max_dead_in_a_row": 5})
    await player.live(0)
    await fail(player, 3)

    async def counted() -> bool:
        found = await card(player)
        return found.gauges.get("dead") == 3 and found.detail == REASON and found.gauges["dead_per_minute"] > 0

    await until(counted, "the card's count and reason")
    await player.work_until(1)  # one that is scored: the count starts anew
    await fail(player, 5)
    assert await failed(player) == f"5 groups in a row failed (rollout.max_dead_in_a_row = 5), the last one: {REASON}"
    answer = await player.ask(0)
    assert isinstance(answer, RunDone) and REASON in answer.reason
    assert (await card(player)).state == STATE or await until(lambda: says(player, STATE), "the card's state")

    buffer.kill()  # the failure is the run's, not the process's
    again = player.launch("buffer-2")
    try:
        await player.says(again, "buffer-2", STATE)
        assert isinstance(await player.ask(0), RunDone)
        await runs.create(player.bus, player.config, None)
        await player.says(again, "buffer-2", "ready")
        await fail(player, 2)
        assert isinstance(await player.batch(0, working=True), Batch)
        assert await player.phase() == runs.RUNNING
        assert (await player.audit()).violations == []
    finally:
        again.kill()


@pytest.mark.extra
async def test_outcomes_that_come_together_are_counted_in_their_order(launched: Launched) -> None:
    """A group that is scored between others that fail begins the count anew."""
    player, buffer = await launched(rollout={"max_dead_in_a_row": 3})
    await player.live(0)
    leases = await player.all_tasks(4)
    os.kill(buffer.process.pid, signal.SIGSTOP)
    try:
        for number, lease in enumerate(leases):
            task = lease.message
            failed = Failed(group=task.group, attempt=task.attempt, reason=REASON[11:], by="rollout-0")
            await player.say(await player.generate(task) if number == 2 else failed)
            await lease.ack()
    finally:
        os.kill(buffer.process.pid, signal.SIGCONT)

    async def last_one_decided() -> bool:
        return any(isinstance(record, GroupDead) and record.group == task.group for record in await player.records())

    await until(last_one_decided, "the last group's end")
    await player.work_until(1)  # the buffer still takes outcomes
    assert await player.phase() == runs.RUNNING


async def says(player: Player, state: str) -> bool:
    return (await card(player)).state == state
