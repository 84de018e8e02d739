"""The run's config as the actor takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.trainer.actor import ActorConfig
from services.trainer.actor_critic_exchange import Role
from services.trainer.megatron.flag_sorting import resolve
from shared.config.run_config import RunConfig
from shared.config.sections import TrainerSection
from shared.model import architecture_flags
from shared.model.families import read_architecture


def model_directory(config: RunConfig, role: Role) -> Path:
    """The HF checkpoint that a role starts from."""
    return config.model.hf_checkpoint if role == "actor" else config.trainer.critic_load or config.model.hf_checkpoint


def check_architecture(config: RunConfig, role: Role = "actor") -> None:
    """Compares Megatron's flags that describe a model with the one that a role starts from. Raises ConfigError where they differ."""
    if given := resolve(config.trainer.megatron).architecture:
        architecture_flags.check(given, read_architecture(model_directory(config, role)))


def actor_config(config: RunConfig, role: Role = "actor") -> ActorConfig:
    """The view of a role's model: layout, precision, optimizer of the RL phase."""
    trainer = config.trainer
    return ActorConfig(
        tensor_model_parallel_size=trainer.tensor_model_parallel_size,
        pipeline_model_parallel_size=trainer.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=trainer.virtual_pipeline_model_parallel_size,
        context_parallel_size=trainer.context_parallel_size,
        expert_model_parallel_size=trainer.expert_model_parallel_size,
        expert_tensor_parallel_size=trainer.expert_tensor_parallel_size,
        sequence_parallel=trainer.sequence_parallel,
        use_distributed_optimizer=trainer.use_distributed_optimizer,
        dtype=trainer.train_dtype,
        lr=trainer.lr if role == "actor" else trainer.critic_lr or trainer.lr,
        min_lr=trainer.min_lr,
        lr_warmup_steps=trainer.lr_warmup_iters,
        lr_decay_steps=config.rollout.num_rollout * trainer.num_steps_per_rollout if trainer.lr_decay_style != "constant" else 0,
        lr_decay_style=trainer.lr_decay_style,
        weight_decay=trainer.weight_decay,
        adam_beta1=trainer.adam_beta1,
        adam_beta2=trainer.adam_beta2,
        adam_eps=trainer.adam_eps,
        clip_grad=trainer.clip_grad,
        seed=trainer.seed,
        recompute=trainer.recompute,
        recompute_granularity=trainer.recompute_granularity,
        recompute_method=trainer.recompute_method,
        recompute_num_layers=trainer.recompute_num_layers,
        recompute_modules=tuple(trainer.recompute_modules),
        **(_trained(trainer) if role == "actor" else {}),
        deterministic=trainer.deterministic,
        timeout_seconds=trainer.collective_timeout,
        temperature=config.rollout.rollout_temperature or 1.0,
        value_head=role == "critic",
        megatron=resolve(trainer.megatron).fields(),
    )


def _trained(trainer: TrainerSection) -> dict[str, Any]:
    """What of the actor trains; a critic trains whole."""
    return {
        "only_train_params_name_list": tuple(trainer.only_train_params_name_list),
        "freeze_params_name_list": tuple(trainer.freeze_params_name_list),
        "lora_rank": trainer.lora_rank,
        "lora_alpha": trainer.lora_alpha,
        "target_modules": tuple(trainer.target_modules),
    }
