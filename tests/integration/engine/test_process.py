"""Engines' processes: how they fail to start, how they end, and that none stays behind. How any process does is tested apart."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineProcess, engine_command
from services.rollout.engine.transport import EngineUnreachable
from shared.process.child_process import ProcessEnded, group_members
from shared.process.embedded_servers import free_port
from tests.integration.engine.conftest import START_SECONDS, Checkpoints
from tests.integration.engine.load import generating
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
