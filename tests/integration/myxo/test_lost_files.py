"""A run of which a part is gone or torn, or that lies where `myxo move` did not put it: what a person reads, and ``myxo repair``."""

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from myxo.commands.export_run import config_of
from myxo.commands.move import move
from myxo.commands.up import claimed
from myxo.run.run_access import GivenServers
from myxo.run.run_directory import RunDirectory, checkpoints
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import TRAIN, Subjects
from shared.config import flags
from shared.config.config_reading import load
from shared.config.run_config import RunConfig
from shared.model.final_exports import MARK
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError
from shared.schema.ledger import LedgerRecord
from shared.schema.service_messages import ServiceStatus
from shared.schema.weight_messages import WeightsLive
from shared.transfer.weight_checkpoint import WeightCheckpoints
from tests.integration.myxo.command import ROOT, Myxo
from tests.integration.myxo.test_audit_summary import embedded, records, write
from tests.support.run_config import run_config


@pytest.fixture
def at_rest(config_file: Callable[..., Path]) -> tuple[Path, RunConfig]:
    """A run's TOML file, and its directory with two trained steps and a checkpoint of both."""
    path = config_file()
    config = load(path)
    RunDirectory(config.run.root).root.mkdir(parents=True)
    runs.freeze(config.run.root, config)

    async def fill() -> None:
        async with embedded(config) as bus:
            await write(bus, config, records())

    asyncio.run(fill())
    checkpoint = config.trained / "checkpoints" / "step_00000002" / "checkpoint.json"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("{}")
    return path, config


def test_a_run_whose_nats_data_are_lost_is_not_said_to_be_new(
    myxo: Myxo, nats: EmbeddedNats, valkey: EmbeddedValkey, at_rest: tuple[Path, RunConfig]
) -> None:
    path, config = at_rest
    given = {"NATS_URL": nats.url, "REDIS_URL": valkey.url}
    root, said = config.run.root, "checkpoints holds a checkpoint of 2 steps, and the bus holds nothing of run"
    for lost in (*(root / "nats" / "jetstream").iterdir(), root / "nats"):
        shutil.rmtree(lost)
        for words, environment in ((("status", root), {}), (("status", root), given), (("up", path), {}), (("submit", path), given)):
            code, out, err = myxo.run(*words, environment=environment)
            assert (code, out.count("started")) == (exit_codes.BAD_INPUT, 0), (lost, words, out, err)
            assert said in err and "NATS's data are lost" in err and "makes one" not in err, (lost, words, err)
    shutil.rmtree(root / "nats")  # which `up` has made
    (root / "slurm").mkdir()
    err = myxo.run("status", root)[2]
    assert "its NATS runs with its SLURM job alone" in err and "lost" not in err


def test_the_files_of_a_run_whose_services_are_at_work_elsewhere_stay(
    myxo: Myxo, nats: EmbeddedNats, tmp_path: Path, run_name: str
) -> None:
    config = run_config(tmp_path, run={"name": run_name, "dir": str(tmp_path)}, bus={"registry_ttl": 1})
    directory, given = RunDirectory(config.run.root), GivenServers(nats.url, None)
    checkpoint = config.trained / "checkpoints" / "step_00000002" / "checkpoint.json"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("{}")
    directory.logs.mkdir()

    async def at_work() -> None:
        async with contextlib.aclosing(await Bus.connect(nats.url, "test")) as bus:
            await runs.create(bus, config, None)
            registry = Registry(bus, run_name)
            status = ServiceStatus(service="buffer", instance="buffer-7", host="h", pid=1, http="", state="ready", at=0.0)
            begin = asyncio.create_task(asyncio.to_thread(begins))
            while not begin.done():
                await registry.renew(status)
                await asyncio.wait([begin], timeout=0.3)
            with pytest.raises(ConfigError, match="buffer-7 on h"):
                begin.result()
            await registry.renew(status)
            code, _, err = await asyncio.to_thread(myxo.run, "move", config.run.root, tmp_path / "new", environment={"NATS_URL": nats.url})
            assert code == exit_codes.BAD_INPUT and "stop buffer-7 first" in err
            await registry.leave(status)

    def begins() -> None:
        with claimed(config, directory, fresh=True, given=given):
            pass

    asyncio.run(at_work())
    assert checkpoint.is_file()
    code, _, err = myxo.run("move", config.run.root, tmp_path / "new")
    assert code == exit_codes.BAD_INPUT and "NATS_URL" in err and "--fresh" not in err and checkpoint.is_file()
    assert myxo.run("move", config.run.root, tmp_path / "new", environment={"NATS_URL": nats.url})[0] == 0
    moved = RunDirectory(tmp_path / "new" / run_name)
    assert (moved.root / checkpoint.relative_to(config.run.root)).is_file()
    with claimed(config, moved, fresh=True, given=given):
        assert not moved.root.joinpath("checkpoints").exists(), "nothing is at work any more"


def test_checkpoints_that_were_removed_are_said_to_be_gone(myxo: Myxo, at_rest: tuple[Path, RunConfig]) -> None:
    _, config = at_rest
    shutil.rmtree(config.trained / "checkpoints")
    code, out, _ = myxo.run("repair", config.run.root)
    assert code == 1 and "no checkpoint is of so many (there: none)" in out
    assert "Put its checkpoints back where they were" in out and "newest checkpoint's weights" not in out


def test_a_copied_run_is_known_as_one_and_move_is_named(myxo: Myxo, at_rest: tuple[Path, RunConfig]) -> None:
    path, config = at_rest
    copy = config.run.root.with_name("another")
    shutil.copytree(config.run.root, copy)
    for words in (("status", copy), ("up", path, "--name", "another")):
        code, _, err = myxo.run(*words)
        assert code == exit_codes.BAD_INPUT, err
        assert f"{copy} holds the files of run {config.run.name}" in err and "`myxo move`" in err and "makes one" not in err
    elsewhere = config.run.dir / "elsewhere" / config.run.name
    shutil.copytree(config.run.root, elsewhere)
    later = config.trained / "checkpoints" / "step_00000009"
    shutil.copytree(later.with_name("step_00000002"), later)
    found = config_of(str(elsewhere), Path("runs"), flags.read([]))
    assert (found.trained, checkpoints(found)) == (elsewhere.resolve(), [2]), "the original has gone on"
    assert checkpoints(config_of(str(config.run.root), Path("runs"), flags.read([]))) == [2, 9]
    with pytest.raises(ConfigError, match="holds the files of run"):
        config_of(str(copy), Path("runs"), flags.read([]))
    code, out, _ = myxo.run("repair", elsewhere)
    assert code == 0 and "by steps trained: 2\n" in out, "what it would put aside is not the original's"
    code, _, err = myxo.run("status", elsewhere)
    assert code == 0 and f"{elsewhere} is a copy of {config.run.root}" in err and "`myxo move`" in err


def test_nobody_but_its_owner_reads_a_run_while_it_is_copied(at_rest: tuple[Path, RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    run, copy, modes = at_rest[1].run, shutil.copystat, set[int]()
    partial = run.dir / "there" / f".{run.name}.partial"
    monkeypatch.setattr(shutil, "copystat", lambda *paths, **how: (modes.add(partial.stat().st_mode & 0o77), copy(*paths, **how))[1])
    move(str(run.root), run.dir, run.dir / "there", Console(quiet=True))
    assert modes == {0}


def test_the_users_files_in_the_directory_of_a_run_that_is_moved_stay_where_its_config_finds_them(at_rest: tuple[Path, RunConfig]) -> None:
    run = at_rest[1].run
    model = run.root / "data" / "model"
    model.mkdir(parents=True)
    move(str(run.root), run.dir, run.dir / "there", Console(quiet=True))
    assert [*run.root.rglob("*")] == [model.parent, model]
    moved = {path.name for path in (run.dir / "there" / run.name).iterdir()}
    assert moved >= {"nats", "checkpoints", runs.FROZEN} and not moved & {"data", "lock"}
    move(run.name, run.dir / "there", run.dir / "further", Console(quiet=True))
    assert not (run.dir / "there" / run.name).exists()


def test_a_run_whose_checkpoints_lie_in_its_directory_by_save_moves_with_them(myxo: Myxo, at_rest: tuple[Path, RunConfig]) -> None:
    path, config = at_rest
    saved = config.model_copy(update={"trainer": config.trainer.model_copy(update={"save": config.run.dir})})
    runs.freeze(config.run.root, saved)
    taken, elsewhere = config.run.dir / "taken" / config.run.name, config.run.dir / "elsewhere"
    taken.parent.mkdir()
    config.run.root.rename(taken)
    code, out, _ = myxo.run("move", taken, elsewhere)
    words = out.partition("`myxo up CONFIG ")[2].partition("`")[0].split()
    again = load(path, flags.parse(words))
    assert code == 0 and words == ["--dir", str(elsewhere), "--save", str(elsewhere)]
    moved = runs.frozen(elsewhere / config.run.name)
    assert moved is not None and moved.trained == moved.run.root == elsewhere / config.run.name
    assert runs.differences(saved, moved) == [] == runs.differences(moved, again), "the command that is printed continues it"
    [refused] = runs.differences(saved, moved.model_copy(update={"trainer": moved.trainer.model_copy(update={"save": Path("/other")})}))
    assert refused.field == "trainer.save"


def test_a_machine_without_a_loopback_address_is_not_told_that_ports_are_in_use() -> None:
    code = "from shared.process.embedded_servers import free_port; free_port()"
    done = subprocess.run(["unshare", "-rn", sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "ip link set lo up" in done.stderr and "in use" not in done.stderr, done.stderr


def test_a_bus_without_the_run_and_without_checkpoints_still_says_what_makes_one(myxo: Myxo, nats: EmbeddedNats, tmp_path: Path) -> None:
    (tmp_path / "fresh" / "logs").mkdir(parents=True)
    code, _, err = myxo.run("status", tmp_path / "fresh", environment={"NATS_URL": nats.url})
    assert code == exit_codes.BAD_INPUT and "`myxo submit CONFIG` makes one" in err


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
