"""A buffer whose store or ledger is full: it hands out no new work, says why, asks for a checkpoint, and continues once there is room."""

import asyncio
from pathlib import Path

import pytest

from shared.bus import streams
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.streams import scored_consumer
from shared.bus.work_queue import WorkQueue
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.schema.messages import BatchPending, Outcome, Wanted
from tests.integration.buffer.conftest import on_mortal_servers
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
