"""The config of a replay: a file's, or the one that a run's directory keeps, with flags over either."""

from pathlib import Path

import pytest

from services.trainer.batch_replay import replay_config
from shared.bus import runs
from shared.config import flags
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config


def test_a_runs_directory_gives_the_config_that_it_ran_with(tmp_path: Path) -> None:
    config = run_config(tmp_path, data={"rollout_seed": 3}, algorithm={"advantage_estimator": "rloo"}, trainer={"lr": 1e-4})
    directory = config.run.root
    directory.mkdir(parents=True)
    (directory / runs.FROZEN).write_text(config.model_dump_json())
    assert replay_config(directory, {}) == config
    changed = replay_config(directory, flags.parse(["--lr", "0.5", "--deterministic"]))
    assert (changed.trainer.lr, changed.algorithm.advantage_estimator, changed.data.rollout_seed) == (0.5, "rloo", 3)
    assert changed.trainer.deterministic


def test_what_is_no_runs_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"CONFIG.*config\.json"):
        replay_config(tmp_path, {})
