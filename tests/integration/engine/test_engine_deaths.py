"""A real engine that loses one of its processes, or in which one stands still: it is ended as a whole, and another serves."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.rollout.replica import Replica
from shared.bus import runs, streams
from shared.bus.connection import Bus
from shared.process.child_process import SeenProcess, descendants, group_members
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.runtime.tasks import cancelled
from shared.schema.service_messages import ServiceEvent
from shared.service.service_base import Service
from tests.integration.engine.conftest import START_SECONDS, Checkpoints
from tests.support.run_config import run_config
from tests.support.waiting import until


@pytest.fixture
async def service(
    nats: EmbeddedNats, valkey: EmbeddedValkey, checkpoint: Checkpoints, run_name: str, tmp_path: Path
) -> AsyncIterator[Service]:
    """The service of a replica that serves the weights with which its engine starts."""
    bus = await Bus.connect(nats.url, "test")
    sections = {"debug": {"debug_rollout_only": True}, "rollout": {"rollout_device": "cpu"}}
    config = run_config(tmp_path, run={"name": run_name}, model={"hf_checkpoint": str(checkpoint(0).path)}, **sections)
    await runs.create(bus, config, valkey.url)
    made = Service("rollout", "rollout-1", run_name, bus, config, valkey.url)
    yield made
    await made.store.close()
    await bus.close()


@pytest.mark.extra
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        # SGLang may have noticed first, and does not wait for dumps
        ("sglang::detoken", signal.SIGKILL, r"it has lost its process {pid} \(sglang::detoken\)|Subprocess \S+ \(pid={pid}\) crashed"),
        ("sglang::schedul", signal.SIGSTOP, r"it is frozen: its process {pid} \(sglang::schedul\)"),
        ("sglang::detoken", signal.SIGSTOP, r"it is frozen: its process {pid} \(sglang::detoken\)"),
    ],
)
async def test_an_engine_that_is_not_whole_is_replaced(name: str, number: signal.Signals, words: str, service: Service) -> None:
    others = {process.pid for process in descendants(os.getpid())}
    replica = Replica(service)
    keeping = asyncio.create_task(replica.keep_engine())
    try:
        await until(lambda: replica.serving, "an engine that serves", START_SECONDS)
        victim = of_engine(others, name)
        group, life = os.getpgid(victim.pid), replica.incarnation
        os.kill(victim.pid, number)
        await until(lambda: replica.incarnation > life, "the replica to be fenced")
        assert not replica.serving
        await until(lambda: not group_members(group), "the end of the whole engine, the scheduler beside the detokenizer")
        await until(lambda: replica.serving, "another engine", START_SECONDS)
        assert os.getpgid(of_engine(others, name).pid) != group
    finally:
        await cancelled([keeping], 60.0)
    fences = streams.read(service.bus, service.subjects.events_stream, ServiceEvent, service.subjects.event("service", "fenced"))
    told = [event.detail async for _, event in fences]
    assert any(re.search(words.replace("{pid}", str(victim.pid)), detail) for detail in told), told


def of_engine(others: set[int], name: str) -> SeenProcess:
    """The process of that name in the test's own engine; session-wide engines have others."""
    [found] = [process for process in descendants(os.getpid()) if process.name == name and process.pid not in others]
    return found
