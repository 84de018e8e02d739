"""What the launcher waits for once a run is finished, with a real process as its trainer."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from myxo.launch.launcher import MARGIN_SECONDS, FinalWeights
from myxo.launch.supervisor import BackOff, Supervisor
from shared.config.run_config import RunConfig
from shared.model.final_exports import MARK
from shared.runtime import exit_codes
from tests.integration.myxo.command import wait_for
from tests.integration.myxo.test_supervisor import SLEEP, spec
from tests.support.run_config import run_config

STEPS, PATIENCE = 6, 20.0


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Of a run whose last checkpoint is on disk."""
    config = run_config(tmp_path, rollout={"num_rollout": STEPS}, trainer={"collective_timeout": PATIENCE})
    checkpoint = config.trained / "checkpoints" / f"step_{STEPS:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text("{}")
    return config


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor([spec(SLEEP), spec(SLEEP, "buffer-0")], lambda name: tmp_path / f"{name}.log", backoff=lambda: BackOff(first=0.05))
    yield made
    made.kill()


def written(config: RunConfig) -> None:
    (config.trained / "hf").mkdir()
    (config.trained / "hf" / MARK).write_text(json.dumps({"steps": STEPS}))


def test_they_are_owed_until_they_are_there(config: RunConfig, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]) -> None:
    weights, now = FinalWeights(config), time.monotonic()
    assert weights.wait is None
    assert weights.owed(supervisor, now)
    assert weights.wait is not None and weights.wait.what == f"the final weights in {config.trained / 'hf'}"
    assert weights.verdict(0) == exit_codes.RUN_FAILED
    assert f"its final weights in {config.trained / 'hf'} are not there" in capsys.readouterr().err
    written(config)
    assert not weights.owed(supervisor, now + 1)
    assert (weights.wait, weights.verdict(0), weights.announced()) == (None, 0, "")


def test_a_new_life_of_the_trainer_has_its_time_anew(config: RunConfig, supervisor: Supervisor) -> None:
    weights, patience = FinalWeights(config), PATIENCE + MARGIN_SECONDS
    [began] = [time.monotonic() - item.lived for item in supervisor.statuses(time.monotonic()) if item.service == "trainer"]
    assert weights.owed(supervisor, began + 1)
    assert weights.owed(supervisor, began + 0.9 * patience)
    assert not weights.owed(supervisor, began + 1.1 * patience)
    supervisor.kill()
    wait_for("its next life", lambda: supervisor.tick(time.monotonic(), finished=True) or supervisor.restarted)
    [life] = [item.lived for item in supervisor.statuses(time.monotonic()) if item.service == "trainer"]
    assert weights.owed(supervisor, time.monotonic() - life + 0.9 * patience)


def test_nothing_is_waited_for_that_nobody_could_write(config: RunConfig, supervisor: Supervisor) -> None:
    (config.trained / "checkpoints" / f"step_{STEPS:08d}" / "checkpoint.json").unlink()
    weights = FinalWeights(config)
    assert not weights.owed(supervisor, time.monotonic())
    assert (weights.announced(), weights.verdict(0)) == ("", 0)
