"""How fast a model is trained, in FLOP/s of its own arithmetic and in parts of what its devices could do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from services.trainer import flops
from services.trainer.actor import Actor
from shared.model.architecture import Architecture


@dataclass(frozen=True)
class Speed:
    """Of one role.

    Args:
        ranks: devices that train together. peak: operations a second of one of them; None: not known. value_head: of a critic.
        adapters: are all that trains.
    """

    architecture: Architecture
    ranks: int
    peak: float | None
    value_head: bool = False
    adapters: bool = False

    @classmethod
    def of(cls, actor: Actor) -> Speed:
        device = torch.cuda.get_device_name() if next(actor.model.modules[0].parameters()).is_cuda else "cpu"
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        settings = actor.settings
        return cls(
            actor.architecture, ranks, flops.peak(device, settings.trainer.train_dtype), settings.value_head, settings.lora is not None
        )

    def of_step(self, lengths: Sequence[int], seconds: float) -> dict[str, float]:
        """Of the whole batch's samples (tokens of each), trained once in ``seconds``: TFLOP/s a device, and MFU where the peak is known."""
        operations = flops.training(self.architecture, lengths, value_head=self.value_head, adapters=self.adapters)
        rate = operations / seconds / self.ranks
        return {"actor_train_tflops": rate / 1e12} | ({} if self.peak is None else {"actor_train_mfu": rate / self.peak})
