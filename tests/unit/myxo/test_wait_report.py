"""Which waits of a launched run its log tells of."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from myxo.launch import launcher
from shared.config.run_config import RunConfig
from shared.schema.service_messages import ServiceStatus
from shared.view.run_view import WAITED, WENT_ON, ServiceFailures
from shared.view.stall import NATS, Away, RunSituation
from tests.support.run_config import SERVED, run_config

NOW = 1_000_000.0


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_config(tmp_path)


def statuses(steps: float, *, starting: bool) -> Sequence[ServiceStatus]:
    common = {"host": "h", "pid": 1, "http": "", "at": NOW}
    return [
        ServiceStatus(service="buffer", instance="buffer-0", state="ready", gauges={"trained_steps": steps, "live_version": 1}, **common),
        ServiceStatus(service="trainer", instance="trainer-0", state="starting" if starting else "ready", **common),
        *(ServiceStatus(service=kind, instance=f"{kind}-0", state="ready", version=1, **common) for kind in ("rollout", "reward")),
    ]


def test_of_waits_that_follow_each_other_without_a_step_one_is_told(config: RunConfig) -> None:
    report = launcher.WaitReport()
    with capture_logs() as logs:
        for second in range(40):
            report.see(RunSituation.of(config, statuses(3, starting=second % 2 == 0)), NOW + second)
        told = [entry for entry in logs if entry["event"] == "run_waits"]
        assert len(told) == 1 and "no new step for 15s" in told[0]["waiting_for"], told
        for second in range(40, 80):
            report.see(RunSituation.of(config, statuses(4 + second, starting=second % 2 == 0)), NOW + second)
        assert [entry for entry in logs if entry["event"] == "run_waits"] == told, "a run that makes steps is told of no more"


def test_a_run_of_myxo_serve_tells_of_no_wait_for_its_clients(tmp_path: Path) -> None:
    config, report = run_config(tmp_path, **SERVED), launcher.WaitReport()
    common = {"host": "h", "pid": 1, "http": "", "at": NOW, "state": "ready"}
    services = [ServiceStatus(service=kind, instance=f"{kind}-0", **common) for kind in ("rollout", "trainer", "gateway")]
    with capture_logs() as logs:
        for second in range(0, 9000, 100):
            report.see(RunSituation.of(config, services), NOW + second)
    assert (logs, report.events) == ([], []) and report.status().doing[0].what == "commands of clients"


@pytest.mark.parametrize(("away", "seconds", "what"), [(True, 2, WENT_ON), (False, 20, WAITED)])
def test_only_waits_that_no_healthy_run_has_count_as_wrong(config: RunConfig, away: bool, seconds: int, what: str) -> None:
    report, services = launcher.WaitReport(), statuses(3, starting=not away)
    servers = {NATS: Away(NOW, "no answer")} if away else {}
    for second in range(seconds + 1):
        report.see(RunSituation.of(config, services, away=servers), NOW + second)
    report.see(RunSituation.of(config, statuses(4, starting=False)), NOW + seconds)
    [event] = report.events
    found = ServiceFailures()
    found.take(event)
    assert (event.what, len(found.waits)) == (what, what == WENT_ON)
