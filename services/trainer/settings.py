"""The run's config as the actor and the objective take it."""

from __future__ import annotations

from services.trainer.actor import ActorConfig
from services.trainer.objective import ObjectiveConfig
from shared.config import RunConfig


def actor_config(config: RunConfig) -> ActorConfig:
    """The actor's view: layout, precision, optimizer of the RL phase."""
    trainer = config.trainer
    return ActorConfig(
        tensor_model_parallel_size=trainer.tensor_model_parallel_size,
        sequence_parallel=trainer.sequence_parallel,
        use_distributed_optimizer=trainer.use_distributed_optimizer,
        dtype=trainer.train_dtype,
        lr=trainer.lr,
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
        timeout_seconds=trainer.collective_timeout,
        temperature=config.rollout.rollout_temperature or 1.0,
    )


def objective_config(config: RunConfig) -> ObjectiveConfig:
    """The objective's view of [algorithm]."""
    algorithm = config.algorithm
    return ObjectiveConfig(
        advantage_estimator=algorithm.advantage_estimator,
        normalize_std=not algorithm.disable_grpo_std_normalization,
        normalize_advantages=algorithm.normalize_advantages,
        eps_clip=algorithm.eps_clip,
        eps_clip_high=algorithm.eps_clip_high,
        eps_clip_c=algorithm.eps_clip_c,
        kl_loss_type=algorithm.kl_loss_type,
        kl_loss_coef=algorithm.kl_loss_coef,
        entropy_coef=algorithm.entropy_coef,
        off_policy=algorithm.off_policy,
        tis_clip=algorithm.tis_clip,
        tis_clip_low=algorithm.tis_clip_low,
    )
