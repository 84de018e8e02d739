"""A run whose values in KV are not what belongs there: the commands go by the run's directory and its ledger, and say so."""

import asyncio
import json
from pathlib import Path

import pytest

from shared.bus import runs
from shared.bus.connection import Bus
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import EmbeddedNats
from shared.runtime import exit_codes
from shared.runtime.safe_text import printable
from tests.integration.myxo.command import Myxo
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
