"""One pipeline stage's adapters, bucket by bucket: all that a push of a model with LoRA carries."""

from __future__ import annotations

import torch
from torch import Tensor

from services.trainer.megatron.gather_plan import GatherPlan
from services.trainer.megatron.runtime import deadline
from services.trainer.weights.stage_export import view
from shared.transfer.manifest import Manifest, lay_out


class AdapterExport:
    """What `StageExport` is to whole weights: the same manifest on all ranks of a stage, and `fill` for every bucket of it.

    Engines lay them over their own checkpoint, which is what was trained from.
    """

    def __init__(self, cargo: GatherPlan, bucket_bytes: int) -> None:
        self._cargo, self._adapters = cargo, cargo.adapters
        self.manifest: Manifest = lay_out(self._adapters.tensors(), bucket_bytes, "adapter", self._adapters.scale)

    @torch.no_grad()
    def fill(self, number: int, flat: Tensor | None) -> None:
        """Puts bucket ``number`` into ``flat``: uint8 [its size] on the source; None elsewhere, and where its channel is broken.

        A collective of the stage's ranks; each data-parallel replica's gather for themselves, and the source is one of the first's.
        """
        with deadline("the export of the adapters"):
            for slot in self.manifest.buckets[number].slots:
                tensor = self._adapters.gather(slot.name, self._cargo.groups.tensor)
                if flat is not None:
                    assert tensor is not None  # the stage's source is the first of its tensor-parallel group
                    view(flat, slot).copy_(tensor)
