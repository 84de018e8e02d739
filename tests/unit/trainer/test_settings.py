"""What of [trainer] reaches the actor."""

from dataclasses import fields
from pathlib import Path

import pytest

from services.trainer.actor import ActorConfig
from services.trainer.trainer_settings import actor_config
from shared.model.lora_targets import Lora
from shared.model.parallel_layout import ParallelLayout
from shared.model.trainable_parameters import Freezing
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config

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


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_fields_of_one_name_reach_the_actor(role, tmp_path: Path):
    config = actor_config(run_config(tmp_path, trainer=GIVEN), role)
    for field in {field.name for field in fields(ActorConfig)} & GIVEN.keys():
        value = getattr(config, field)
        assert (list(value) if isinstance(value, tuple) else value) == GIVEN[field], field
    assert GIVEN.keys() - {field.name for field in fields(ActorConfig)} == {"actor_num_gpus_per_node"}
    assert config.layout == ParallelLayout(
        tensor=2, pipeline=2, context=2, expert=4, sequence_parallel=True, virtual_pipeline=3, expert_tensor=1
    )
    assert config.recomputation == {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
    assert config.optimizer.adam_beta2 == 0.95 and config.optimizer.clip_grad == 0.5
    assert config.value_head == (role == "critic")


def test_sizes_that_do_not_divide_the_ranks_are_refused_with_all_of_them(tmp_path: Path):
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "context_parallel_size": 2}
    with pytest.raises(ConfigError) as error:
        run_config(tmp_path, trainer={"actor_num_gpus_per_node": 2, **sizes})
    for words in ("tensor_model_parallel_size", "context_parallel_size", "2 x 1 x 2 = 4", "the 2 trainer ranks"):
        assert words in str(error.value)


def test_what_trains_is_the_actors_alone(tmp_path: Path):
    adapted = {"lora_rank": 8, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]}
    actor = actor_config(run_config(tmp_path, trainer=adapted))
    assert actor.lora == Lora(8, 32.0, ("q_proj", "v_proj")) and actor.freezing.nothing
    frozen = {"only_train_params_name_list": ["mlp"], "freeze_params_name_list": ["router"]}
    actor = actor_config(run_config(tmp_path, trainer=frozen))
    assert actor.freezing == Freezing(("mlp",), ("router",)) and actor.lora is None
    for given in (adapted, frozen):
        critic = actor_config(run_config(tmp_path, trainer=given), "critic")
        assert critic.lora is None and critic.freezing.nothing
