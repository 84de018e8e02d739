"""What goes wrong in a run that continues, as panel, plain lines and exit report tell it."""

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from myxo.display.progress_display import Display, panel, what_happened
from shared.runtime.safe_text import LINE_LIMIT, shortened_line
from shared.schema.service_messages import ServiceStatus
from shared.view import run_view as service_failures
from shared.view.alarms import Alarm, AlarmKind
from shared.view.live_services import InstanceStatus
from shared.view.run_view import LATELY_SECONDS, RunView, ServiceError, Troubles, troubles

NOW = 1_700_000_000.0

STATUS = InstanceStatus("rollout", "rollout-0", 1, 3, True, 10.0, NOW, None, 1, "exit code 1: OSError: no space")


def service(instance: str, **fields: object) -> ServiceStatus:
    values = {"service": instance.split("-")[0], "instance": instance, "host": "h", "pid": 1, "http": "", "state": "ready", "at": NOW}
    return ServiceStatus.model_validate({**values, **fields})


DEAD = {"dead": 176.0, "dead_per_minute": 88.2, "eval_failed": 2.0}
BUFFER = service(
    "buffer-0", gauges={"dead": 176.0, "dead_per_minute": 88.2, "eval_failed": 2.0}, detail="rollout-0: the hook\nraised \x1b[2J"
)


def found(
    services: Sequence[ServiceStatus], instances: Sequence[InstanceStatus] = (), before: Troubles | None = None, disk: str = ""
) -> Troubles:
    return troubles(services, instances, [], before or Troubles(), disk)


def test_dead_groups_are_told_with_count_rate_and_reason() -> None:
    (line,) = found([BUFFER]).lines()
    assert line == "dead 176 groups and 2 held-out prompts (88/min): rollout-0: the hook raised \\x1b[2J"


def test_a_buffer_that_is_away_or_stands_by_hides_nothing() -> None:
    before = found([BUFFER])
    assert found([], [], before) == before
    assert found([service("buffer-1", state="standby", gauges={"dead": 0.0}), BUFFER], []) == before


def test_who_was_restarted_lately_is_told_with_its_error() -> None:
    assert found([], [STATUS]).lines() == ["rollout-0 restarts 3: exit code 1: OSError: no space"]
    assert found([], [replace(STATUS, lived=LATELY_SECONDS + 1)]).lines() == []
    assert found([], [replace(STATUS, lived=1e6, due_in=1.0)]).lines() != []


def test_an_error_that_a_living_service_has_logged_is_told_for_a_while() -> None:
    logged = service("reward-0", last_error="worker: died", last_error_at=NOW - 10)
    assert found([logged], []).lines() == ["reward-0: worker: died"]
    assert found([logged.model_copy(update={"last_error_at": NOW - 1e4})], []).lines() == []


def test_servers_and_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [ServiceError("nats-server", 0, ""), ServiceError("valkey-server", 2, "AOF: No space left")]
    assert troubles([], [], servers, Troubles(), "full").lines() == ["valkey-server restarts 2: AOF: No space left", "full"]
    assert service_failures.full_disk(tmp_path) == ""
    monkeypatch.setattr(service_failures, "FULL_BYTES", 1 << 80)
    assert service_failures.full_disk(tmp_path).startswith("No space left on device: ")


def test_a_reason_is_short() -> None:
    assert len(shortened_line("x" * 1000)) == LINE_LIMIT


def test_panel_and_plain_lines_show_alarms_with_what_to_do() -> None:
    view, out = RunView(run="tiny", steps=3, of=10, bound=1), io.StringIO()
    alarm = Alarm(AlarmKind.SAME_REWARD, "every reward of 3 steps is 0", "Nothing is learned.", "Compare.", "myxo samples tiny --step 2")
    Console(file=out, width=100).print(panel(view, alarms=[alarm]))
    assert re.findall(r"▲ .*?0|Compare|myxo samples tiny --step 2", out.getvalue()) == [alarm.lines()[0], "Compare", alarm.shown_by]
    plain = io.StringIO()
    display = Display(Console(file=plain), 0.0)
    for second in range(3):
        display.show(view, float(second), [alarm] if second < 2 else [])
    assert plain.getvalue().count(alarm.shown_by) == 1, "an alarm that still stands is not news"


def test_panel_and_plain_line_show_them() -> None:
    seen = Troubles(dead=5, dead_reason="why", errors=(ServiceError("x-0", 2, "because"),))
    view = RunView(run="tiny", steps=3, of=10, bound=1, troubles=seen)
    assert what_happened(view).endswith("dead 5 groups (0/min): why  x-0 restarts 2: because")
    out = io.StringIO()
    Console(file=out, width=100).print(panel(view))
    assert "dead 5 groups (0/min): why" in out.getvalue() and "x-0 restarts 2: because" in out.getvalue()
