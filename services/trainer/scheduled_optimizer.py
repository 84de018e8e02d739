"""What the training asks of an optimizer, whichever backend has it: Adam over float32 weights, and its place in the schedule."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shared.config.trainer_section import LearningRateSchedule, TrainerSection


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
