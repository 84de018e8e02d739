"""One pipeline stage's weights, bucket by bucket: gathered on the stage's source, straight into a channel's flat buffer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.megatron.gather_plan import GatherPlan, GatherUnit
from services.trainer.megatron.runtime import deadline, device
from shared.transfer.manifest import Bucket, Manifest, Slot, lay_out_units


@dataclass
class _Copies:
    """The copies of one bucket into one buffer that need no other rank; kept, for they are the same at every push."""

    buffer: int
    targets: list[Tensor]
    sources: list[Tensor]


class StageExport:
    """What the ranks of one stage give away in a push. All of them construct it, and call `fill` for every bucket.

    Args:
        bucket_bytes: of a bucket, at most, unless a parameter alone is larger. dtype: torch's name of what is sent; None: as trained.
        skip_frozen: leave out parameters that no optimizer updates.
    """

    def __init__(self, cargo: GatherPlan, bucket_bytes: int, *, dtype: str | None = None, skip_frozen: bool = False) -> None:
        self._cargo = cargo
        held = [one for one in cargo.of_stage(cargo.stage) if not (skip_frozen and one.name in cargo.frozen)]
        trained = cargo.model.config.params_dtype
        specs = [[(name, self._name(one, trained, dtype), shape) for name, shape in one.tensors] for one in held]
        self.manifest: Manifest = lay_out_units(specs, bucket_bytes)
        shipments = iter(held)
        self._shipments: list[list[tuple[GatherUnit, tuple[Slot, ...]]]] = []
        for bucket in self.manifest.buckets:
            self._shipments.append(list(_of_bucket(bucket, shipments)))
        self._copies: dict[int, _Copies] = {}

    @torch.no_grad()
    def fill(self, number: int, flat: Tensor | None) -> None:
        """Puts bucket ``number`` into ``flat``: uint8 [its size] on the source; None elsewhere, and where its channel is broken.

        A collective of the stage's ranks.
        """
        rank, source = dist.get_rank(), self._cargo.source
        kept = self._kept(number, flat) if flat is not None else None
        for shipment, slots in self._shipments[number]:
            if kept is not None and self._cargo.is_whole(shipment):
                continue
            with deadline(f"the export of {shipment.name}"):
                parts = self._cargo.parts(shipment)
                if rank == source:
                    self._take(shipment, parts, [_place(flat, slot) for slot in slots])
                elif parts is not None:
                    for part, slot in zip(parts, slots, strict=True):
                        sent = part.to(_torch_dtype(slot.dtype)).contiguous()
                        dist.send(sent, dst=source, group=self._cargo.groups.world)
        if kept is not None and kept.targets:
            torch._foreach_copy_(kept.targets, kept.sources)

    def _take(self, shipment: GatherUnit, parts: list[Tensor] | None, targets: list[Tensor]) -> None:
        if parts is None:
            for target in targets:
                dist.recv(target, src=shipment.owner, group=self._cargo.groups.world)
            return
        for target, part in zip(targets, parts, strict=True):
            target.view(part.shape).copy_(part)

    def _kept(self, number: int, flat: Tensor) -> _Copies:
        kept = self._copies.get(number)
        if kept is not None and kept.buffer == flat.data_ptr():
            return kept
        kept = self._copies[number] = _Copies(flat.data_ptr(), [], [])
        for shipment, slots in self._shipments[number]:
            if not self._cargo.is_whole(shipment):
                continue
            parts = self._cargo.parts(shipment)
            assert parts is not None  # of a parameter that this rank owns
            kept.sources += parts
            kept.targets += [view(flat, slot).view(part.shape) for part, slot in zip(parts, slots, strict=True)]
        return kept

    @staticmethod
    def _name(shipment: GatherUnit, trained: torch.dtype, wanted: str | None) -> str:
        return "float32" if shipment.float32 else wanted or str(trained).removeprefix("torch.")


def view(flat: Tensor, slot: Slot) -> Tensor:
    """A tensor's place in a flat buffer, in its own dtype and shape."""
    return flat[slot.offset : slot.offset + slot.nbytes].view(_torch_dtype(slot.dtype)).view(slot.shape)


def _place(flat: Tensor | None, slot: Slot) -> Tensor:
    return view(flat, slot) if flat is not None else torch.empty(slot.shape, dtype=_torch_dtype(slot.dtype), device=device())


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _of_bucket(bucket: Bucket, shipments: Iterator[GatherUnit]) -> Iterator[tuple[GatherUnit, tuple[Slot, ...]]]:
    """The shipments of a bucket, each with its slots."""
    first = 0
    while first < len(bucket.slots):
        shipment = next(shipments)
        slots = bucket.slots[first : first + len(shipment.tensors)]
        first += len(slots)
        yield shipment, slots
