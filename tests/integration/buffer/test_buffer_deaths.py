"""kill -9 of the buffer, of NATS and of Valkey under a run: the same batches, every group with one end, and the run finishes."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.bus import runs
from shared.bus.connection import RequestRefused
from shared.process.embedded_servers import EmbeddedNats, EmbeddedServer, EmbeddedValkey
from shared.runtime.errors import DeadlineExceeded
from shared.schema.ledger import VersionLive
from shared.schema.messages import Batch, RunDone
from tests.integration.buffer.conftest import SHORT, NewRun, on_mortal_servers
from tests.integration.buffer.player import Player
from tests.support.service_process import ServiceProcess
from tests.support.tables import rare
from tests.support.waiting import until


async def test_after_a_kill_every_step_gets_the_batch_it_had(new_run: NewRun) -> None:
    player = await new_run(rollout={"max_staleness": 3, "num_rollout": 5})
    with player.launch() as first:
        await player.ready(first)
        await player.live(0)
        await player.work_until(8)
        had = [await player.batch(step) for step in range(2)]
        await player.trained(0)
        had.append(await player.batch(2))
        await player.durable(1)
        first.kill()
    with player.launch() as second:
        await player.ready(second)
        assert [await player.batch(step) for step in (1, 2)] == had[1:]
        with pytest.raises(RequestRefused, match="the next batch is of step 3"):
            await player.ask(0)
        await player.trained(1)
        second.kill()
    with player.launch() as third:
        await player.ready(third)
        assert await player.batch(2) == had[2]
        await player.trained(2)
        assert (await player.batch(3)).step == 3

        async def version_3_is_recorded() -> bool:
            return (await player.audit()).live_version == 3

        await until(version_3_is_recorded, "the event of version 3 in the ledger")
        report = await player.audit()
        assert report.violations == []
        assert (report.steps, report.durable_steps) == (3, 1)


async def test_tasks_that_a_killed_buffer_did_not_send_are_sent(new_run: NewRun) -> None:
    """The admission is in the ledger, the tasks are not in the queue: the successor sends them."""
    player = await new_run()
    with player.launch() as first:
        await player.ready(first)
        await player.live(0)
        await player.work_until(4)
        first.kill()
    stream = player.names.task_stream
    await player.bus.js.purge_stream(stream)
    await player.live(1)  # nobody hears the event; the successor finds it in KV
    with player.launch() as second:
        await player.ready(second)
        await player.work_until(2)
        assert (await player.batch(0)).step == 0


async def play_on(player: Player, dice: random.Random) -> bool:
    """One thing that the rest of the run does next; True once the run is done."""
    step = await next_step(player)
    if step >= player.config.rollout.num_rollout:
        await player.durable(step)
        return isinstance(await player.ask(step), RunDone)
    await player.work(dice.randint(1, 4), version=max(0, player.version - dice.randint(0, 1)))
    answer = await player.ask(step)
    if isinstance(answer, Batch):
        await player.trained(step)
        if dice.random() < 0.5:
            await player.durable(step + 1)
    return False


async def next_step(player: Player) -> int:
    return (await player.audit()).steps


@pytest.mark.parametrize(("seed", "kills"), [(1, 2), rare(1, 4), rare(2, 4)])
async def test_a_run_with_the_buffer_killed_at_random_keeps_every_invariant(new_run: NewRun, seed: int, kills: int) -> None:
    dice = random.Random(seed)
    interval = 1 + seed % 2
    player = await new_run(rollout={"max_staleness": 1, "num_rollout": 6}, weights={"update_weights_interval": interval}, bus=SHORT)
    buffer = player.launch()
    deaths = 0

    async def tormentor() -> None:
        """Kills the buffer a while after it has come up, at any moment of its work, and starts the next."""
        nonlocal buffer, deaths
        while deaths < kills:
            await player.ready(buffer)
            await asyncio.sleep(dice.uniform(0.0, 1.0))
            buffer.kill()
            deaths += 1
            buffer = player.launch()

    killing = asyncio.create_task(tormentor())
    try:
        await player.live(0)
        done = False

        async def over() -> bool:
            nonlocal done
            with contextlib.suppress(DeadlineExceeded):
                done = done or await play_on(player, dice)
            return done and killing.done()

        await until(over, f"the end of the run after {deaths} deaths", deadline=240)
        await killing
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        buffer.__exit__()
    assert deaths == kills
    report = await player.audit()
    assert report.violations == []
    assert report.finished and report.in_flight == 0
    assert report.trained == 12
    assert await player.phase() == runs.FINISHED


async def test_a_buffer_beside_which_somebody_writes_stops_when_it_would_write(new_run: NewRun) -> None:
    """The ledger's own defence, behind the lease: a record that does not follow the writer's last one is refused."""
    player = await new_run(rollout={"max_staleness": 0})
    with player.launch() as first:
        await player.ready(first)
        await player.bus.publish(player.names.ledger(VersionLive.event()), VersionLive(version=0, at=time.time()))
        await player.live(0)
        assert await asyncio.to_thread(first.process.wait, 60) == 1
        assert "another writer is active" in first.words()
    with player.launch() as second:
        await player.ready(second)
        await player.work_until(2)
        assert (await player.batch(0)).step == 0
        assert (await player.audit()).violations == []


@pytest.mark.extra(each=True)
@pytest.mark.parametrize("victim", ["nats", "valkey"])
async def test_the_buffer_outlives_the_death_of_a_server(
    mortal_nats: EmbeddedNats,
    mortal_valkey: EmbeddedValkey,
    tiny_model: Path,
    tmp_path: Path,
    crash: Callable[[EmbeddedServer], None],
    victim: str,
) -> None:
    player, bus, store = await on_mortal_servers(mortal_nats, mortal_valkey, tmp_path, tiny_model)
    server: EmbeddedServer = mortal_nats if victim == "nats" else mortal_valkey
    with player.launch() as buffer:
        await player.ready(buffer)
        await player.live(0)
        for step in range(4):
            await player.work(3)
            crash(server)
            # lost acks bring work again that was done: whoever waits for a batch must keep working
            asking = asyncio.create_task(player.batch(step, working=True))
            await asyncio.sleep(0.3)
            server.start()
            assert (await asking).step == step
            await player.trained(step)
            await player.durable(step + 1)

        async def over() -> bool:
            return isinstance(await player.ask(4), RunDone)

        await until(over, "the end of the run")
        report = await player.audit()
        assert report.violations == [] and report.finished
        assert buffer.process.poll() is None
    await bus.close()
    await store.close()


async def test_bad_input_ends_a_service_with_code_2_and_one_line(new_run: NewRun, nats: EmbeddedNats, tmp_path: Path) -> None:
    """All of them at once."""
    player = await new_run()
    broken = tmp_path / "prompts.jsonl"
    broken.unlink()
    cases = [
        ("buffer", {"NATS_URL": "", "MYXO_RUN": "a"}, "NATS_URL = None: required"),
        ("buffer", {"NATS_URL": nats.url, "MYXO_RUN": ""}, "MYXO_RUN = ''"),
        ("reward", {"NATS_URL": nats.url, "MYXO_RUN": "Bad.Name"}, "MYXO_RUN = 'Bad.Name'"),
        ("reward", {"NATS_URL": nats.url, "MYXO_RUN": "never-made"}, "no run 'never-made' on the bus"),
        ("buffer", {"NATS_URL": nats.url, "MYXO_RUN": player.config.run.name}, f"data.prompt_data = '{broken}': cannot be read"),
    ]
    with contextlib.ExitStack() as stack:
        started = [ServiceProcess(name, tmp_path / f"{number}.log", run) for number, (name, run, _) in enumerate(cases)]
        for process, (name, _, told) in zip([stack.enter_context(one) for one in started], cases, strict=True):
            assert await asyncio.to_thread(process.process.wait, 200) == 2, process.words()
            words = process.words()
            assert words.startswith(f"{name}: ") and words.count("\n") == 1 and told in words
