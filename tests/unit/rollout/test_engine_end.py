"""Where an engine of its own process lies, and why it has ended, by its log."""

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from services.rollout.engine.engine_process import EngineProcess, engine_end
from services.rollout.engine.launch_command import EngineCommand
from shared.process.child_process import descendants
from shared.runtime.errors import ConfigError

Value = TypeVar("Value")

MISSED = "[2026-11-25 12:00:00] Subprocess detokenizer (pid=4711) crashed with exit code -9. Triggering SIGQUIT."
TRACE = ["Traceback (most recent call last):", '  File "scheduler.py", line 1, in run', "    step()", "ValueError: no such layer"]


def test_the_missed_process_is_named_and_not_what_was_raised_after_it() -> None:
    assert engine_end(["ready", MISSED, *TRACE]) == "Subprocess detokenizer (pid=4711) crashed with exit code -9"
    assert engine_end([MISSED]) == "Subprocess detokenizer (pid=4711) crashed with exit code -9"


def test_what_was_raised_before_it_is_told_too() -> None:
    told = engine_end([*TRACE, "ending", MISSED])
    assert told == "Subprocess detokenizer (pid=4711) crashed with exit code -9, after ValueError: no such layer"


def test_without_it_the_last_exception_or_line_is_told() -> None:
    assert engine_end([*TRACE, "ending"]) == "ValueError: no such layer"
    assert engine_end(["one", "two"]) == "two"
    assert engine_end([]) == ""


def test_an_engine_that_ends_itself_is_told_with_its_own_words(tmp_path: Path) -> None:
    """SGLang misses one of its processes and ends the others; which of them is seen to be gone first is chance."""
    log = tmp_path / "log"
    engine = EngineProcess(EngineCommand(["sh", "-c", f"echo '{MISSED}'; exec sleep 600"], {}), log)
    try:
        waited_for(lambda: MISSED in (log.read_text() if log.exists() else ""))
        [server] = waited_for(lambda: [one.pid for one in descendants(engine.pid) if one.parent == engine.pid])
        assert engine.fault() == ""
        os.kill(engine.pid, signal.SIGSTOP)  # what watches it does not end yet
        os.kill(server, signal.SIGKILL)
        assert waited_for(engine.fault) == "is ending: Subprocess detokenizer (pid=4711) crashed with exit code -9"
    finally:
        engine.kill()


def waited_for(look: Callable[[], Value]) -> Value:
    """What a look finds, once it finds anything."""
    end = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def test_a_directory_too_long_for_sockets_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match=r"TMPDIR = '.*x{100}': at most 68 bytes: an engine's sockets lie below it"):
        EngineProcess(EngineCommand(["true"], {}), tmp_path / "log")
    assert not list(long.iterdir())
