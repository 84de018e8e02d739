"""Why an engine has ended, by its log."""

from services.rollout.engine.engine_process import engine_end

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
