"""``myxo repair`` on runs whose ledger was torn, or is behind the checkpoints, as after a loss of power."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import TRAIN, Subjects
from shared.config.run_config import RunConfig
from shared.model.final_exports import MARK
from shared.process.embedded_servers import EmbeddedNats
from shared.schema.ledger import LedgerRecord
from shared.schema.service_messages import ServiceStatus
from shared.schema.weight_messages import WeightsLive
from shared.transfer.weight_checkpoint import WeightCheckpoints
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


def test_nothing_of_what_was_cut_is_served_or_trained_with(myxo: Myxo, torn_run: Callable[..., RunConfig]) -> None:
    config = torn_run(records()[:11], [1, 2], lost=[8])
    names, snapshots = Subjects(config.run.name), WeightCheckpoints.of_run(config)
    for version in (1, 2):
        snapshots.path_of(version).mkdir(parents=True)
    (config.trained / "hf").mkdir()
    (config.trained / "hf" / MARK).write_text('{"steps": 4}')
    live = WeightsLive(version=2, replicas=["rollout-0"], seconds=1, bytes=1, digest="", at=1)

    async def fill() -> None:
        async with embedded(config) as bus:
            for key in ("live", "snapshot"):
                await bus.put(names.weights_bucket, key, live.encode())
            await bus.publish(names.task(TRAIN), live)

    async def left_on_bus() -> tuple[int, bytes | None, int]:
        async with embedded(config) as bus:
            tasks = (await bus.js.stream_info(names.task_stream)).state.messages
            return await runs.live_version(bus, config.run.name), await bus.get(names.weights_bucket, "snapshot"), tasks

    asyncio.run(fill())
    blocked = snapshots.directory / ".v000002.removed"
    blocked.touch()  # as on a volume that is read-only here
    code, _, err = myxo.run("repair", config.run.root, "--yes")
    assert code == 2 and "files can be changed from here" in err and left(config)[1:] == ["step_00000001", "step_00000002"]
    blocked.unlink()
    code, out, _ = myxo.run("repair", config.run.root, "--yes")
    assert code == 0 and "checkpoints of 2 steps: they are put aside, and 1 steps are trained anew" in out
    assert asyncio.run(left_on_bus()) == (-1, None, 0) and snapshots.versions() == [1]
    assert not (config.trained / "hf").exists() and f"put aside: {config.trained / 'hf'}.set-aside" in out


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
        status = ServiceStatus(service="rollout", instance="rollout-0", host="here", pid=1, http="", state="ready", at=0)
        await Registry(bus, run_name).renew(status)
        words = "repair", run_name, "--dir", config.run.dir, "--yes"
        code, _, err = await asyncio.to_thread(myxo.run, *words, environment={"NATS_URL": nats.url})
        assert code == 2 and "stop rollout-0 first" in err
    finally:
        await bus.close()
