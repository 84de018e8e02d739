"""The settings of one role's model, with Megatron's flags sorted into its dataclasses and those that describe the architecture."""

import enum
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from services.trainer.actor_critic_exchange import Role
from shared.config import flag_table
from shared.config.run_config import RunConfig
from shared.config.trainer_section import LearningRateSchedule, OptimizerState, TrainerSection
from shared.model import architecture_flags
from shared.model.families import read_architecture
from shared.model.parallel_layout import ParallelLayout
from shared.model.trainable_parameters import Freezing, Lora
from shared.runtime.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Kind of flag → the dataclasses whose fields flags of that kind are
GROUPS: dict[str, tuple[type, ...]] = {
    "transformer": (TransformerConfig, MLATransformerConfig),
    "optimizer": (OptimizerConfig,),
    "ddp": (DistributedDataParallelConfig,),
}


@dataclass(frozen=True)
class MegatronFlags:
    """The given flags by kind: fields of Megatron's dataclasses with values of their types, and the architecture's flags as given.

    Args:
        transformer: of TransformerConfig and MLATransformerConfig. optimizer: of OptimizerConfig. ddp: of DistributedDataParallelConfig.
        architecture: Megatron's flags, such as ``num_layers``; they change nothing and are compared with the checkpoint's.
    """

    transformer: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    architecture: dict[str, Any] = field(default_factory=dict)


def resolve(given: Mapping[str, Any]) -> MegatronFlags:
    """Sorts and types the flags of ``[trainer.megatron]``.

    Raises ConfigError: an unknown or refused flag, a wrong value, one that this machine lacks Transformer Engine for, or one that steers
    Megatron's own training loop.
    """
    flags = MegatronFlags()
    for name, value in flag_table.canonical(given).items():
        for problem in flag_table.missing_engine({name: value}):
            raise problem
        if any(flag_table.without_effect({name: value})):
            continue
        for group in flag_table.catalogue()[name].groups:
            getattr(flags, group)[name] = value if group == "architecture" else converted(group, name, value)
    return flags


@cache
def _hints(group: str) -> dict[str, Any]:
    return {name: hint for model in GROUPS[group] for name, hint in typing.get_type_hints(model).items()}


def converted(group: str, name: str, value: Any) -> Any:
    """Returns plain data as a field of a dataclass holds it: dtypes, enums, tuples. Raises ConfigError where there is no such field."""
    hint = _hints(group).get(name)
    if hint is None:
        raise ConfigError(f"trainer.megatron.{name}", value, "leave it out: the Megatron on the path has no such field")
    if value is None:
        return None
    kinds = [hint, *typing.get_args(hint)]
    if typing.get_origin(hint) is tuple or any(typing.get_origin(kind) is tuple for kind in kinds):
        return tuple(value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint[value]
    return value


def model_directory(config: RunConfig, role: Role) -> Path:
    """Returns the HF checkpoint that a role starts from."""
    return config.model.hf_checkpoint if role == "actor" else config.trainer.critic_load or config.model.hf_checkpoint


def check_architecture(config: RunConfig, role: Role = "actor") -> None:
    """Compares Megatron's flags that describe a model with the one that a role starts from. Raises ConfigError where they differ."""
    if given := resolve(config.trainer.megatron).architecture:
        architecture_flags.check(given, read_architecture(model_directory(config, role)))


@dataclass(frozen=True)
class TrainerSettings:
    """The settings of one role's model: its layout over the ranks, and its training.

    Args:
        role: ``actor``, or ``critic``: its output layer is a map from each hidden state to one number, and all of it trains.
        updates: optimizer steps of the whole run, at whose end the decay of the learning rate arrives.
        temperature: logits are divided by it before log-probabilities are taken.
    """

    trainer: TrainerSection
    role: Role = "actor"
    updates: int = 0
    temperature: float = 1.0

    @classmethod
    def from_run(cls, config: RunConfig, role: Role = "actor") -> "TrainerSettings":
        updates = config.rollout.num_rollout * config.trainer.num_steps_per_rollout
        return cls(config.trainer, role, updates, config.rollout.rollout_temperature or 1.0)

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

    @cached_property
    def megatron(self) -> MegatronFlags:
        """Returns Megatron's own flags, sorted and typed. Raises ConfigError for one that is refused."""
        return resolve(self.trainer.megatron)

    @property
    def buffers(self) -> dict[str, Any]:
        """Returns Megatron's fields about the gradients' buffers."""
        keeping = OptimizerState.of(self.megatron.optimizer)
        narrow = keeping is not None and keeping.main_grads != "fp32"
        return {**self.megatron.ddp, **({"grad_reduce_in_fp32": False} if narrow else {})}

    @property
    def recomputation(self) -> dict[str, Any]:
        """Returns Megatron's fields about recomputation in the backward pass."""
        trainer = self.trainer
        if trainer.recomputes_layers:
            method, layers = trainer.recompute_method or "uniform", trainer.recompute_num_layers or 1
            return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
        if trainer.recompute_granularity is None:
            return {}
        modules = {"recompute_modules": trainer.recompute_modules} if trainer.recompute_modules else {}
        return {"recompute_granularity": "selective", **modules}

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
