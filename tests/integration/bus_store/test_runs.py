"""A run on the bus, made once and resumed with what may change; and what is not what belongs under its keys, which readers name."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from shared.bus import runs, streams
from shared.bus.connection import Bus
from shared.bus.leader_lease import LeaderLease, LeaseTiming, read_lease
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.nodes.node_decisions import NodeObserver
from shared.runtime.errors import ConfigError, MyxoError, Problems
from shared.runtime.tasks import cancelled
from shared.schema.ledger import BatchFormed, BatchTrained, RunFinished, ValuesChanged
from shared.schema.service_messages import LeaseStatus, ServiceStatus
from shared.schema.weight_messages import WeightsLive
from tests.support.garbage import GARBAGE
from tests.support.run_config import run_config, write_jsonl
from tests.support.tables import rare
from tests.support.waiting import until


async def test_a_run_is_found_with_the_config_it_was_made_with(bus: Bus, run_name: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, run={"name": run_name}, rollout={"sglang": {"page-size": 16}})
    await runs.create(bus, config, "unix:///store")
    assert await runs.load(bus, run_name) == config
    assert await runs.store_url(bus, run_name) == "unix:///store"
    assert await runs.phase(bus, run_name) == runs.RUNNING


async def test_resuming_takes_over_what_may_change_and_goes_on(bus: Bus, run_name: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, run={"name": run_name})
    await runs.create(bus, config, "unix:///store")
    finished = RunFinished(steps=config.rollout.num_rollout, at=0.0)
    await bus.publish(Subjects(run_name).ledger(finished.event()), finished)
    await runs.set_phase(bus, run_name, runs.FINISHED)
    await runs.create(bus, config, None)
    assert await runs.phase(bus, run_name) == runs.FINISHED
    longer = run_config(tmp_path, run={"name": run_name}, rollout={"num_rollout": 99})
    await runs.create(bus, longer, None)
    assert (await runs.load(bus, run_name)).rollout.num_rollout == 99
    assert await runs.store_url(bus, run_name) == "unix:///store"
    assert await runs.phase(bus, run_name) == runs.RUNNING


async def test_resuming_with_another_fixed_value_is_refused_by_field_and_changes_nothing(bus: Bus, run_name: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, run={"name": run_name})
    await runs.create(bus, config, None)
    other = run_config(tmp_path, run={"name": run_name}, rollout={"max_staleness": 3}, bus={"ack_wait": 99})
    with pytest.raises(Problems, match=rf"run {run_name} exists with another value; use --fresh") as caught:
        await runs.create(bus, other, "unix:///other")
    reported = [(problem.field, problem.value) for problem in caught.value.problems if isinstance(problem, ConfigError)]
    assert reported == [("rollout.max_staleness", "1 → 3"), ("bus.ack_wait", "30.0 → 99.0")]
    assert await runs.load(bus, run_name) == config
    assert await runs.store_url(bus, run_name) is None


async def test_an_end_that_the_trained_steps_do_not_allow_is_refused(bus: Bus, run_name: str, tmp_path: Path) -> None:
    def config(steps: int) -> RunConfig:
        return run_config(tmp_path, run={"name": run_name}, rollout={"num_rollout": steps}, weights={"update_weights_interval": 4})

    await runs.create(bus, config(10), None)
    await runs.append(bus, run_name, BatchTrained(step=7, version=1, started=0.0, ended=1.0, at=1.0))
    await runs.create(bus, config(12), None)
    await runs.create(bus, config(10), None)
    buffer = ServiceStatus(service="buffer", instance="buffer-0", state="ready", host="here", pid=1, at=0.0, http="")
    await Registry(bus, run_name).renew(buffer)
    with pytest.raises(ConfigError, match=r"rollout.num_rollout = 11: stop buffer-0 first"):  # it would end the run at 10
        await runs.create(bus, config(11), None)
    await Registry(bus, run_name).leave(buffer)
    await runs.append(bus, run_name, BatchTrained(step=9, version=2, started=0.0, ended=1.0, at=2.0))
    with pytest.raises(ConfigError, match=r"rollout.num_rollout = 9: 10 or more: so many steps are trained; `myxo up CONFIG --from"):
        await runs.create(bus, config(9), None)
    with pytest.raises(ConfigError, match=r"rollout.num_rollout = 20: 10: with update_weights_interval = 4 its last version would"):
        await runs.create(bus, config(20), None)
    await runs.create(bus, config(10), None)
    assert (await runs.load(bus, run_name)).rollout.num_rollout == 10


async def test_an_end_before_a_batch_that_is_formed_is_refused(bus: Bus, run_name: str, tmp_path: Path) -> None:
    def config(steps: int) -> RunConfig:
        return run_config(tmp_path, run={"name": run_name}, rollout={"num_rollout": steps})

    await runs.create(bus, config(9), None)
    await runs.append(bus, run_name, BatchTrained(step=2, version=2, started=0.0, ended=1.0, at=1.0))
    await runs.append(bus, run_name, BatchFormed(step=3, version=3, groups=["g00000000"], at=1.0))
    with pytest.raises(ConfigError, match=r"rollout.num_rollout = 3: 4 or more: so many batches are formed"):
        await runs.create(bus, config(3), None)
    await runs.create(bus, config(4), None)
    await runs.append(bus, run_name, BatchFormed(step=4, version=4, groups=["g00000001"], at=1.0))
    await runs.create(bus, config(4), None)  # an earlier release let it end so: it can still be asked for


async def test_a_batch_that_no_message_can_hold_is_refused(bus: Bus, run_name: str, tmp_path: Path) -> None:
    def config(batch: int, **rollout: int) -> RunConfig:
        return run_config(tmp_path, run={"name": run_name}, rollout={"rollout_batch_size": batch, **rollout})

    with pytest.raises(ConfigError, match=r"rollout.rollout_batch_size = 65536: at most \d{4,5} with n_samples_per_prompt = 64: a batch's"):
        await runs.create(bus, config(65536, n_samples_per_prompt=64), None)
    assert not await streams.exists(bus, run_name)
    await runs.create(bus, config(2048, n_samples_per_prompt=64), None)  # fits a server's default of 1 MiB, too


async def test_a_value_of_the_training_changes_on_the_record_or_not_at_all(bus: Bus, run_name: str, tmp_path: Path) -> None:
    def config(lr: float) -> RunConfig:
        return run_config(tmp_path, run={"name": run_name}, trainer={"lr": lr})

    assert await runs.create(bus, config(1e-6), None) is None
    trained = BatchTrained(step=2, version=3, started=0.0, ended=1.0, at=1.0)
    await runs.append(bus, run_name, trained)
    with pytest.raises(ConfigError, match=r"trainer.lr.*3 steps are trained, and the newest checkpoint here is of 2.*--from"):
        await runs.create(bus, config(2e-6), None, saved=2)
    status = ServiceStatus(service="buffer", instance="buffer-0", state="ready", host="here", pid=1, at=0.0, http="")
    await Registry(bus, run_name).renew(status)
    with pytest.raises(ConfigError, match=r"trainer.lr.*stop buffer-0 first"):
        await runs.create(bus, config(2e-6), None, saved=3)
    await Registry(bus, run_name).leave(status)
    assert await runs.last_record(bus, run_name, ValuesChanged) is None and (await runs.load(bus, run_name)).trainer.lr == 1e-6

    changed = await runs.create(bus, config(2e-6), None, saved=3)
    assert changed is not None and changed.words() == "continues at step 3 with lr 1e-06 → 2e-06"
    assert await runs.last_record(bus, run_name, ValuesChanged) == changed
    assert (await runs.load(bus, run_name)).trainer.lr == 2e-6
    assert await runs.create(bus, config(2e-6), None, saved=3) is None


async def test_no_such_run(bus: Bus) -> None:
    with pytest.raises(runs.NoSuchRun, match="no run 'never-made' on the bus"):
        await runs.load(bus, "never-made")


async def test_a_store_url_with_a_password_is_not_written_where_every_service_reads(bus: Bus, run_name: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, run={"name": run_name})
    await runs.create(bus, config, "unix:///store")
    await runs.create(bus, config, "redis://operator:hush@redis:6379/0")
    assert await runs.store_url(bus, run_name) is None  # nor does the address from before stand


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


@pytest.mark.parametrize("kind", ["another message", *(rare(kind) for kind in ("no UTF-8", "nothing", "a version below all"))])
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
