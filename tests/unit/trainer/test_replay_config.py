"""The config of a replay: a file's, or the one that a run's directory keeps, with flags over either."""

from pathlib import Path
from typing import Any

import pytest

from myxo.run import config_toml
from services.trainer.batch_replay import offline, replay_config, replayed
from services.trainer.trainer_settings import TrainerSettings
from shared.bus import runs
from shared.config import flags
from shared.config.config_reading import load, parse
from shared.config.run_config import RunConfig
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config, values


def test_a_runs_directory_gives_the_config_that_it_ran_with(tmp_path: Path) -> None:
    config = run_config(tmp_path, data={"rollout_seed": 3}, algorithm={"advantage_estimator": "rloo"}, trainer={"lr": 1e-4})
    directory = config.run.root
    directory.mkdir(parents=True)
    (directory / runs.FROZEN).write_text(config.model_dump_json())
    assert replay_config(directory, {}) == config
    changed = replay_config(directory, flags.parse(["--lr", "0.5", "--deterministic"]))
    assert (changed.trainer.lr, changed.algorithm.advantage_estimator, changed.data.rollout_seed) == (0.5, "rloo", 3)
    assert changed.trainer.deterministic
    (directory / runs.FROZEN).write_text(run_config(tmp_path, trainer={"megatron": {"moe_aux_loss_coeff": 0.1}}).model_dump_json())
    assert replay_config(directory, flags.parse(["--moe-router-dtype", "fp32"])).trainer.megatron == {
        "moe_aux_loss_coeff": 0.1,
        "moe_router_dtype": "fp32",
    }


def test_a_replay_writes_where_its_run_does_not(tmp_path: Path) -> None:
    debug = {"save_debug_train_data": "/train/{rollout_id}.pt", "memory_snapshot_dir": "/memory", "dump_details": "/details"}
    laid = tmp_path / "over.yaml"
    laid.write_text("save_hf: /exports/{rollout_id}\n")
    given = values(tmp_path, trainer={"save": "/saved"}, debug=debug, monitoring={"use_wandb": True, "wandb_dir": "/wandb"})
    (tmp_path / "run.toml").write_text(config_toml.dump(parse(given)))
    config = load(tmp_path / "run.toml", {"run": {"custom_config_path": laid}})
    config.run.root.mkdir(parents=True)
    (config.run.root / runs.FROZEN).write_text(config.model_dump_json())
    by_file = replay_config(tmp_path / "run.toml", {"run": {"custom_config_path": laid}})
    for found in (by_file, replay_config(config.run.root, {})):
        again = replayed(found, "{rollout_id}.pt", [0])
        assert (again.trained, again.trainer.save_hf, again.debug.train_dump) == (again.run.root, None, None)
        assert (again.debug.memory_snapshot_dir, again.monitoring.use_wandb, again.monitoring.wandb_dir) == (None, False, None)
        assert RunConfig.model_validate_json(again.model_dump_json()) == again
    own = replay_config(config.run.root, flags.parse(["--save-hf", "/other", "--dump-details", "/own", "--use-wandb"]))
    again = replayed(own, "{rollout_id}.pt", [0])
    assert (again.trainer.save_hf, again.debug.dump_details, again.monitoring.use_wandb) == (Path("/other"), Path("/own"), True)
    with pytest.raises(ConfigError, match="--save = ./other.: none"):
        replay_config(config.run.root, flags.parse(["--save", "/other"]))


@pytest.mark.parametrize(
    "sections",
    [
        {"trainer": {"colocate": True}, "rollout": {"rollout_num_gpus": 1}},
        {
            "rollout": {"external_engines": ["h1:1"], "external_engine_key_variable": "KEY"},
            "weights": {"update_weight_disk_dir": "/own", "update_weight_engine_dir": "/shared", "external_group_backend": "gloo"},
        },
    ],
)
def test_a_trainer_without_engines_waits_for_none_and_writes_for_none(tmp_path: Path, sections: dict[str, Any]) -> None:
    alone = offline(replayed(run_config(tmp_path, **sections), "{rollout_id}.pt", [0]))
    assert (alone.trainer.colocate, alone.engines_read_snapshots) == (False, False)
    assert RunConfig.model_validate_json(alone.model_dump_json()) == alone


def test_what_is_no_runs_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"CONFIG.*config\.json"):
        replay_config(tmp_path, {})


@pytest.mark.parametrize(
    "trainer", [{"lr_decay_style": "cosine"}, {"lr_warmup_fraction": 0.5}, {"lr_decay_style": "linear", "lr_decay_iters": 7}]
)
def test_the_learning_rate_is_the_runs_however_few_steps_are_trained_again(tmp_path: Path, trainer: dict[str, Any]) -> None:
    config = run_config(tmp_path, trainer={**trainer, "num_steps_per_rollout": 2}, rollout={"num_rollout": 20})
    again = replayed(config, "{rollout_id}.pt", [0, 1, 2])
    ours, theirs = (TrainerSettings.from_run(one).schedule for one in (again, config))
    assert again.rollout.num_rollout == 3 and [ours.at(step) for step in range(6)] == [theirs.at(step) for step in range(6)]
    if "lr_decay_iters" not in trainer:
        epochs = config.model_copy(update={"rollout": config.rollout.model_copy(update={"num_rollout": 0, "num_epoch": 1})})
        with pytest.raises(ConfigError, match="rollout.num_rollout = 0: the run's steps, or its directory as CONFIG"):
            replayed(epochs, "{rollout_id}.pt", [0, 1, 2])
