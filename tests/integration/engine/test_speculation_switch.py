"""A replica of ``speculation = "auto"`` measures its engine with speculation and without, and loses nothing where it is restarted."""

import asyncio
from pathlib import Path

import pytest

from services.rollout import speculation_switch
from services.rollout.in_flight import InFlight
from services.rollout.played_group import EngineGroups, PlayedGroup
from services.rollout.replica import Replica
from services.rollout.request_slots import RequestSlots
from services.rollout.rollout_service import GeneratedTokens
from services.rollout.speculation_switch import keep_worth
from shared.bus import runs, streams
from shared.bus.connection import Bus
from shared.bus.subjects import TRAIN
from shared.data.tokenizer import Tokenizer
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.runtime.tasks import cancelled
from shared.schema.messages import Sampling, Task
from shared.schema.service_messages import ServiceEvent
from shared.service.service_base import Service
from tests.integration.engine.conftest import START_SECONDS, Checkpoints
from tests.support.drafting_model import DraftingShape, write_drafting_model
from tests.support.run_config import run_config
from tests.support.waiting import until

SHAPE, ROWS, GROUPS, NEW = DraftingShape(), 1, 12, 300
PROMPT = list(range(5, 15))


class Work:
    """Groups that are generated one after another, ``GROUPS`` at once, by a replica; those that it hands on it is given again."""

    def __init__(self, service: Service, replica: Replica, tokenizer: Tokenizer) -> None:
        self._groups = EngineGroups(service, replica, tokenizer)
        self._slots, self.in_flight = RequestSlots.of(service.config), InFlight(service.config)
        self.begun, self.continued, self.ended = 0, list[PlayedGroup](), list[PlayedGroup]()

    async def generate(self) -> None:
        """Generates until cancelled."""
        sampling = Sampling(temperature=0.8, max_new_tokens=NEW)
        while True:
            self.begun += 1
            about = {"prompt": "p", "prompt_tokens": PROMPT, "environment": "math", "sampling": sampling, "min_version": 0}
            task, played = Task(group=f"g{self.begun}", n=ROWS, **about), PlayedGroup([], None)
            while not played.samples or played.stopped is not None:
                slots = self._slots.take(TRAIN, ROWS)
                try:
                    played = await self._groups.group(task, played.samples, self.in_flight, slots)
                finally:
                    slots.close()
                if played.stopped is not None:
                    self.continued.append(played)
                    await asyncio.sleep(0.1)
            self.ended.append(played)


@pytest.mark.extra
@pytest.mark.timeout(1200)
async def test_an_engine_measures_both_ways_and_loses_nothing(
    nats: EmbeddedNats, valkey: EmbeddedValkey, run_name: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_drafting_model(tmp_path / "model", SHAPE)
    for name, value in {"WINDOW_SECONDS": 1.5, "ENOUGH": 3, "LEAST_SECONDS": 3.0, "STARTS": 0.0}.items():
        monkeypatch.setattr(speculation_switch, name, value)
    bus = await Bus.connect(nats.url, "test")
    sections = {"debug": {"debug_rollout_only": True}, "rollout": {"rollout_device": "cpu", "speculation": "auto"}}
    config = run_config(tmp_path, run={"name": run_name}, model={"hf_checkpoint": str(tmp_path / "model")}, **sections)
    await runs.create(bus, config, valkey.url)
    service = Service("rollout", "rollout-1", run_name, bus, config, valkey.url)
    replica, generated = Replica(service), GeneratedTokens()
    work = Work(service, replica, Tokenizer(checkpoint(0).path))  # of the same characters

    async def count() -> None:
        while True:
            await generated.read(replica.client, 0)
            await asyncio.sleep(0.3)

    def runs_without() -> bool:
        for task in tasks:
            assert not task.done(), task.exception()
        return replica.serving and replica.client is not None and not replica.client.capabilities.speculates

    tasks = [asyncio.create_task(replica.keep_engine())]
    try:
        await until(lambda: replica.serving, "an engine that serves", START_SECONDS)
        assert not runs_without()
        tasks += [asyncio.create_task(work.generate()) for _ in range(GROUPS)] + [asyncio.create_task(count())]
        tasks.append(asyncio.create_task(keep_worth(service, replica, work.in_flight, lambda: generated.total)))
        await until(runs_without, "an engine without speculation", START_SECONDS)
        await until(lambda: service.metrics.values["speculation_gain"] != 1.0, "rates of both ways", START_SECONDS)
        ended = len(work.ended)
        await until(lambda: len(work.ended) > ended + GROUPS and replica.serving, "groups after it", START_SECONDS)
        assert not [task for task in tasks if task.done()]
    finally:
        await cancelled(tasks[1:], 60.0)
        await cancelled(tasks[:1], 60.0)
    told = streams.read(bus, service.subjects.events_stream, ServiceEvent, service.subjects.event("service", "speculation_off"))
    assert "plain decoding is measured for comparison" in [event.detail async for _, event in told][:1]
    assert any(len(sample.response) for played in work.continued for sample in played.samples), "tokens so far were lost"
    assert work.begun - len(work.ended) == GROUPS, "a group was lost"
    for played in work.ended:
        assert [sample.segments for sample in played.samples] == [[(0, len(sample.response), 0)] for sample in played.samples]
        assert {sample.finish for sample in played.samples} <= {"stop", "length"} and len(played.samples) == ROWS
    await service.store.close()
    await bus.close()
