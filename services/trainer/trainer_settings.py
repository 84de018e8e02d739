"""The settings of one role's model."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from services.trainer.actor_critic_exchange import Role
from shared.config.run_config import RunConfig
from shared.config.trainer_section import LearningRateSchedule, TrainerSection
from shared.model.parallel_layout import ParallelLayout
from shared.model.trainable_parameters import Freezing, Lora

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_directory(config: RunConfig, role: Role) -> Path:
    """Returns the HF checkpoint that a role starts from."""
    return config.model.hf_checkpoint if role == "actor" else config.trainer.critic_load or config.model.hf_checkpoint


@dataclass(frozen=True)
class TrainerSettings:
    """The settings of one role's model: its layout over the ranks, and its training.

    Args:
        role: ``actor``, or ``critic``: its output layer is a map from each hidden state to one number, and all of it trains.
        updates: optimizer steps of the whole run, at whose end the decay of the learning rate arrives.
        temperature: logits are divided by it before log-probabilities are taken. shows: as in `DataSection`. precision: see
            `rollout_precision`.
    """

    trainer: TrainerSection
    role: Role = "actor"
    updates: int = 0
    temperature: float = 1.0
    shows: str = ""
    precision: str = "checkpoint"

    @classmethod
    def from_run(cls, config: RunConfig, role: Role = "actor") -> "TrainerSettings":
        updates = config.rollout.num_rollout * config.trainer.num_steps_per_rollout
        trainer = config.trainer
        if config.rollout.alignment != "off":
            trainer = trainer.model_copy(update={"deterministic": True})
        precision = config.rollout.rollout_precision if role == "actor" else "checkpoint"
        return cls(trainer, role, updates, config.rollout.rollout_temperature or 1.0, config.data.shows, precision)

    @property
    def value_head(self) -> bool:
        """Returns whether the model gives values in the place of logits."""
        return self.role == "critic"

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of weights and activations; gradients and the optimizer's weights are always float32."""
        return DTYPES[self.trainer.train_dtype]

    @cached_property
    def layout(self) -> ParallelLayout:
        return ParallelLayout.of(self.trainer)

    @property
    def freezing(self) -> Freezing:
        """Returns the patterns that freeze the actor's parameters."""
        return Freezing() if self.value_head else Freezing.of(self.trainer)

    @property
    def lora(self) -> Lora | None:
        """Returns the actor's adapters; None where the parameters themselves are trained."""
        return None if self.value_head else Lora.of(self.trainer)

    @property
    def schedule(self) -> LearningRateSchedule:
        """Returns the learning-rate schedule of the RL phase. Raises ConfigError where the run is too short for it."""
        trainer = self.trainer
        lr = trainer.critic_lr if self.role == "critic" and trainer.critic_lr is not None else trainer.lr
        warmup, decay = trainer.warmup_steps(self.updates), trainer.decay_steps(self.updates)
        return LearningRateSchedule(lr, trainer.min_lr, warmup, decay, trainer.lr_decay_style)
