"""How a run is shown: pace, plain lines, the panel; what goes wrong while it continues, and which waits its log tells of."""

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from structlog.testing import capture_logs

from myxo.display.progress_display import Display, Pace, panel, what_happened
from myxo.launch import launcher
from shared.config.run_config import RunConfig
from shared.runtime.safe_text import LINE_LIMIT, duration, shortened_line
from shared.schema.service_messages import ServiceStatus
from shared.view import run_view as service_failures
from shared.view.alarms import Alarm, AlarmKind
from shared.view.live_services import InstanceStatus
from shared.view.run_view import (
    LATELY_SECONDS,
    WAITED,
    WENT_ON,
    EvaluationLine,
    InstanceLine,
    RunView,
    ServiceError,
    ServiceFailures,
    Troubles,
    troubles,
)
from shared.view.stall import NATS, Away, RunSituation
from tests.support.run_config import SERVED, run_config
from tests.support.tables import table

VIEW = RunView(
    run="tiny",
    steps=3,
    of=10,
    bound=1,
    reward=0.5,
    evaluations={"gsm8k": EvaluationLine(0.25, 2), "math": EvaluationLine(-1.0, 0, newest=1, lag=2, missing=3, prompts=8)},
    staleness_mean=0.75,
    staleness_max=1,
    generated_per_s=12_345,
    trained_per_s=800,
    computed_per_s=1100,
    live_version=3,
    in_flight=8,
    queues={"task": (3, 4)},
    services=(InstanceLine("rollout", "rollout-0", "ready", 3, 2, "4 groups"),),
    restarts=2,
)


def test_pace_needs_two_finished_steps() -> None:
    pace = Pace()
    pace.note(0, 5)
    assert pace.left(10) is None, "what was finished before this launch says nothing"
    pace.note(100, 6)
    assert pace.left(10) is None
    pace.note(102, 7)
    assert pace.left(10) == pytest.approx(6.0)
    pace.note(109, 7)
    assert pace.left(10) == pytest.approx(6.0)
    pace.note(110, 1)
    assert pace.left(10) is None, "the run was begun anew"


def test_pace_counts_steps_that_were_not_seen_one_by_one() -> None:
    pace = Pace()
    for now, steps in ((0, 0), (1, 1), (5, 9)):
        pace.note(now, steps)
    assert pace.left(19) == pytest.approx(5.0)


def test_pace_is_of_late() -> None:
    pace = Pace()
    for step in range(100):
        pace.note(step * 10.0, step)
    for step in range(100, 140):
        pace.note(1000.0 + step, step)
    assert pace.left(150) == pytest.approx(11.0)


@table(("seconds", "text"), [(0, "0s"), (59.9, "59s"), (130, "2m10s"), (3600 * 3 + 300, "3h05m")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def lines(*shown: tuple[RunView, float]) -> list[str]:
    out = io.StringIO()
    plain = Display(Console(file=out), started=0.0)
    for view, now in shown:
        plain.show(view, now)
    return out.getvalue().splitlines()


def test_a_plain_line_says_it_all() -> None:
    (line,) = lines((VIEW, 61.0))
    for part in (
        "step 3/10",
        "reward 0.500",
        "eval/gsm8k 0.250 (v2)",
        "eval/math -1.000 (v0 to v1, 2 behind, 5 of 8 prompts)",
        "staleness 0.75 mean 1 max",
        "v3",
        "replicas 1/1",
        "restarts 2",
    ):
        assert part in line
    for part in ("gen 12.3k tokens/s", "train 800 tokens/s", "queues task 3+4", "1m01s"):
        assert part in line


def test_no_new_line_where_nothing_happened() -> None:
    busy = RunView(run="tiny", steps=3, of=10, bound=1, generated_per_s=1.0)
    busier = RunView(run="tiny", steps=3, of=10, bound=1, generated_per_s=2.0)
    assert len(lines((busy, 0.0), (busier, 60.0))) == 1


def test_seconds_that_pass_are_nothing_that_happened() -> None:
    waiting = [RunView(run="tiny", steps=0, of=10, bound=1, waiting_for=f"rollout-0 to start ({s} s so far)") for s in (1, 60)]
    assert len(lines((waiting[0], 0.0), (waiting[1], 60.0))) == 1


def test_plain_lines_keep_their_distance_but_the_end_is_told() -> None:
    views = [RunView(run="tiny", steps=step, of=10, bound=1) for step in range(11)]
    said = lines(*((view, view.steps * 1.0) for view in views))
    assert [line.split()[1] for line in said] == ["0/10", "5/10", "10/10"]


def test_the_panel_shows_figures_and_services() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(panel(VIEW, 70.0, 30.0))
    text = out.getvalue()
    for part in (
        "3/10",
        "0.500",
        "eval/gsm8k",
        "0.250 (v2)",
        "-1.000 (v0 to v1,",
        "800 tokens/s, 1100 computing",
        "0.75 mean, 1 max of 1",
        "rollout-0",
        "4 groups",
        "restarted 2×",
        "1m10s, about 30s left",
    ):
        assert part in text, part


def test_an_empty_panel_says_what_it_waits_for() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(panel(RunView(run="tiny", steps=0, of=10, bound=1, waiting_for="SFT step 3/10")))
    assert "waiting for SFT step 3/10" in out.getvalue()


def test_a_terminal_gets_the_live_panel_and_a_file_plain_lines() -> None:
    out = io.StringIO()
    shown = Display(Console(file=out, force_terminal=True, width=100), started=0.0)
    shown.show(VIEW, 1.0)
    shown.show(VIEW, 2.0)
    shown.close()
    assert "\x1b[1A" in out.getvalue(), "the second panel is drawn over the first"
    (line,) = lines((VIEW, 1.0), (VIEW, 2.0))
    assert "\x1b" not in line


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


BEGAN = 1_000_000.0


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_config(tmp_path)


def statuses(steps: float, *, starting: bool) -> Sequence[ServiceStatus]:
    common = {"host": "h", "pid": 1, "http": "", "at": BEGAN}
    return [
        ServiceStatus(service="buffer", instance="buffer-0", state="ready", gauges={"trained_steps": steps, "live_version": 1}, **common),
        ServiceStatus(service="trainer", instance="trainer-0", state="starting" if starting else "ready", **common),
        *(ServiceStatus(service=kind, instance=f"{kind}-0", state="ready", version=1, **common) for kind in ("rollout", "reward")),
    ]


def test_of_waits_that_follow_each_other_without_a_step_one_is_told(config: RunConfig) -> None:
    report = launcher.WaitReport()
    with capture_logs() as logs:
        for second in range(40):
            report.see(RunSituation.of(config, statuses(3, starting=second % 2 == 0)), BEGAN + second)
        told = [entry for entry in logs if entry["event"] == "run_waits"]
        assert len(told) == 1 and "no new step for 15s" in told[0]["waiting_for"], told
        for second in range(40, 80):
            report.see(RunSituation.of(config, statuses(4 + second, starting=second % 2 == 0)), BEGAN + second)
        assert [entry for entry in logs if entry["event"] == "run_waits"] == told, "a run that makes steps is told of no more"


def test_a_run_of_myxo_serve_tells_of_no_wait_for_its_clients(tmp_path: Path) -> None:
    config, report = run_config(tmp_path, **SERVED), launcher.WaitReport()
    common = {"host": "h", "pid": 1, "http": "", "at": BEGAN, "state": "ready"}
    services = [ServiceStatus(service=kind, instance=f"{kind}-0", **common) for kind in ("rollout", "trainer", "gateway")]
    with capture_logs() as logs:
        for second in range(0, 9000, 100):
            report.see(RunSituation.of(config, services), BEGAN + second)
    assert (logs, report.events) == ([], []) and report.status().doing[0].what == "commands of clients"


@pytest.mark.parametrize(("away", "seconds", "what"), [(True, 2, WENT_ON), (False, 20, WAITED)])
def test_only_waits_that_no_healthy_run_has_count_as_wrong(config: RunConfig, away: bool, seconds: int, what: str) -> None:
    report, services = launcher.WaitReport(), statuses(3, starting=not away)
    servers = {NATS: Away(BEGAN, "no answer")} if away else {}
    for second in range(seconds + 1):
        report.see(RunSituation.of(config, services, away=servers), BEGAN + second)
    report.see(RunSituation.of(config, statuses(4, starting=False)), BEGAN + seconds)
    [event] = report.events
    found = ServiceFailures()
    found.take(event)
    assert (event.what, len(found.waits)) == (what, what == WENT_ON)
