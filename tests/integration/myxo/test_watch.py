"""``myxo watch`` on a NATS server that somebody else runs: to the end of the run, across the server's death."""

import asyncio
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import EmbeddedNats
from shared.schema.ledger import LedgerRecord
from shared.schema.service_messages import ServiceEvent
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
