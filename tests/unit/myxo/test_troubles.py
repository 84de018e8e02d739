"""What goes wrong in a run that goes on, as panel, plain lines and exit report tell it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from myxo.display.progress_display import panel, what_happened
from myxo.launch.supervisor import InstanceStatus
from myxo.run import troubles
from myxo.run.run_view import View
from myxo.run.troubles import ServiceError, Troubles
from shared.schema.messages import ServiceStatus

NOW = 1_700_000_000.0

STATUS = InstanceStatus("rollout", "rollout-0", 1, 3, True, 10.0, NOW, None, 1, "exit code 1: OSError: no space")


def card(instance: str, **fields: object) -> ServiceStatus:
    values = {"service": instance.split("-")[0], "instance": instance, "host": "h", "pid": 1, "http": "", "state": "ready", "at": NOW}
    return ServiceStatus.model_validate({**values, **fields})


BUFFER = card("buffer-0", gauges={"dead": 176.0, "dead_per_minute": 88.2, "eval_failed": 2.0}, detail="rollout-0: the hook\nraised \x1b[2J")


def test_dead_groups_are_told_with_count_rate_and_reason() -> None:
    (line,) = troubles.look([BUFFER], []).lines()
    assert line == "dead 176 groups and 2 held-out prompts (88/min): rollout-0: the hook raised \\x1b[2J"


def test_a_buffer_that_is_away_or_stands_by_hides_nothing() -> None:
    before = troubles.look([BUFFER], [])
    assert troubles.look([], [], before) == before
    assert troubles.look([card("buffer-1", state="standby", gauges={"dead": 0.0}), BUFFER], []) == before


def test_who_was_restarted_lately_is_told_with_its_error() -> None:
    assert troubles.look([], [STATUS]).lines() == ["rollout-0 restarts 3: exit code 1: OSError: no space"]
    assert troubles.look([], [replace(STATUS, lived=troubles.LATELY_SECONDS + 1)]).lines() == []
    assert troubles.look([], [replace(STATUS, lived=1e6, due_in=1.0)]).lines() != []


def test_an_error_that_a_living_service_has_logged_is_told_for_a_while() -> None:
    logged = card("reward-0", last_error="worker: died", last_error_at=NOW - 10)
    assert troubles.look([logged], []).lines() == ["reward-0: worker: died"]
    assert troubles.look([logged.model_copy(update={"last_error_at": NOW - 1e4})], []).lines() == []


def test_servers_and_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = troubles.with_servers(Troubles(), [("nats-server", 0, ""), ("valkey-server", 2, "AOF: No space left")], tmp_path)
    assert told.lines() == ["valkey-server restarts 2: AOF: No space left"]
    monkeypatch.setattr(troubles, "FULL_BYTES", 1 << 80)
    assert troubles.full_disk(tmp_path).startswith("No space left on device: ")


def test_a_reason_is_short() -> None:
    assert len(troubles.shown("x" * 1000)) == troubles.SHOWN


def test_panel_and_plain_line_show_them() -> None:
    told = Troubles(dead=5, dead_reason="why", errors=(ServiceError("x-0", 2, "because"),))
    view = View(run="tiny", steps=3, of=10, bound=1, troubles=told)
    assert what_happened(view).endswith("dead 5 groups (0/min): why  x-0 restarts 2: because")
    out = io.StringIO()
    Console(file=out, width=100).print(panel(view))
    assert "dead 5 groups (0/min): why" in out.getvalue() and "x-0 restarts 2: because" in out.getvalue()
