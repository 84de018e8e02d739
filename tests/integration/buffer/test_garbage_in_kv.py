"""Values of KV that turn to garbage while services are at work, or before they start."""

import asyncio
import time
from pathlib import Path

import pytest

from services.trainer.control_client import ControlClient
from shared.bus import runs
from shared.bus.bus_errors import BUS_ERRORS
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.schema.weight_messages import WeightsLive
from tests.integration.buffer.conftest import NewRun
from tests.integration.buffer.test_standby import LEASE_SECONDS, play_to_the_end, two_buffers
from tests.support.garbage import GARBAGE
from tests.support.service_process import ServiceProcess
from tests.support.waiting import until


@pytest.mark.extra(each=True)
async def test_a_buffer_at_work_and_one_on_standby_outlive_garbage_under_every_key(new_run: NewRun) -> None:
    player = await new_run(bus={"ack_wait": 2.0, "lease_duration": LEASE_SECONDS})
    run, names = player.config.run.name, player.names
    async with two_buffers(player) as (first, second):
        await player.live(0)
        await player.batch(0, working=True)
        keys = ("config.config", "config.phase", "config.data", "config.store", "weights.live", "leases.buffer", "services.buffer.buffer-2")
        for kind in ("no UTF-8", "nothing", "another message", "a huge version", "deep MessagePack"):
            for key in keys:
                await player.bus.js.publish(f"$KV.{run}-{key}", GARBAGE[kind])
            await asyncio.sleep(LEASE_SECONDS / 3)
        assert [process.process.poll() for process in (first, second)] == [None, None], first.words() + second.words()

        async def mended() -> bool:
            return await player.phase() == runs.RUNNING

        await until(mended, "the phase")
        await player.live(0)
        await play_to_the_end(player, 0)
        for process in (first, second):
            assert "Traceback" not in process.words()
        assert '"event": "phase_unreadable"' in first.words() and '"event": "value_unreadable"' in second.words()
        await player.bus.put(names.config_bucket, "phase", b"running?")

        async def finished() -> bool:
            return await player.phase() == runs.FINISHED

        await until(finished, "the phase of a run that is finished")


@pytest.mark.parametrize(
    ("key", "said"), [("config.config", "the config of run"), pytest.param("config.store", "the store of run", marks=pytest.mark.extra)]
)
async def test_a_service_that_finds_a_config_it_cannot_read_ends_with_code_2_and_one_line(
    new_run: NewRun, nats: EmbeddedNats, tmp_path: Path, key: str, said: str
) -> None:
    player = await new_run()
    run = player.config.run.name
    await player.bus.js.publish(f"$KV.{run}-{key}", b"\xff\xfe garbage")
    names = ("buffer", "rollout", "reward", "gateway", "trainer")
    processes = {name: ServiceProcess(name, tmp_path / f"{name}.log", {"NATS_URL": nats.url, "MYXO_RUN": run}) for name in names}
    try:
        for name, process in processes.items():
            code = await asyncio.to_thread(process.process.wait, 120)
            words = process.words()
            assert code == 2, (name, words)
            assert said in words and "Traceback" not in words, (name, words)
    finally:
        for process in processes.values():
            process.__exit__()


@pytest.mark.extra
async def test_a_trainer_writes_the_live_version_anew_and_reads_garbage_as_none(
    new_run: NewRun, nats: EmbeddedNats, valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    player = await new_run()
    run, names, bus = player.config.run.name, player.names, player.bus
    for name, value in {"NATS_URL": nats.url, "MYXO_RUN": run, "REDIS_URL": valkey.url}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # a link takes the signals of the process's main thread, which this is not
    news = WeightsLive(version=2, replicas=["r"], seconds=0.1, bytes=1, at=time.time())

    async def again() -> bool:
        try:
            return await runs.live_version(bus, run) == 2
        except BUS_ERRORS:
            return False

    await bus.put(names.weights_bucket, "live", b"")
    link = ControlClient()
    await asyncio.to_thread(link.__enter__)
    try:
        assert await asyncio.to_thread(link.live_version) == -1
        await asyncio.to_thread(link.weights_live, news)
        for kind, value in GARBAGE.items():
            await bus.js.publish(f"$KV.{names.weights_bucket}.live", value)
            await until(again, f"the version instead of {kind}")
    finally:
        await asyncio.to_thread(link.__exit__)
