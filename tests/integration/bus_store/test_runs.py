"""A run on the bus: made once, found by its id, resumed only with what may change."""

from pathlib import Path

import pytest

from shared.bus import runs, streams
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.runtime.errors import ConfigError, Problems
from shared.schema.ledger import BatchFormed, BatchTrained, RunFinished, ValuesChanged
from shared.schema.service_messages import ServiceStatus
from tests.support.run_config import run_config


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
