"""What is known of a process: whether it is gone or frozen, and why it failed."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

from shared.process.child_process import FROZEN_SECONDS, ProcessWatch, SeenProcess, descendants, parsed, seen
from shared.runtime import failure_summary
from tests.support.tables import table
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


# --- why a service failed, out of what it logged

TRACEBACK = """Traceback (most recent call last):
  File "x.py", line 3, in <module>
    raise OSError(28, "No space left on device")
OSError: [Errno 28] No space left on device"""


def line(event: str, level: str = "error", **fields: object) -> str:
    return json.dumps({"event": event, "level": level, **fields})


@table(
    ("lines", "reason"),
    [
        ([], ""),
        (["loading", "no such GPU"], "no such GPU"),
        ([line("joined", "info"), "killed"], "killed"),
        (TRACEBACK.splitlines(), "OSError: [Errno 28] No space left on device"),
        ([line("failed", error="x did not come", kind="DeadlineExceeded"), line("bye", "info")], "x did not come"),
        ([line("failed", exception=TRACEBACK)], "OSError: [Errno 28] No space left on device"),
        ([line("died", what="thread x", error="KeyError: 'a'"), line("failed", error="loop is closed")], "thread x: KeyError: 'a'"),
        ([line("failed", error="the cause"), line("torchrun says: exit code 1")], "the cause"),
        ([line("checkpoint_failed", error="disk"), line("later", "warning")], "checkpoint_failed: disk"),
        ([line("checkpoint_failed", error="disk"), *TRACEBACK.splitlines()], "OSError: [Errno 28] No space left on device"),
        (["torch.OutOfMemoryError: CUDA out of memory", "Aborted"], "torch.OutOfMemoryError: CUDA out of memory"),
    ],
)
def test_the_reason_is_the_first_cause_that_was_logged(lines: list[str], reason: str) -> None:
    assert failure_summary.of_log(lines) == reason


def test_a_reason_is_one_short_line() -> None:
    reason = failure_summary.of_event({"event": "failed", "error": "a\nb " + "x" * 1000})
    assert reason.startswith("a b xxx") and len(reason) == failure_summary.LONGEST


def test_numbers_addresses_and_ids_make_no_other_kind() -> None:
    assert failure_summary.kind("g00000012: 33 tokens at 0x7f2a") == failure_summary.kind("g00000013: 35 tokens at 0x7e11")
    assert failure_summary.kind("no space left") != failure_summary.kind("no such file")


def test_the_most_frequent_kinds_come_first_with_an_example() -> None:
    reasons = {f"group {number} of 9 tokens": 2 for number in range(50)} | {"a hook raised": 3, "other": 1}
    assert failure_summary.most(reasons, 2) == [("group 0 of 9 tokens", 100), ("a hook raised", 3)]
