"""Whether a process is dead is said only where it is certain; and how much memory is free."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.runtime import host
from shared.runtime.host import certainly_dead, host_memory, process_mark

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nobody can tell elsewhere")

TELLS = "from shared.runtime.host import process_mark; print(process_mark(), flush=True); input()"


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen([sys.executable, "-c", TELLS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, process.stdout.readline().strip()
    process.kill()
    process.wait(30)


def test_who_lives_is_not_dead(other: tuple[subprocess.Popen[str], str]) -> None:
    process, its_mark = other
    assert not certainly_dead(process_mark())
    assert not certainly_dead(its_mark)
    process.send_signal(signal.SIGSTOP)
    assert not certainly_dead(its_mark), "it may continue"


def test_who_was_killed_is_dead_before_and_after_its_parent_has_noticed(other: tuple[subprocess.Popen[str], str]) -> None:
    process, its_mark = other
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, its entry still in the table
    assert certainly_dead(its_mark)
    process.wait(30)
    assert certainly_dead(its_mark)


def test_a_process_id_that_somebody_else_has_now_is_no_life() -> None:
    boot, namespace, pid, started = process_mark().split("/")
    assert certainly_dead(f"{boot}/{namespace}/{pid}/{int(started) - 1}")


@pytest.mark.parametrize("place", [0, 1])
def test_nothing_is_said_of_other_machines_and_containers(place: int) -> None:
    parts = process_mark().split("/")
    parts[2] = str(2**22 + 1)  # more than a process id can be
    assert certainly_dead("/".join(parts))
    parts[place] = "elsewhere"
    assert not certainly_dead("/".join(parts))


def test_nonsense_is_nobody() -> None:
    for nonsense in ("", "///", "a/b/c/d", process_mark() + "/1", "/".join([*process_mark().split("/")[:2], "0", "1"])):
        assert not certainly_dead(nonsense), nonsense


def test_files_that_a_container_has_read_take_no_memory_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal: 64 kB\nMemAvailable: 32 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"}
    files |= {"/sys/fs/cgroup/memory.max": "10000\n", "/sys/fs/cgroup/memory.current": "9500\n"}
    files["/sys/fs/cgroup/memory.stat"] = "anon 1500\nfile 8000\nshmem 1000\ninactive_anon 2500\ninactive_file 4000\nactive_file 3000\n"
    for path, text in files.items():
        (tmp_path / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path[1:]).write_text(text)
    monkeypatch.setattr(host, "Path", lambda path: tmp_path / path[1:])
    assert host_memory() == (10000, 7500), "a tmpfs, which is no file of a disk, does"
