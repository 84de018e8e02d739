"""Engines' processes: how they fail to start, how they end, and that none stays behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_errors import EngineStartError, EngineUnreachable
from services.rollout.engine.engine_process import LEASH, EngineProcess, group_members
from services.rollout.engine.launch_command import EngineCommand, engine_command
from shared.runtime.embedded_servers import free_port
from shared.runtime.errors import DeadlineExceeded
from tests.integration.engine.conftest import START_SECONDS, Checkpoints
from tests.integration.engine.load import generating
from tests.support.waiting import until

SERVICE = """
import asyncio, sys, time
from pathlib import Path
from services.rollout.engine.launch_command import EngineCommand, engine_command
from services.rollout.engine.engine_process import EngineProcess

engine = EngineProcess({command}, Path({log!r}))
engine.start()
print(engine.group, flush=True)
{then}
time.sleep(600)
"""
"""A process that holds an engine, as the rollout service does, and is killed."""

FAMILY = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"
"""A command with a child that does not care when its parent ends."""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A service that holds a stand-in for an engine: a process and its child."""
    command = EngineCommand([sys.executable, "-c", FAMILY], {}, "http://127.0.0.1:9")
    process = service(repr(command), "", tmp_path)
    yield process
    process.kill()
    process.wait(60)


def service(command: str, then: str, directory: Path) -> subprocess.Popen[str]:
    code = SERVICE.format(command=command, then=then, log=str(directory / "engine.log"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def test_nothing_of_an_engine_outlives_a_killed_service(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """kill -9 of the service, with a real engine that is generating: its scheduler and detokenizer end too."""
    command = engine_command(checkpoint(0).path, free_port(), device="cpu", threads=1)
    then = f"asyncio.run(engine.wait_ready({START_SECONDS})); print('ready', flush=True)"
    process = service(repr(command), then, tmp_path)
    try:
        group = int(first_line(process))
        assert first_line(process) == "ready", (tmp_path / "engine.log").read_text()[-2000:]
        assert any("scheduler" in " ".join(psutil.Process(pid).cmdline()) for pid in group_members(group))
        assert len(group_members(group)) == 4  # leash, server, scheduler, detokenizer
        async with await EngineClient.connect(command.url) as client, generating(client, 2) as running:
            process.kill()
            process.wait(60)
            await until(lambda: not group_members(group), "the end of the engine's processes")
            with pytest.raises(EngineUnreachable, match=r"/generate: ServerDisconnectedError"):
                await running.task
    finally:
        process.kill()
        process.wait(60)


async def test_nothing_outlives_a_service_killed_while_starting(holder: subprocess.Popen[str]) -> None:
    group = int(first_line(holder))
    await until(lambda: len(group_members(group)) == 3, "the leash, the command and its child")
    receiver = Path(psutil.Process(group).environ()["MYXO_RECEIVER"])
    assert receiver.exists()
    holder.kill()
    holder.wait(60)
    await until(lambda: not group_members(group), "the end of the group")
    assert not receiver.exists()


async def test_the_command_dies_with_its_leash(holder: subprocess.Popen[str]) -> None:
    group = int(first_line(holder))
    await until(lambda: len(group_members(group)) == 3, "the leash, the command and its child")
    os.kill(group, signal.SIGKILL)
    await until(lambda: len(group_members(group)) == 1, "the end of the command")  # its child is left to EngineProcess
    os.killpg(group, signal.SIGKILL)


async def test_a_dead_commands_children_are_killed(tmp_path: Path) -> None:
    engine = EngineProcess(EngineCommand([sys.executable, "-c", FAMILY], {}, "http://127.0.0.1:9"), tmp_path / "log")
    engine.start()
    assert engine.alive()
    await until(lambda: len(engine.processes()) == 3, "the leash, the command and its child")
    command = next(pid for pid in engine.processes() if psutil.Process(pid).ppid() == engine.group)
    os.kill(command, signal.SIGKILL)
    await until(lambda: not engine.alive(), "the end of the leash")
    await until(lambda: not engine.processes(), "the end of the child")
    await engine.stop(0)


async def test_stop_ends_everything_and_can_be_repeated(tmp_path: Path) -> None:
    engine = EngineProcess(EngineCommand([sys.executable, "-c", FAMILY], {}, "http://127.0.0.1:9"), tmp_path / "log")
    await engine.stop(0)
    engine.start()
    await until(lambda: len(engine.processes()) == 3, "the leash, the command and its child")
    receiver = engine.receiver
    assert receiver is not None and receiver.stat().st_mode & 0o777 == 0o700  # whoever gets in there can change weights
    await engine.stop(30)
    assert engine.processes() == [] and not engine.alive()
    assert not receiver.exists()
    await engine.stop(0)
    with pytest.raises(EngineStartError, match="started already"):
        engine.start()


async def test_an_engine_that_ends_on_sigterm_is_given_the_time(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """A graceful stop of a real engine, which looks for the signal every 5 s."""
    command = engine_command(checkpoint(0).path, free_port(), device="cpu", threads=1)
    engine = EngineProcess(command, tmp_path / "engine.log")
    engine.start()
    try:
        await engine.wait_ready(START_SECONDS)
        await engine.stop(120)
        assert engine.processes() == []
        assert "SIGTERM received" in engine.log_tail(200)
    finally:
        await engine.stop(0)


async def test_a_bad_flag_is_quoted(checkpoint: Checkpoints, tmp_path: Path) -> None:
    flags = {"attention-backend": "abacus"}
    command = engine_command(checkpoint(0).path, free_port(), device="cpu", flags=flags)
    engine = EngineProcess(command, tmp_path / "engine.log")
    engine.start()
    with pytest.raises(EngineStartError, match=r"before it was ready, with status 2: .* invalid choice: 'abacus'"):
        await engine.wait_ready(START_SECONDS)
    assert engine.processes() == []


async def test_what_kills_the_scheduler_is_quoted(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """The server's own process ends on a signal; the reason is the scheduler's."""
    command = engine_command(checkpoint(0).path, free_port(), device="cpu", flags={"max-total-tokens": 1})
    engine = EngineProcess(command, tmp_path / "engine.log")
    engine.start()
    with pytest.raises(EngineStartError, match=r"with status 137 \(SIGKILL\): AssertionError: max_running_request is zero"):
        await engine.wait_ready(START_SECONDS)
    assert engine.processes() == []


async def test_an_engine_that_does_not_answer(tmp_path: Path) -> None:
    command = EngineCommand(
        [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(600)"], {}, f"http://127.0.0.1:{free_port()}"
    )
    engine = EngineProcess(command, tmp_path / "engine.log")
    engine.start()
    try:
        await until(lambda: "loading" in engine.log_tail(), "its first line")
        with pytest.raises(DeadlineExceeded, match=r"(?s)a first generation did not come from .* within 0.5 s.*loading"):
            await engine.wait_ready(0.5)
    finally:
        await engine.stop(0)
    assert engine.processes() == []


async def test_a_taken_port_is_noticed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EngineStartError, match="somebody listens there"):
            EngineProcess(EngineCommand(["true"], {}, url), tmp_path / "log").start()


def test_the_leash_wants_a_session_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", str(LEASH), "true"], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "session of its own" in done.stderr


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_leash_ends_as_its_command_does(code: str, status: int) -> None:
    command = [sys.executable, "-I", "-S", str(LEASH), sys.executable, "-c", code]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.wait(60) == status
    assert process.stdin is not None
    process.stdin.close()
