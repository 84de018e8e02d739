"""What is not what belongs under a key of KV: each reader says so with an error of its own, or goes by what it knows, and none ends with
another error."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.leader_lease import LeaderLease, LeaseTiming, read_lease
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.nodes.node_decisions import NodeObserver
from shared.runtime.errors import MyxoError
from shared.runtime.tasks import cancelled
from shared.schema.service_messages import LeaseStatus
from shared.schema.weight_messages import WeightsLive
from tests.support.garbage import GARBAGE
from tests.support.run_config import run_config, write_jsonl
from tests.support.waiting import until


@pytest.fixture
async def run(bus: Bus, tmp_path: Path, run_name: str) -> RunConfig:
    write_jsonl(tmp_path / "prompts.jsonl")
    config = run_config(tmp_path, run={"name": run_name})
    await runs.create(bus, config, "unix:///tmp/redis.sock", 512)
    return config


def frozen(config: RunConfig) -> None:
    config.run.root.mkdir(parents=True, exist_ok=True)
    (config.run.root / runs.FROZEN).write_text(config.model_dump_json())


def moved(config: RunConfig) -> RunConfig:
    """The config of the same run, whose files lie elsewhere by now."""
    there = config.model_copy(update={"run": config.run.model_copy(update={"dir": config.run.dir.parent / "elsewhere"})})
    frozen(there)
    return there


Reader = Callable[[Bus, RunConfig], Awaitable[object]]
READERS: dict[str, tuple[Reader, ...]] = {
    "config/config": (
        lambda bus, config: runs.load(bus, config.run.name),
        runs.refuse_differences,
        lambda bus, config: runs.create(bus, config, None),
    ),
    "config/store": (lambda bus, config: runs.store_url(bus, config.run.name),),
    "config/vocabulary": (lambda bus, config: runs.vocabulary(bus, config.run.name),),
    "config/phase": (lambda bus, config: runs.phase_and_reason(bus, config.run.name), lambda bus, config: runs.create(bus, config, None)),
    "weights/live": (lambda bus, config: runs.live_version(bus, config.run.name),),
    "weights/snapshot": (lambda bus, config: runs.create(bus, moved(config), None),),
    "leases/buffer": (lambda bus, config: read_lease(bus, config.run.name, "buffer", 5.0),),
    "services/trainer.x": (
        lambda bus, config: Registry(bus, config.run.name).alive(),
        lambda bus, config: Registry(bus, config.run.name).alive("trainer"),
    ),
    "services/launcher.launcher": (lambda bus, config: Registry(bus, config.run.name).launcher(),),
    "services/rollout.a!b": (lambda bus, config: Registry(bus, config.run.name).alive(),),  # no key that the library would read
}


@pytest.mark.parametrize("key", READERS)
async def test_a_reader_has_a_value_or_an_error_with_a_name(bus: Bus, run: RunConfig, key: str) -> None:
    bucket, name = key.split("/")
    for kind, value in GARBAGE.items():
        for reader in READERS[key]:
            await bus.js.publish(f"$KV.{run.run.name}-{bucket}.{name}", value)
            try:
                await reader(bus, run)
            except MyxoError as error:
                said = str(error)
                assert run.run.name in said or bucket in said, (kind, said)
                assert said.isprintable() and len(said) < 500, (kind, said)


async def test_the_directorys_copy_stands_for_a_config_that_cannot_be_read_and_is_written_anew(
    bus: Bus, run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    name, bucket = run.run.name, Subjects(run.run.name).config_bucket
    other = run.model_copy(update={"rollout": run.rollout.model_copy(update={"n_samples_per_prompt": 8})})
    await bus.put(bucket, "config", b"\xff")
    with pytest.raises(runs.UnreadableRun, match=rf"the config of run '{name}' .*{bucket}/config: .*by the copy in the run's directory"):
        await runs.create(bus, run, None)
    frozen(run)
    with pytest.raises(MyxoError, match="n_samples_per_prompt"):
        await runs.refuse_differences(bus, other)
    await runs.create(bus, run, None)
    assert "config.json stands for it" in capsys.readouterr().err
    assert await runs.load(bus, name) == run
    stranger = run.model_copy(update={"run": run.run.model_copy(update={"name": "stranger"})})
    await bus.put(bucket, "config", stranger.model_dump_json().encode())
    with pytest.raises(runs.UnreadableRun, match="it is that of run 'stranger'"):
        await runs.load(bus, name)


async def test_a_phase_that_is_none_is_written_anew_when_the_run_goes_on(bus: Bus, run: RunConfig) -> None:
    await bus.put(Subjects(run.run.name).config_bucket, "phase", b"finished?")
    assert await runs.phase(bus, run.run.name) == runs.UNREADABLE
    await runs.create(bus, run, None)
    assert await runs.phase(bus, run.run.name) == runs.RUNNING


@pytest.mark.parametrize(
    "kind", ["another message", *(pytest.param(kind, marks=pytest.mark.extra) for kind in ("no UTF-8", "nothing", "a version below all"))]
)
async def test_a_lease_that_is_none_ends_neither_its_holder_nor_who_waits_and_one_of_them_acts(bus: Bus, run: RunConfig, kind: str) -> None:
    timing = LeaseTiming(1.5)
    holder, waiting = (LeaderLease(bus, run.run.name, "job", name, timing) for name in ("one", "two"))
    subject = f"$KV.{Subjects(run.run.name).leases_bucket}.job"
    await bus.js.publish(subject, GARBAGE[kind])
    first = asyncio.get_running_loop().time()
    await until(holder.attempt, "the lease", pause=timing.poll)
    assert asyncio.get_running_loop().time() - first >= timing.duration  # it may have been somebody's
    keeping = asyncio.create_task(holder.keep())
    try:
        await bus.js.publish(subject, GARBAGE[kind])
        for _ in range(20):
            assert not await waiting.attempt()
            await asyncio.sleep(timing.poll)
        assert not keeping.done()
        assert (await read_lease(bus, run.run.name, "job", 5.0))[1].term == holder.term  # type: ignore[union-attr]
    finally:
        await cancelled([keeping])


def test_a_node_whose_lease_cannot_be_read_is_as_it_was_until_its_lease_has_run_out() -> None:
    observer = NodeObserver(1, 5.0)
    observer.see(1, LeaseStatus(holder="h", term="t", mark="", at=0.0), 0.0)
    assert observer.see(2, LeaseStatus(holder="h", term="t", mark="", at=0.0), 1.0).alive
    assert observer.see(3, None, 2.0).alive
    assert observer.see(3, None, 7.5).expired
    assert not NodeObserver(1, 5.0).see(3, None, 0.0).term


async def test_a_live_version_that_is_none_is_an_error_of_its_own(bus: Bus, run: RunConfig) -> None:
    bucket = Subjects(run.run.name).weights_bucket
    await bus.put(bucket, "live", WeightsLive(version=3, replicas=[], seconds=0.0, bytes=0, at=0.0).encode())
    assert await runs.live_version(bus, run.run.name) == 3
    await bus.put(bucket, "live", b"3")
    with pytest.raises(runs.UnreadableVersion, match=rf"{bucket}/live"):
        await runs.live_version(bus, run.run.name)
