"""The config of a trainer, and of a replay."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from services.trainer.backend import TrainerSettings
from services.trainer.batch_replay import offline, replay_config, replayed
from services.trainer.megatron.megatron_backend import recomputation
from shared.bus import runs
from shared.config import config_reading, flags
from shared.config.config_reading import load, parse
from shared.config.run_config import RunConfig
from shared.config.trainer_section import TrainerSection
from shared.model.parallel_layout import ParallelLayout
from shared.model.trainable_parameters import Freezing, Lora
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config, values
from tests.support.tables import not_refused, table

GIVEN = {
    "actor_num_gpus_per_node": 8,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 3,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 4,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": True,
    "use_distributed_optimizer": False,
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "mlp"],
    "deterministic": True,
    "weight_decay": 0.07,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_eps": 1e-6,
    "clip_grad": 0.5,
    "seed": 7,
}


def test_a_role_takes_the_section(tmp_path: Path):
    config = run_config(tmp_path, trainer={**GIVEN, "critic_lr": 1e-5})
    actor, critic = (TrainerSettings.from_run(config, role) for role in ("actor", "critic"))
    assert actor.trainer is config.trainer and critic.trainer is config.trainer
    expected = ParallelLayout(tensor=2, pipeline=2, context=2, expert=4, sequence_parallel=True, virtual_pipeline=3, expert_tensor=1)
    assert actor.layout == expected
    assert recomputation(actor.trainer) == {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
    assert (actor.value_head, critic.value_head) == (False, True)
    assert (actor.schedule.lr, critic.schedule.lr) == (1e-6, 1e-5)
    assert actor.dtype is torch.bfloat16 and actor.updates == config.rollout.num_rollout * config.trainer.num_steps_per_rollout


def test_a_plain_layout_is_recorded_as_checkpoints_and_clients_states_have_it():
    recorded = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1, "sequence_parallel": False, "virtual_pipeline": None}
    assert asdict(ParallelLayout.of(TrainerSection())) == {**recorded, "expert_tensor": None, "vocabulary_multiple": 1}


@table(
    ("given", "fields"),
    [
        ({}, {}),
        ({"recompute": True}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
        ),
        ({"recompute_granularity": "selective"}, {"recompute_granularity": "selective"}),
    ],
)
def test_what_the_backward_pass_runs_again(given, fields):
    assert recomputation(TrainerSection(**given)) == fields


def test_what_contradicts_itself_is_refused_by_field(tmp_path: Path):
    cases = [
        ({"tensor_model_parallel_size": 0}, ["tensor_model_parallel_size", "greater than or equal to 1"]),
        ({"context_parallel_size": 0}, ["context_parallel_size = 0", "greater than or equal to 1"]),
        ({"virtual_pipeline_model_parallel_size": 2}, ["virtual_pipeline", "= 2: none, or a pipeline_model_parallel_size"]),
        ({"recompute_method": "block"}, ["recompute_method = 'block'", "recompute_granularity = full"]),
        ({"recompute": True, "recompute_granularity": "selective"}, ["recompute = True", "short for full"]),
        ({"recompute": True, "recompute_modules": ["mlp"]}, ["recompute_modules", "recompute_granularity = selective"]),
        ({"recompute_granularity": "selective", "recompute_modules": ["layer_norm"]}, ["no module of a layer", "layernorm"]),
        ({"train_dtype": "float16"}, ["train_dtype = 'float16'", "float32", "bfloat16"]),
        ({"lr": float("nan")}, ["trainer.lr"]),
        ({"lr_decay_style": "step"}, ["lr_decay_style", "cosine"]),
        ({"lr_warmup_iters": -1}, ["lr_warmup_iters"]),
        ({"adam_beta1": 1.0}, ["adam_beta1"]),
        ({"adam_eps": 0.0}, ["adam_eps"]),
        ({"clip_grad": -0.1}, ["clip_grad"]),
        ({"weight_decay": float("inf")}, ["weight_decay"]),
        ({"collective_timeout": 0.0}, ["collective_timeout"]),
        ({"lora_rank": 0}, ["lora_rank"]),
        ({"lora_rank": 4, "lora_alpha": 0.0}, ["lora_alpha"]),
        ({"lora_rank": 4, "target_modules": ["q_proj", "all-linear"]}, ["target_modules", "alone"]),
        ({"lora_rank": 4, "target_modules": []}, ["target_modules"]),
        ({"lora_rank": 4, "freeze_params_name_list": ["embedding"]}, ["freeze_params_name_list", "lora_rank"]),
        ({"freeze_params_name_list": ["("]}, ["freeze_params_name_list", "no regular expression"]),
        ({"prefix_sharing": "on", "enable_mtp_training": True}, ["prefix_sharing = 'on': auto or off beside enable_mtp_training"]),
        ({"megatron": {"fp32-residual-connection": True}}, ["fp32_residual_connection = True: false, or train_dtype = float32"]),
        ({**TAUGHT, "quantization_aware": True}, ["opd_teacher_load = 'teacher': none with trainer.quantization_aware", "opd_teachers"]),
    ]
    assert not not_refused(lambda given: taught(tmp_path, given), cases)


TAUGHT = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": "teacher"}


def taught(directory: Path, given: dict[str, Any]) -> RunConfig:
    algorithm = {name: value for name, value in given.items() if name in TAUGHT}
    return run_config(directory, algorithm=algorithm, trainer={name: value for name, value in given.items() if name not in TAUGHT})


@pytest.mark.parametrize(
    "given",
    [
        {"prefix_sharing": "auto", "enable_mtp_training": True},
        {"prefix_sharing": "on"},
        {"megatron": {"fp32_residual_connection": True}, "train_dtype": "float32"},
        {"megatron": {"fp32_residual_connection": False}},
        TAUGHT,
        {"quantization_aware": True},
    ],
)
def test_each_of_two_that_contradict_one_another_is_taken_alone(tmp_path: Path, given: dict[str, Any]) -> None:
    assert taught(tmp_path, given).trainer is not None


@table(
    ("given", "chunks"),
    [
        ({}, 1),
        ({"virtual_pipeline_model_parallel_size": 2}, 2),
        ({"megatron": {"pipeline_model_parallel_layout": "Ett|ttL"}}, 1),
        ({"megatron": {"pipeline-model-parallel-layout": "Et|(t|)*2,t*1L"}}, 2),
        ({"megatron": {"pipeline_model_parallel_layout": "E|(tt|)*6L"}}, 4),
    ],
)
def test_a_pipelines_layout_says_how_many_chunks_a_rank_has(given: dict[str, Any], chunks: int, tmp_path: Path) -> None:
    """As in Megatron, whose own parser counts the stages."""
    trainer = run_config(tmp_path, trainer={"actor_num_gpus_per_node": 2, "pipeline_model_parallel_size": 2, **given}).trainer
    assert ParallelLayout.of(trainer).chunks == chunks
    if text := trainer.megatron.get("pipeline_model_parallel_layout"):
        assert PipelineParallelLayerLayout(text, 2).virtual_pipeline_model_parallel_size == chunks


def test_sizes_that_do_not_divide_the_ranks_are_refused_with_all_of_them(tmp_path: Path):
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "context_parallel_size": 2}
    with pytest.raises(ConfigError) as error:
        run_config(tmp_path, trainer={"actor_num_gpus_per_node": 2, **sizes})
    for words in ("tensor_model_parallel_size", "context_parallel_size", "2 x 1 x 2 = 4", "the 2 trainer ranks"):
        assert words in str(error.value)


def test_what_trains_is_the_actors_alone(tmp_path: Path):
    adapted = {"lora_rank": 8, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]}
    actor = TrainerSettings.from_run(run_config(tmp_path, trainer=adapted))
    assert actor.lora == Lora(8, 32.0, ("q_proj", "v_proj")) and actor.freezing.nothing
    frozen = {"only_train_params_name_list": ["mlp"], "freeze_params_name_list": ["router"]}
    actor = TrainerSettings.from_run(run_config(tmp_path, trainer=frozen))
    assert actor.freezing == Freezing(("mlp",), ("router",)) and actor.lora is None
    for given in (adapted, frozen):
        critic = TrainerSettings.from_run(run_config(tmp_path, trainer=given), "critic")
        assert critic.lora is None and critic.freezing.nothing


# --- the config of a replay: a file's, or the one that a run's directory keeps, with flags over either


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
    (tmp_path / "run.toml").write_text(config_reading.dump(parse(given)))
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
