"""Why a service failed, out of what it logged."""

import json

from shared.runtime import failure_summary
from tests.support.tables import table

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
