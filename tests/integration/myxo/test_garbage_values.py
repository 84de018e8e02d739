"""A run's values in KV that are not what belongs there, and a service with a foul mouth: the commands show it, say so, and go on."""

import asyncio
import json
import math
import time
from pathlib import Path

import pytest

from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import EmbeddedNats
from shared.runtime import exit_codes
from shared.runtime.safe_text import printable
from shared.schema.service_messages import ServiceStatus
from tests.integration.myxo.command import Myxo, ended
from tests.integration.myxo.test_audit_summary import records, write
from tests.support.garbage import GARBAGE
from tests.support.run_config import run_config

KEYS = (
    "config/config",
    "config/store",
    "config/vocabulary",
    "config/phase",
    "config/data",
    "weights/live",
    "weights/snapshot",
    "leases/buffer",
    "leases/producer",
    "leases/nodes.actor.attempt",
    "leases/engines.rollout-0.0",
    "services/trainer.x",
    "services/launcher.launcher",
    "services/rollout.a!b",
)
COMMANDS = (["status"], ["status", "--json"], ["summary"], ["audit"], ["repair"], ["watch"], ["top", "--once"], ["samples"])
"""What looks at a run; each ends with 0, where the run's directory has a copy of its config."""

THOROUGH = ("nothing", "no UTF-8", "a huge version", "deep JSON")
"""Kinds of garbage with which all of them are tried."""


@pytest.fixture
def config(tmp_path: Path, run_name: str) -> RunConfig:
    return run_config(tmp_path, run={"name": run_name, "dir": str(tmp_path / "runs")}, rollout={"num_rollout": 2})


async def put(url: str, run: str, value: bytes, config: RunConfig | None = None) -> None:
    bus = await Bus.connect(url, "test")
    if config is not None:
        await write(bus, config, records())
    for key in KEYS:
        bucket, name = key.split("/")
        await bus.js.publish(f"$KV.{run}-{bucket}.{name}", value)
    await bus.close()


@pytest.mark.extra
def test_commands_go_by_the_directorys_copy_and_the_ledger_and_say_so(myxo: Myxo, nats: EmbeddedNats, config: RunConfig) -> None:
    run, root = config.run.name, config.run.root
    root.mkdir(parents=True)
    (root / "lock").touch()
    checkpoint = config.trained / "checkpoints" / "step_00000002" / "checkpoint.json"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("{}")
    where = {"NATS_URL": nats.url, "REDIS_URL": ""}
    asyncio.run(put(nats.url, run, b"garbage", config))
    code, out, err = myxo.run("status", root, environment=where)
    assert (code, out) == (exit_codes.BAD_INPUT, "") and f"the config of run '{run}' on the bus cannot be read" in err
    assert "by the copy in the run's directory, or with --fresh" in err and len(err.splitlines()) == 1
    (root / runs.FROZEN).write_text(config.model_dump_json())
    for kind, value in GARBAGE.items():
        asyncio.run(put(nats.url, run, value))
        for command, *options in COMMANDS if kind in THOROUGH else COMMANDS[:1]:
            code, out, err = myxo.run(command, root, *options, environment=where)
            assert code == 0, (kind, command, out, err)
            assert "config.json stands for it" in err and "Traceback" not in err, (kind, command, err)
            assert printable(out) == out and printable(err) == err
            if options == ["--json"]:
                json.loads(out)
    asyncio.run(put(nats.url, run, b"garbage"))
    code, out, err = myxo.run("status", root, environment=where)
    assert f"Run {run} is finished: 2 of 2 steps" in out and "its ledger stands for it" in err


EVIL = "\x1b]0;owned\x07\x1b[2J[/bold][red\ud800\u202e\nsecond line"


async def _befouled(url: str, config: RunConfig, phase: str) -> None:
    bus, run = await Bus.connect(url, "test"), config.run.name
    await write(bus, config, records())
    names = Subjects(run)
    texts = {"host": EVIL, "http": EVIL, "state": EVIL, "detail": EVIL, "last_error": EVIL}
    for number, value in enumerate((math.nan, math.inf, -1e308)):
        gauges = dict.fromkeys(("trained_steps", "in_flight", "queue_task", "dead", "live_version", "step", "reward", EVIL), value)
        gauges |= {"eval_x": value, "eval_x_version": value, "sft_steps": value, "sft_step": 0.0, "sft_seconds_left": value}
        for service in ("buffer", "trainer", "rollout", "reward", "environment"):
            name = f"{service}-{number}"
            status = ServiceStatus.model_construct(
                service=service,
                instance=name,
                pid=1,
                version=3,
                gauges=gauges,
                at=time.time() + 60,
                last_error_at=time.time() + 60,
                **texts,
            )
            await bus.put(names.services_bucket, f"{service}.{name}", status.encode())
    await bus.put(names.services_bucket, "rollout.garbage", b"\xff\x00 no message")
    for subject in (names.event("service", "failed"), names.event("trainer", "step"), names.event("trainer", "warm_start")):
        await bus.js.publish(subject, b"\xff\x00 no message")
    await runs.set_phase(bus, run, phase, EVIL)
    await bus.close()


def is_safe(*outputs: str) -> bool:
    return all(printable(output) == output for output in outputs)


def test_status_summary_and_watch_show_a_foul_run(myxo: Myxo, nats: EmbeddedNats, config: RunConfig) -> None:
    asyncio.run(_befouled(nats.url, config, runs.FAILED))
    where = {"NATS_URL": nats.url}
    code, out, err = myxo.run("status", config.run.name, environment=where)
    assert (code, err) == (0, ""), out + err
    assert is_safe(out) and "failed" in out
    code, out, err = myxo.run("status", config.run.name, "--json", environment=where)
    assert code == 0 and json.loads(out, parse_constant=pytest.fail)["phase"] == runs.FAILED
    code, out, err = myxo.run("watch", config.run.name, environment=where)
    assert code == exit_codes.RUN_FAILED and is_safe(out, err) and "owned" in err, out + err
    assert len(err.splitlines()) == 1, "a reason is one line"
    code, out, err = myxo.run("summary", config.run.name, environment=where)
    assert (code, err) == (0, "") and is_safe(out), out + err


def test_the_progress_line_of_a_foul_run(myxo: Myxo, nats: EmbeddedNats, config: RunConfig) -> None:
    asyncio.run(_befouled(nats.url, config, runs.RUNNING))
    watching = myxo.start("watch", config.run.name, environment={"NATS_URL": nats.url})
    assert watching.stdout is not None
    line = watching.stdout.readline()
    watching.terminate()
    ended(watching)
    assert line.startswith("step ") and is_safe(line), line
