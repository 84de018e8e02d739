"""Engines' processes: how they fail to start, how they end, none of which stays behind; and a real engine that loses one of them."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineProcess, engine_command
from services.rollout.engine.transport import EngineUnreachable
from services.rollout.replica import Replica
from shared.bus import runs, streams
from shared.bus.connection import Bus
from shared.process.child_process import ProcessEnded, SeenProcess, descendants, group_members
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey, free_port
from shared.runtime.tasks import cancelled
from shared.schema.service_messages import ServiceEvent
from shared.service.service_base import Service
from tests.integration.engine.conftest import START_SECONDS, Checkpoints
from tests.integration.engine.load import generating
from tests.support.run_config import run_config
from tests.support.waiting import until

SERVICE = """
import asyncio, sys, time
from pathlib import Path
from services.rollout.engine.engine_process import EngineCommand
from services.rollout.engine.engine_process import EngineProcess

engine = EngineProcess({command}, Path({log!r}))
print(engine.pid, engine.receiver, flush=True)
asyncio.run(engine.ready({seconds}))
print("ready", flush=True)
time.sleep(600)
"""
"""A process that holds an engine, as the rollout service does, and is killed."""


@pytest.mark.extra
async def test_nothing_of_an_engine_outlives_a_killed_service(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """kill -9 of the service, with a real engine that is generating: its scheduler and detokenizer end too."""
    command = engine_command(checkpoint(0).path, free_port(), device="cpu")
    code = SERVICE.format(command=command, log=str(tmp_path / "engine.log"), seconds=START_SECONDS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            pid, directory = process.stdout.readline().split()
            group, receiver = int(pid), Path(directory)
            assert process.stdout.readline().strip() == "ready", (tmp_path / "engine.log").read_text()[-2000:]
            assert receiver.stat().st_mode & 0o777 == 0o700  # whoever gets in there can change weights
            assert any("scheduler" in " ".join(psutil.Process(pid).cmdline()) for pid in group_members(group))
            assert len(group_members(group)) == 4  # watchdog, server, scheduler, detokenizer
            async with await EngineClient.connect(receiver) as client, generating(client, 2) as running:
                process.kill()
                process.wait(60)
                await until(lambda: not group_members(group), "the end of the engine's processes")
                with pytest.raises(EngineUnreachable, match=r"/generate: ServerDisconnectedError"):
                    await running.task
            assert not receiver.exists()
        finally:
            process.kill()


@pytest.mark.extra
async def test_an_engine_that_ends_on_sigterm_is_given_the_time(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """A graceful stop of a real engine, which looks for the signal every 5 s."""
    engine = EngineProcess(engine_command(checkpoint(0).path, free_port(), device="cpu"), tmp_path / "engine.log")
    try:
        await engine.ready(START_SECONDS)
        engine.stop(120)
        assert engine.members() == [] and not engine.receiver.exists()
        assert any("SIGTERM received" in line for line in engine.last_lines())
    finally:
        engine.stop(0)


@pytest.mark.extra
async def test_what_ends_an_engine_at_its_start_is_quoted(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """The server's own process ends on a signal; the reason is the scheduler's."""
    command = engine_command(checkpoint(0).path, free_port(), device="cpu", flags={"max-total-tokens": 1})
    engine = EngineProcess(command, tmp_path / "engine.log")
    with pytest.raises(ProcessEnded, match="with signal 9: AssertionError: max_running_request is zero"):
        await engine.ready(START_SECONDS)
    engine.stop(0)
    assert engine.members() == []


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
