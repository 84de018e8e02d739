"""``myxo watch`` and ``myxo top`` on a NATS server that somebody else runs: to the end of the run, across the server's death."""

import asyncio
import contextlib
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from myxo.launch.launcher import erase_from_bus
from myxo.run.run_access import RunWatch
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import EmbeddedNats
from shared.schema.ledger import LedgerRecord
from shared.schema.service_messages import ServiceEvent, ServiceStatus
from shared.view.flow_history import FlowHistory
from shared.view.run_view import RunView, with_failures
from tests.integration.myxo.command import Myxo, ended
from tests.integration.myxo.test_audit_summary import records, write
from tests.support.run_config import run_config


@pytest.fixture
def config(tmp_path: Path, run_name: str) -> RunConfig:
    return run_config(tmp_path, run={"name": run_name, "dir": str(tmp_path / "runs")}, rollout={"num_rollout": 2})


def put(server: EmbeddedNats, config: RunConfig, ledger: Sequence[LedgerRecord]) -> None:
    async def fill() -> None:
        bus = await Bus.connect(server.url, "test")
        await write(bus, config, ledger)
        await bus.close()

    asyncio.run(fill())


def finish(server: EmbeddedNats, config: RunConfig, rest: Sequence[LedgerRecord]) -> None:
    """What the buffer does at the end of a run."""

    async def add() -> None:
        bus = await Bus.connect(server.url, "test")
        for record in rest:
            await bus.publish(Subjects(config.run.name).ledger(record.event()), record)
        await runs.set_phase(bus, config.run.name, runs.FINISHED)
        await bus.close()

    asyncio.run(add())


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.extra
def test_a_finished_run_is_summed_up_at_once(myxo: Myxo, nats: EmbeddedNats, config: RunConfig) -> None:
    put(nats, config, records())
    code, out, err = myxo.run("watch", config.run.name, environment={"NATS_URL": nats.url})
    assert (code, err) == (0, "")
    assert "audit" in out and "ok" in out
    assert (config.run.root / "summary.json").is_file()


def test_a_run_is_watched_to_its_end_across_the_death_of_its_bus(myxo: Myxo, mortal_nats: EmbeddedNats, config: RunConfig) -> None:
    ledger = records()
    put(mortal_nats, config, ledger[:7])
    watching = myxo.start("watch", config.run.name, environment={"NATS_URL": mortal_nats.url})
    assert first_line(watching).startswith("step 1/2  waiting for a buffer service")
    assert mortal_nats.process is not None
    mortal_nats.process.kill()
    mortal_nats.process.wait(30)
    mortal_nats.start()
    finish(mortal_nats, config, ledger[7:])
    code, out, err = ended(watching)
    assert (code, err) == (0, ""), out + err
    assert "step 2/2" in out
    assert "audit" in out


@pytest.mark.extra
def test_a_violation_is_the_exit_code(myxo: Myxo, nats: EmbeddedNats, config: RunConfig) -> None:
    ledger = [record for record in records() if record.event() != "groups_scored"]
    put(nats, config, ledger)
    code, out, _ = myxo.run("watch", config.run.name, environment={"NATS_URL": nats.url})
    assert code == 1
    assert "violation" in out


def test_a_run_that_is_not_there_is_refused(myxo: Myxo, nats: EmbeddedNats) -> None:
    code, _, err = myxo.run("watch", "nowhere", environment={"NATS_URL": nats.url})
    assert code == 2
    assert "no such run" in err


def test_a_run_that_failed_ends_the_watch_with_its_reason(myxo: Myxo, nats: EmbeddedNats, config: RunConfig) -> None:
    put(nats, config, records()[:7])
    watching = myxo.start("watch", config.run.name, environment={"NATS_URL": nats.url})
    assert first_line(watching).startswith("step 1/2")

    async def fail() -> None:
        bus = await Bus.connect(nats.url, "test")
        died = ServiceEvent(service="rollout", instance="rollout-x", what="failed", detail="OSError: no GPU", at=time.time())
        await bus.publish(Subjects(config.run.name).event("service", "failed"), died)
        await runs.set_phase(bus, config.run.name, runs.FAILED, "40 groups in a row failed")
        await bus.close()

    asyncio.run(fail())
    code, out, err = ended(watching)
    assert (code, err) == (3, f"myxo: run {config.run.name} failed: 40 groups in a row failed\n"), out
    assert "rollout-x: OSError: no GPU" in out


def event(what: str, instance: str, detail: str, at: float) -> ServiceEvent:
    return ServiceEvent(service="rollout", instance=instance, what=what, detail=detail, at=at)


async def tell(bus: Bus, run: str, *events: ServiceEvent) -> None:
    for told in events:
        await bus.publish(Subjects(run).event("service", told.what), told)


def put_watched(server: EmbeddedNats, config: RunConfig, phase: str = runs.RUNNING) -> None:
    """A run with a ledger, a replica that is there, and one that was restarted just now."""

    async def fill() -> None:
        bus = await Bus.connect(server.url, "test")
        await write(bus, config, records())
        name, now = config.run.name, time.time()
        await tell(bus, name, event("restarted", "rollout-1", "after signal 9 \u202e\x1b[2J", now))
        gauges = {"running_groups": 3.0}
        status = ServiceStatus(service="rollout", instance="rollout-0", host="h", pid=1, http="", state="ready", gauges=gauges, at=now)
        await Registry(bus, name).renew(status)
        await runs.set_phase(bus, name, phase)
        await bus.close()

    asyncio.run(fill())


def test_top_shows_pipeline_and_alarms_once(myxo: Myxo, nats: EmbeddedNats, config: RunConfig) -> None:
    put_watched(nats, config)
    code, out, err = myxo.run("top", config.run.name, environment={"NATS_URL": nats.url})
    assert (code, err) == (0, "")
    assert "generating   3" in out and "rollout-0" in out
    assert "▲ rollout-1 was restarted 1×, after signal 9" in out and "\x1b[2J" not in out and "\u202e" not in out
    code, out, err = myxo.run("top", config.run.name, "--json", "--window", "60", environment={"NATS_URL": nats.url})
    found = json.loads(out)
    assert (code, err) == (0, "") and found["live"] and found["end"] - found["begin"] <= 60.001
    assert [stage["name"] for stage in found["stages"]] == ["tasks", "generating", "scoring", "ready", "training"]
    assert [alarm["kind"] for alarm in found["alarms"] if "rollout-1" in alarm["title"]] == ["restarts"]
    assert found["bottleneck"]["sentence"]


@pytest.mark.parametrize(
    ("words", "named"), [(["--window", "0"], "--window"), (["--window", "nan"], "--window"), (["--windo", "3"], "--windo")]
)
def test_bad_arguments_are_refused_by_name(myxo: Myxo, config: RunConfig, words: list[str], named: str) -> None:
    code, _, err = myxo.run("top", config.run.name, *words)
    assert code == 2 and named in err


def test_top_refuses_a_run_that_is_not_there(myxo: Myxo, nats: EmbeddedNats) -> None:
    code, _, err = myxo.run("top", "nowhere", environment={"NATS_URL": nats.url})
    assert code == 2 and "nowhere" in err


def test_on_a_terminal_it_goes_on_until_the_run_ends(nats: EmbeddedNats, config: RunConfig) -> None:
    put_watched(nats, config)
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "myxo", "top", config.run.name]
    environment = os.environ | {"NATS_URL": nats.url, "TERM": "xterm", "COLUMNS": "120", "LINES": "60"}
    process = subprocess.Popen(command, stdout=follower, stderr=follower, stdin=subprocess.DEVNULL, env=environment)
    os.close(follower)
    shown, end = "", time.monotonic() + 90
    try:
        while "rollout-1 was restarted" not in shown:
            assert time.monotonic() < end and process.poll() is None, shown[-2000:]
            shown += os.read(leader, 65536).decode(errors="replace")
        put_watched(nats, config, runs.FINISHED)
        while process.poll() is None:
            assert time.monotonic() < end, shown[-2000:]
            try:
                shown += os.read(leader, 65536).decode(errors="replace")
            except OSError:  # the terminal's other end was closed
                process.wait(30)
    finally:
        process.kill()
        process.wait(30)
        os.close(leader)
    assert process.returncode == 0, shown[-2000:]


async def test_a_run_that_is_begun_anew_is_watched_from_its_beginning(bus: Bus, config: RunConfig) -> None:
    await write(bus, config, records())
    watched = RunWatch(bus, config, config.run.root)
    await watched.standing((), live=True)
    old = watched.history
    assert len(old.steps) == 2
    await erase_from_bus(bus, config.run.name)
    longer = config.model_copy(update={"rollout": config.rollout.model_copy(update={"num_rollout": 7})})
    await write(bus, longer, records()[:7])
    await watched.standing((), live=True)
    again = watched.history
    await watched.standing((), live=True)
    assert watched.history is again is not old and len(again.steps) == 1 and watched.config.rollout.num_rollout == 7


def test_a_run_that_is_begun_anew_is_reported_by_its_own_config(myxo: Myxo, nats: EmbeddedNats, config: RunConfig) -> None:
    put(nats, config, records()[:7])
    watching = myxo.start("watch", config.run.name, environment={"NATS_URL": nats.url})
    assert first_line(watching).startswith("step 1/2")

    async def erase() -> None:
        async with contextlib.aclosing(await Bus.connect(nats.url, "test")) as bus:
            await erase_from_bus(bus, config.run.name)

    asyncio.run(erase())
    bound = config.rollout.max_staleness + 5
    put(nats, config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_staleness": bound})}), records())
    code, out, err = ended(watching)
    assert (code, err) == (0, ""), out + err
    assert json.loads((config.run.root / "summary.json").read_text())["max_staleness"] == bound


def test_a_watch_names_who_was_killed_and_who_failed(config: RunConfig) -> None:
    history, view = FlowHistory(), RunView.at_start(config, 0)
    history.service_event(event("restarted", "rollout-0", "long ago", 50.0))
    assert with_failures(view, history.failures_since(100.0), 1).troubles.errors == ()
    for told in (event("restarted", "rollout-1", "after signal 9", 101.0), event("failed", "reward-0", "OSError: no space", 102.0)):
        history.service_event(told)
    seen = with_failures(view, history.failures_since(100.0), history.failures.restarts.total())
    assert seen.restarts == 2 and sorted(seen.troubles.lines()) == ["reward-0: OSError: no space", "rollout-1 restarts 1: after signal 9"]
