"""The seam between the training and what computes it: Megatron-Core, or transformers' models under FSDP2.

A backend is a module whose function ``create`` makes a `Backend` of `TrainerSettings`. Its model is a `TrainedModel`, which
`services.trainer.actor.Actor`, pushes, exports, checkpoints and frozen copies work on. What ranks of either share is in
`services.trainer.parallel`; nothing outside a backend's folder imports that backend.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from services.trainer.actor_critic_exchange import Role
from services.trainer.parallel.gather_plan import GatherPlan
from services.trainer.parallel.trained_model import TrainedModel
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


class ScheduledOptimizer(ABC):
    """An optimizer that is at an update of its schedule.

    Attributes:
        schedule: of the learning rate. updates: those made so far, which are its place in the schedule. steps: those of them since the
            moments were zero, which correct Adam's bias.
    """

    def __init__(self, trainer: TrainerSection, schedule: LearningRateSchedule) -> None:
        self.trainer, self.schedule, self.updates, self.steps = trainer, schedule, 0, 0

    @property
    def lr(self) -> float:
        """Returns the learning rate of the next update."""
        return self.schedule.at(self.updates)

    def reset(self, schedule: LearningRateSchedule) -> None:
        """Starts over with zero moments at the beginning of ``schedule``. The float32 main weights keep their precision."""
        self.schedule, self.updates = schedule, 0
        self.reset_moments()

    def resume(self, schedule: LearningRateSchedule, updates: int, steps: int) -> None:
        """Takes a loaded checkpoint's warm-up and decay, at the position that it had reached, with the configured rates and end."""
        self.schedule = replace(self.schedule, warmup_steps=schedule.warmup_steps, decay_style=schedule.decay_style)
        self.updates, self.steps = updates, steps

    @abstractmethod
    def reset_moments(self) -> None:
        """Zeroes Adam's moments and its count of updates, which corrects their bias; the schedule continues."""

    @abstractmethod
    def sharded_state(self, model: Any, loading: bool, steps: int) -> tuple[dict[str, Any], dict[str, Callable[[Any], None]]]:
        """Returns the state as checkpoints hold it, by role, and by role what takes it over once it was read.

        Args:
            model: the backend's. steps: of the checkpoint that is loaded.
        """

    @abstractmethod
    def live_tensors(self, model: Any) -> Iterator[tuple[Tensor, bool]]:
        """Yields the state's tensors and the gradients, each with whether its content is kept while it is offloaded."""

    @abstractmethod
    def weights_loaded(self) -> None:
        """Takes the model's weights anew, which were loaded without the optimizer's state."""

    @abstractmethod
    def zero_gradients(self) -> None:
        """Zeroes the gradients before the backward passes."""

    @abstractmethod
    def update(self) -> tuple[float, str | None]:
        """Applies the gradients that the backward passes have left. This is a collective of all ranks.

        A gradient whose norm is not finite changes nothing: neither weights, nor moments, nor the schedule's position.

        Returns:
            The L2 norm of the policy's whole gradient before clipping; and why nothing was changed, or None.
        """


def adam(group: dict[str, Any], parameters: list[Tensor], gradients: list[Any], states: list[dict[str, Any]]) -> None:
    """Updates parameters and their moments in place, by the fused kernel and the settings of a group, whose ``step`` this one is."""
    beta1, beta2 = group["betas"]
    adamw(
        parameters,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        list(torch.full((len(parameters),), float(group["step"] - 1), device=parameters[0].device).unbind()),
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


# trainer.trainer_backend → the module that makes the backend. Only one of them is imported: the other one's imports take seconds
MODULES = {"megatron": "services.trainer.megatron.megatron_backend", "torch": "services.trainer.fsdp.fsdp_backend"}
PLANS = {"megatron": "services.trainer.megatron.hf_conversion", "torch": "services.trainer.fsdp.shard_gathering"}


def gather_plan(model: TrainedModel, apart: bool = False) -> GatherPlan:
    """Returns what gathers a model's weights under Hugging Face's names. A collective of all ranks.

    Args:
        apart: over groups of its own, for exports that run beside the training.
    """
    plan: GatherPlan = import_module(PLANS[model.backend or "megatron"]).plan_of(model, apart)
    return plan


class Passes(Protocol):
    """The functions of a backend's module ``passes``; all are collectives of the ranks that share a model."""

    def log_probs(self, model: Any, batches: Any, temperature: float, recorded: Any = None) -> list[Tensor]: ...

    def values(self, model: Any, batches: Any) -> list[Tensor]: ...

    def balanced_step(self, model: Any, batches: Any) -> Any: ...

    def forward_backward(
        self, model: Any, batches: Any, loss_fn: Any, temperature: float, need_entropy: bool, balanced: Any = None
    ) -> tuple[float, dict[str, float]]: ...

    def loss_alone(self, model: Any, batch: Any, loss_fn: Any, temperature: float, need_entropy: bool) -> float | None: ...


@dataclass(frozen=True)
class Backend:
    """One role's model in a backend.

    Args:
        model, passes: see `services.trainer.backend`. unshared: why beginnings of sequences are not computed once; None where they are.
        independent: whether a data-parallel rank can compute a loss without the others.
        finish_step: is called after an optimizer step with what ``balanced_step`` had made.
    """

    model: TrainedModel
    optimizer: ScheduledOptimizer
    passes: Passes
    unshared: str | None
    independent: bool
    finish_step: Callable[[Any], None] = lambda _: None
