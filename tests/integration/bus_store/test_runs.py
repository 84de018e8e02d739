"""A run on the bus: made once, found by its id, resumed only with what may change."""

from pathlib import Path

import pytest

from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.runtime.errors import ConfigError, Problems
from shared.schema.ledger import RunFinished
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


async def test_no_such_run(bus: Bus) -> None:
    with pytest.raises(runs.NoSuchRun, match="no run 'never-made' on the bus"):
        await runs.load(bus, "never-made")


async def test_a_store_url_with_a_password_is_not_written_where_every_service_reads(bus: Bus, run_name: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, run={"name": run_name})
    await runs.create(bus, config, "unix:///store")
    await runs.create(bus, config, "redis://operator:hush@redis:6379/0")
    assert await runs.store_url(bus, run_name) is None  # nor does the address from before stand
