"""One pipeline stage's export in a push, bucket by bucket: gathered on the stage's source, directly into a channel's flat buffer.

All ranks of a stage construct the same export, and call `fill` for every bucket of its manifest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from services.trainer.megatron.gather_plan import GatherPlan, GatherUnit
from services.trainer.megatron.runtime import deadline, device
from shared.transfer.bucket_ring import slot_view, torch_dtype
from shared.transfer.manifest import RAMP_PART, Bucket, Kind, Manifest, Slot, TensorSpec, lay_out_units, unit_bytes

Unit = TypeVar("Unit")


@dataclass
class _Copies:
    """The copies of one bucket into one buffer that need no other rank; they are the same at every push."""

    buffer: int
    targets: list[Tensor]
    sources: list[Tensor]


class StageExport:
    """The export of the whole weights, or of LoRA's adapters alone: engines apply them to the checkpoint that training started from.

    Args:
        bucket_bytes: the most of a bucket, unless one parameter is larger. dtype: torch's name of the sent dtype; None: as trained.
        skip_frozen: whether to leave out parameters that no optimizer updates.
    """

    def __init__(self, plan: GatherPlan, bucket_bytes: int, *, dtype: str | None = None, skip_frozen: bool = False) -> None:
        self._plan = plan
        held = [unit for unit in plan.of_stage() if not (skip_frozen and unit.name in plan.frozen)]
        lora = plan.model.lora
        sent = (dtype if lora is None else None) or str(plan.model.config.params_dtype).removeprefix("torch.")

        def specs(unit: GatherUnit) -> list[TensorSpec]:
            return [(name, "float32" if unit.float32 else sent, shape) for name, shape in unit.tensors]

        held = travel_order(held, [unit_bytes(specs(unit)) for unit in held], bucket_bytes)
        kind: tuple[Kind, float] = ("weights", 1.0) if lora is None else ("adapter", lora.scale)
        self.manifest: Manifest = lay_out_units(map(specs, held), bucket_bytes, *kind, ramped=True)
        units = iter(held)
        self._units = [list(_units_of(bucket, units)) for bucket in self.manifest.buckets]
        self._copies: dict[int, _Copies] = {}

    @torch.no_grad()
    def fill(self, index: int, flat: Tensor | None) -> None:
        """Puts bucket ``index`` into ``flat``: uint8 [its size] on the source; None elsewhere, and where its channel is broken.

        A collective of the stage's ranks.
        """
        copies = self._own_copies(index, flat) if flat is not None else None
        for unit, slots in self._units[index]:
            if copies is not None and self._plan.is_whole(unit):
                continue
            with deadline(f"the export of {unit.name}"):
                targets = [_target(flat, slot) for slot in slots] if self._plan.is_source else None
                self._plan.deliver(unit, self._plan.source, [torch_dtype(slot.dtype) for slot in slots], targets)
        if copies is not None and copies.targets:
            torch._foreach_copy_(copies.targets, copies.sources)

    def _own_copies(self, index: int, flat: Tensor) -> _Copies:
        found = self._copies.get(index)
        if found is None or found.buffer != flat.data_ptr():
            found = self._copies[index] = _Copies(flat.data_ptr(), [], [])
            for unit, slots in self._units[index]:
                if self._plan.is_whole(unit):
                    parts = self._plan.parts(unit)
                    assert parts is not None  # views of a parameter that this rank owns
                    found.sources += parts
                    found.targets += [slot_view(flat, slot).view(part.shape) for part, slot in zip(parts, slots, strict=True)]
        return found


def travel_order(units: Sequence[Unit], sizes: Sequence[int], bucket_bytes: int) -> list[Unit]:
    """Returns the units with the large ones, an embedding for example, in the middle: a push begins and ends with small buckets."""
    large = [unit for unit, nbytes in zip(units, sizes, strict=True) if nbytes > bucket_bytes * RAMP_PART]
    small = [unit for unit, nbytes in zip(units, sizes, strict=True) if nbytes <= bucket_bytes * RAMP_PART]
    middle = len(small) // 2
    return [*small[:middle], *large, *small[middle:]]


def _target(flat: Tensor | None, slot: Slot) -> Tensor:
    return slot_view(flat, slot) if flat is not None else torch.empty(slot.shape, dtype=torch_dtype(slot.dtype), device=device())


def _units_of(bucket: Bucket, units: Iterator[GatherUnit]) -> Iterator[tuple[GatherUnit, tuple[Slot, ...]]]:
    """Yields the units of a bucket, each with its slots."""
    first = 0
    while first < len(bucket.slots):
        unit = next(units)
        slots = bucket.slots[first : first + len(unit.tensors)]
        first += len(slots)
        yield unit, slots
