"""``myxo repair`` on runs whose ledger was torn, or is behind the checkpoints, as after a loss of power."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import EmbeddedNats
from shared.schema.ledger import LedgerRecord
from shared.schema.service_messages import ServiceStatus
from tests.integration.myxo.command import Myxo
from tests.integration.myxo.test_audit_summary import embedded, records, write
from tests.support.run_config import run_config


@pytest.fixture
def torn_run(tmp_path: Path) -> Callable[..., RunConfig]:
    """Makes a run at rest with these records and checkpoints of so many steps; the records with the ``lost`` sequences are gone."""

    def make(ledger: Sequence[LedgerRecord], checkpoints: Sequence[int], lost: Sequence[int] = ()) -> RunConfig:
        config = run_config(tmp_path, rollout={"num_rollout": 4})

        async def fill() -> None:
            async with embedded(config) as bus:
                await write(bus, config, ledger)
                for sequence in lost:
                    await bus.js.delete_msg(Subjects(config.run.name).ledger_stream, sequence)

        asyncio.run(fill())
        for steps in checkpoints:
            path = config.trained / "checkpoints" / f"step_{steps:08d}"
            path.mkdir(parents=True)
            (path / "checkpoint.json").write_text("{}")
        (config.trained / "checkpoints" / ".step_00000009.partial").mkdir(parents=True, exist_ok=True)
        return config

    return make


def left(config: RunConfig) -> list[str]:
    return sorted(path.name.split("-")[0] for path in (config.trained / "checkpoints").iterdir())


def test_a_run_goes_back_to_a_checkpoint_that_its_ledger_knows(myxo: Myxo, torn_run: Callable[..., RunConfig]) -> None:
    config = torn_run(records()[:11], [1, 2, 4])  # the batches of two steps
    before = left(config)
    for _ in range(2):
        code, out, err = myxo.run("repair", config.run.root)
        assert (code, err, left(config)) == (1, "", before)
        assert "4 steps: they are put aside, and 2 steps are trained anew" in out and "nothing was changed" in out
    code, out, _ = myxo.run("repair", config.run.root, "--yes", "--json")
    told = json.loads(out)
    assert (code, told["resume"], told["set_aside"], told["cut"], told["needed"], told["done"]) == (0, 2, [4], None, True, True)
    assert left(config) == [".step_00000009.partial", "step_00000001", "step_00000002", "step_00000004.set"]
    code, out, _ = myxo.run("repair", "test", "--dir", config.run.dir)
    assert code == 0 and "nothing to repair: the run continues from its checkpoint of 2 steps" in out
    code, out, _ = myxo.run("audit", config.run.root)
    assert code == 0 and "1 times, by `myxo repair`" in out


def test_a_ledger_with_a_hole_is_cut_before_it(myxo: Myxo, torn_run: Callable[..., RunConfig]) -> None:
    config = torn_run(records()[:11], [1, 2], lost=[8])  # the version that step 1 is trained on
    code, out, _ = myxo.run("repair", config.run.root)
    assert code == 1 and "the ledger's last 4 records cannot be kept: records 8 to 8 are gone" in out
    assert myxo.run("repair", config.run.root, "--yes")[0] == 0
    code, out, _ = myxo.run("repair", config.run.root)
    assert code == 0 and "continues from its checkpoint of 1 steps" in out
    code, out, _ = myxo.run("audit", config.run.root, "--json")
    assert (code, json.loads(out)["trained"], json.loads(out)["in_flight"]) == (0, 2, 2)


def test_where_no_checkpoint_fits_nothing_is_done(myxo: Myxo, torn_run: Callable[..., RunConfig]) -> None:
    config = torn_run(records()[:13], [4])
    code, out, _ = myxo.run("repair", config.run.root, "--yes")
    assert code == 1 and "cannot be repaired" in out and "(there: 4)" in out and "myxo convert" in out
    assert left(config)[1:] == ["step_00000004"]


async def test_a_run_at_work_is_not_touched(myxo: Myxo, nats: EmbeddedNats, run_name: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, run={"name": run_name})
    bus = await Bus.connect(nats.url, "test")
    try:
        await write(bus, config, records()[:3])
        status = ServiceStatus(service="buffer", instance="buffer-0", host="here", pid=1, http="", state="active", at=0)
        await Registry(bus, run_name).renew(status)
        words = "repair", run_name, "--dir", config.run.dir, "--yes"
        code, _, err = await asyncio.to_thread(myxo.run, *words, environment={"NATS_URL": nats.url})
        assert code == 2 and "buffer-0 are at work on it" in err
    finally:
        await bus.close()
