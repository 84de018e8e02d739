"""Processes that are begun before there is work for them, real ones: what they become is what multiprocessing would have spawned."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.rollout.engine.early_processes import DETOKENIZER, SCHEDULER, early_modules
from tests.support.tables import table
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 120.0

WORK = """
import os, resource, sys, time

IMPORTED = {"pid": os.getpid(), "seen": os.environ.get("SEEN")}

def report(connection, event, text):
    import __main__
    here = {"pid": os.getpid(), "parent": os.getppid(), "late": os.environ.get("LATE"), "gone": os.environ.get("GONE")}
    main = {"files": resource.getrlimit(resource.RLIMIT_NOFILE), "main": __main__.__name__, "ready": __main__.READY, "argv": sys.argv}
    connection.send(here | main | {"imported": IMPORTED, "length": len(text)})
    assert event.wait(60)

def leave(code):
    sys.exit(code)

def fail():
    raise ValueError("it fails")

def last(connection):
    connection.send(os.getpid())
    time.sleep(600)
"""

MAIN = """
import json, logging, multiprocessing, os, sys, time
from multiprocessing import spawn
from services.rollout.engine.early_processes import EarlyProcesses
READY = os.getpid()
def tell(**given):
    print(json.dumps(given), flush=True)
def begin(*modules, variables={}, late=("LATE", "GONE")):
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return EarlyProcesses(modules, variables, late)
def reported(text=""):
    reader, writer = multiprocessing.Pipe(duplex=False)
    event = multiprocessing.Event()
    process = multiprocessing.Process(target=work.report, args=(writer, event, text))
    process.start()
    writer.close()
    assert reader.poll(60)
    told = reader.recv()
    alive = process.is_alive()
    event.set()
    process.join(60)
    return told | {"alive": alive, "exitcode": process.exitcode, "is_process": process.pid == told["pid"]}
if __name__ == "__main__":
    early = begin(*MODULES)
    waiting = [one.pid for one in early._waiting]
import work
if __name__ == "__main__":
"""

Run = Callable[..., tuple[Any, str]]


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., list[str]]:
    """``script(code, modules)``: the command of a main module that begins processes of ``modules`` and continues with ``code``."""
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "other.py").write_text("from work import report, last\n")

    def command(code: str, modules: tuple[str, ...] = ("work",)) -> list[str]:
        lines = MAIN.replace("*MODULES", ", ".join(map(repr, modules))) + "".join(f"    {line}\n" for line in code.splitlines())
        (tmp_path / "main.py").write_text(lines)
        return [sys.executable, str(tmp_path / "main.py"), "--flag"]

    return command


@pytest.fixture
def run(script: Callable[..., list[str]], tmp_path: Path) -> Run:
    """``run(code, modules)``: what such a program tells, and its standard error."""

    def ran(code: str, modules: tuple[str, ...] = ("work",)) -> tuple[Any, str]:
        done = subprocess.run(script(code, modules), env=environment(tmp_path), capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    return ran


def environment(path: Path) -> dict[str, str]:
    named = {"SEEN": "first", "GONE": "still here", "ANOTHER": str(path / "another")}
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(path)])} | named


def test_one_becomes_the_process_that_is_started(run: Run) -> None:
    """It has imported before, gets variables and limits that were set since, a connection, an event and more bytes than sockets hold."""
    code = """
import resource
files = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] - 7, files[1]))
os.environ["LATE"] = "set since"
del os.environ["GONE"]
tell(waiting=waiting, parent=os.getpid(), files=files, told=reported("x" * 3_000_000))
"""
    answer, log = run(code)
    told = answer["told"]
    assert [told["pid"]] == answer["waiting"] and told["imported"] == {"pid": told["pid"], "seen": "first"}
    assert told["parent"] == answer["parent"] and told["late"] == "set since" and told["gone"] is None
    assert told["main"] == "__mp_main__" and told["ready"] == told["pid"]  # the main module ran in it, as in any spawned child
    assert told["files"] == [answer["files"][0] - 7, answer["files"][1]]
    assert told["length"] == 3_000_000 and told["argv"][1:] == ["--flag"]
    assert told["alive"] and told["is_process"] and told["exitcode"] == 0
    assert f"Process {told['pid']}, begun" in log and "runs work" in log


def test_its_end_is_seen_as_that_of_any_other(run: Run) -> None:
    code = """
codes = []
for target, arguments in ((work.leave, (3,)), (work.fail, ())):
    process = multiprocessing.Process(target=target, args=arguments)
    process.start()
    multiprocessing.connection.wait([process.sentinel], 60)
    process.join(60)
    codes.append(process.exitcode)
for end in ("kill", "terminate"):
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=work.last, args=(writer,))
    process.start()
    writer.close()
    assert reader.poll(60) and reader.recv() == process.pid in waiting
    assert not multiprocessing.connection.wait([process.sentinel], 0.05)
    assert process.is_alive() and process in multiprocessing.active_children()
    process.join(0.05)
    assert process.exitcode is None
    getattr(process, end)()
    process.join(60)
    assert not process.is_alive() and not multiprocessing.active_children()
    codes.append(process.exitcode)
tell(codes=codes)
"""
    answer, log = run("import multiprocessing.connection\n" + code, ("work",) * 4)
    assert answer["codes"] == [3, 1, -signal.SIGKILL, -signal.SIGTERM]
    assert "ValueError: it fails" in log


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("os.kill(waiting[0], 9)\nearly._waiting[0].wait()", "the early one has ended with -9"),
        ("os.environ['SEEN'] = 'second'", "variables have changed: SEEN"),
        ("del os.environ['SEEN']\nos.environ['NEW'] = '1'", "variables have changed: NEW, SEEN"),
        ("spawn.set_executable(os.environ['ANOTHER'])", "it needs another executable"),
        ("early._waiting[0].channel.close()", "handle is closed"),
    ],
)
def test_what_cannot_take_over_is_replaced(before: str, why: str, run: Run, tmp_path: Path) -> None:
    """A process is spawned as usual then, which sees the variables while it imports; the early one has ended."""
    another = tmp_path / "another"
    another.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')  # as numactl's, before the interpreter
    another.chmod(0o700)
    seen = {"variables have changed: SEEN": "second", "variables have changed: NEW, SEEN": None}.get(why, "first")
    code = f"{before}\ntold = reported()\ntell(waiting=waiting, left=[os.path.exists(f'/proc/{{one}}') for one in waiting], told=told)"
    answer, log = run(code)
    told = answer["told"]
    assert told["pid"] not in answer["waiting"] and told["exitcode"] == 0 and answer["left"] == [False]
    assert told["imported"]["seen"] == seen
    assert log.count("A process of work is spawned, not taken from those begun early") == 1 and why in log


def test_variables_that_imports_set_are_no_change(run: Run) -> None:
    code = "os.environ['BY_IMPORT'] = '1'\nearly.note_imported()\ntell(waiting=waiting, pid=reported()['pid'])"
    answer, _ = run(code)
    assert [answer["pid"]] == answer["waiting"]


def test_those_before_another_target_are_not_needed(run: Run) -> None:
    """The first of ``other`` tells that no more of ``work`` will be started; one of a third module, that none will."""
    code = """
reader, writer = multiprocessing.Pipe(duplex=False)
import other
other.last.__module__ = "other"
process = multiprocessing.Process(target=other.last, args=(writer,))
process.start()
assert reader.poll(60)
second = reader.recv()
left = [psutil.pid_exists(one) for one in waiting]
timer = multiprocessing.Process(target=time.sleep, args=(0,))
timer.start()
timer.join(60)
process.kill()
process.join(60)
tell(waiting=waiting, left=left, second=second, timer=timer.exitcode, end=[psutil.pid_exists(one) for one in waiting])
"""
    answer, _ = run("import psutil\n" + code, ("work", "other", "other"))
    assert answer["left"] == [False, True, True] and answer["second"] == answer["waiting"][1]
    assert answer["timer"] == 0 and answer["end"] == [False, False, False]


def test_arguments_that_cannot_be_pickled_are_refused_as_ever(run: Run) -> None:
    code = """
try:
    multiprocessing.Process(target=work.leave, args=(lambda: 0,)).start()
except Exception as error:
    tell(refused=type(error).__name__, left=[os.path.exists(f"/proc/{one}") for one in waiting])
"""
    answer, _ = run(code)
    assert answer["left"] == [False] and answer["refused"] in ("PicklingError", "AttributeError")


@pytest.mark.parametrize("end", ["killed", "over"])
async def test_those_without_work_end_with_their_parent(end: str, script: Callable[..., list[str]], tmp_path: Path) -> None:
    code = "tell(waiting=waiting)\n" + ("time.sleep(600)" if end == "killed" else "")
    with subprocess.Popen(script(code, ("work", "work")), env=environment(tmp_path), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            waiting = [psutil.Process(pid) for pid in json.loads(process.stdout.readline())["waiting"] if psutil.pid_exists(pid)]
            assert len(waiting) == 2 or end == "over"
        finally:
            if end == "killed":
                process.kill()
            process.wait(60)
        await until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in waiting), "their end")


def test_none_waits_for_ever(tmp_path: Path) -> None:
    """A parent that lives and gives no work."""
    code = """
import multiprocessing
from services.rollout.engine import early_processes
early_processes.WAIT_SECONDS = 0.1
mine, theirs = multiprocessing.Pipe()
early_processes.EarlyWork("json", theirs)._bootstrap(0)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1 and "No work has come within 0.1 s" in done.stderr


@table(
    ("arguments", "schedulers", "detokenizers"),
    [
        ("", 1, 1),
        ("--tp 2", 2, 1),
        ("--tensor-parallel-size=4 --pp-size 2", 8, 1),
        ("--tp-size 8 --nnodes 2 --node-rank 1 --dist-init-addr a:1", 4, 0),
        ("--tp 2 --detokenizer-worker-num 2", 2, 0),
        ("--dp-size 2 --tp 2 --enable-dp-attention", 0, 0),
        ("--tp 2 --enable-memory-saver", 0, 0),
        ("--numa-node 0 1", 0, 0),
        ("--config=engine.yaml", 0, 0),
        ("--tp many", 0, 0),
    ],
)
def test_the_processes_that_flags_ask_for(arguments: str, schedulers: int, detokenizers: int) -> None:
    assert early_modules(arguments.split()) == [SCHEDULER] * schedulers + [DETOKENIZER] * detokenizers
