"""The learning rate as a function of how many updates have been made."""

import math
from dataclasses import dataclass
from typing import Literal

from shared.runtime.errors import ConfigError

DecayStyle = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up, then decay from ``lr`` to ``min_lr``. Pure: the optimizer keeps the count of updates.

    Unlike Megatron's scheduler, which makes the first update of a warm-up with a learning rate of 0, the first of n
    warm-up updates uses ``lr / n`` and the n-th ``lr``.

    Args:
        lr: peak. min_lr: where the decay ends, and stays. warmup_steps: updates of the warm-up.
        decay_steps: update at which the decay reaches ``min_lr``, counted from 0, warm-up included; unused if constant.
        decay_style: ``constant``, ``linear`` or ``cosine``.

    Raises ConfigError where the decay does not fit its rates or its steps.
    """

    lr: float
    min_lr: float = 0.0
    warmup_steps: int = 0
    decay_steps: int = 0
    decay_style: DecayStyle = "constant"

    def __post_init__(self) -> None:
        if self.decay_style == "constant":
            return
        if not 0 <= self.min_lr <= self.lr:
            raise ConfigError("trainer.min_lr", self.min_lr, f"between 0 and lr, {self.lr:g}")
        if self.decay_steps <= self.warmup_steps:
            wanted = f"below the {self.decay_steps} optimizer steps at whose end the decay arrives"
            raise ConfigError("trainer.lr_warmup_iters", self.warmup_steps, wanted)

    def at(self, updates: int) -> float:
        """Returns the learning rate of the update that follows ``updates`` earlier ones."""
        if updates < self.warmup_steps:
            return self.lr * (updates + 1) / self.warmup_steps
        if self.decay_style == "constant":
            return self.lr
        done = min(1.0, (updates - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        left = 1.0 - done if self.decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_lr + left * (self.lr - self.min_lr)
