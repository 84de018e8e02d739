"""What is said of a program's processes: one that is gone, whose number another has, that is frozen."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

from shared.process.child_process import FROZEN_SECONDS, ProcessWatch, SeenProcess, descendants, parsed, seen
from tests.support.waiting import until

SERVER = SeenProcess(pid=10, parent=1, started=100, state="S", name="server")
CHILD = SeenProcess(pid=11, parent=10, started=120, state="S", name="sglang::detoken")


def watch() -> ProcessWatch:
    made = ProcessWatch()
    made.add([SERVER, CHILD])
    return made


def test_processes_that_are_there_are_no_fault() -> None:
    assert watch().fault([replace(SERVER, state="R"), CHILD, replace(CHILD, pid=12)], 0.0) == ""


def test_one_that_is_gone_is_named_as_are_zombies_and_those_whose_number_is_anothers() -> None:
    lost = "has lost its process 11 (sglang::detoken)"
    assert watch().fault([SERVER], 0.0) == lost
    assert watch().fault([SERVER, replace(CHILD, state="Z")], 0.0) == lost
    assert watch().fault([SERVER, replace(CHILD, started=999)], 0.0) == lost


def test_one_that_is_stopped_for_long_is_frozen_and_one_that_goes_on_is_not() -> None:
    held, stopped = watch(), [SERVER, replace(CHILD, state="T")]
    assert held.fault(stopped, 0.0) == held.fault(stopped, FROZEN_SECONDS - 1) == ""
    assert held.fault([SERVER, CHILD], FROZEN_SECONDS) == ""
    assert held.fault(stopped, FROZEN_SECONDS + 1) == ""
    words = held.fault(stopped, 2 * FROZEN_SECONDS + 1)
    assert words == f"is frozen: its process 11 (sglang::detoken) has been stopped for {FROZEN_SECONDS:.0f} s"


def test_names_with_parentheses_are_read() -> None:
    line = "7 (a (b) c) S 3 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4242 99 88"
    assert parsed(line) == SeenProcess(pid=7, parent=3, started=4242, state="S", name="a (b) c")


async def test_real_processes_are_found_and_seen_stopping_and_ending() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        [found] = [one for one in descendants(os.getpid()) if one.pid == process.pid]
        process.send_signal(signal.SIGSTOP)
        await until(lambda: next(seen([process.pid])).state == "T", "the process to be stopped")
        held = ProcessWatch()
        held.add([found])
        assert held.fault(seen(held.pids), time.monotonic()) == ""
        process.kill()
        await until(lambda: held.fault(seen(held.pids), time.monotonic()).startswith("has lost"), "the process to end")
    finally:
        process.kill()
        process.wait()
