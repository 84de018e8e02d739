"""What of [trainer] reaches the actor."""

from pathlib import Path

import pytest
import torch

from services.trainer.megatron.megatron_backend import recomputation
from services.trainer.trainer_settings import TrainerSettings
from shared.config.trainer_section import TrainerSection
from shared.model.parallel_layout import ParallelLayout
from shared.model.trainable_parameters import Freezing, Lora
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config
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
    assert actor.layout == ParallelLayout(
        tensor=2, pipeline=2, context=2, expert=4, sequence_parallel=True, virtual_pipeline=3, expert_tensor=1
    )
    assert recomputation(actor.trainer) == {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
    assert (actor.value_head, critic.value_head) == (False, True)
    assert (actor.schedule.lr, critic.schedule.lr) == (1e-6, 1e-5)
    assert actor.dtype is torch.bfloat16 and actor.updates == config.rollout.num_rollout * config.trainer.num_steps_per_rollout


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
    ]
    assert not not_refused(lambda given: run_config(tmp_path, trainer=given), cases)


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
