"""Gathering of an FSDP2 model's weights under Hugging Face's names, one parameter at a time."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from services.trainer.fsdp.model import FIELD, FsdpModel
from services.trainer.fsdp.shards import local, rows_of
from services.trainer.parallel.gather_plan import GatherPlan, GatherUnit
from services.trainer.parallel.runtime import deadline, timeout_seconds
from shared.model.hf_checkpoint import read_headers, some
from shared.runtime.errors import ConfigError


class FsdpGatherPlan(GatherPlan):
    """Each parameter is a unit: its shards meet on the rank that wants it, where transformers' conversion makes the checkpoint's tensors of
    it. No rank ever holds more than one whole parameter besides its shards.

    Args:
        apart: gathers over a group of its own, for pushes beside the training: collectives of one group must not come from two threads.
    """

    def __init__(self, model: FsdpModel, apart: bool = False) -> None:
        self.model, self._language_model = model, model.language_model
        world, self._group = dist.get_world_size(), None
        if apart and world > 1:
            with deadline("the forming of the group that weights are exported over"):
                self._group = dist.new_group(timeout=timedelta(seconds=timeout_seconds()))
        self.stage = self.source = 0
        self._stage_of = [0] * world
        buffers = model.buffers()
        self._held: dict[str, Tensor] = {**dict(model.language_model.named_parameters()), **buffers}
        self.units = []
        for name, one in self._held.items():
            made = self._converted(name, torch.empty(one.shape, device="meta"))
            tensors = tuple((each, tuple(part.shape)) for each, part in made.items())
            self.units.append(GatherUnit(name, 0, tensors, float32=name in buffers))
        held_by_file, _ = read_headers(model.hf_dir) if any(model.hf_dir.glob("*.safetensors")) else ({}, [])
        strange = [name for unit in self.units for name, _ in unit.tensors if held_by_file and name not in held_by_file]
        if strange:
            raise ConfigError(FIELD, "torch", f"megatron; transformers gives the checkpoint's tensors other names: {some(strange)}")
        self.adapter_units = []
        self.holders = {unit.name: list(range(world)) for unit in self.units}
        self.frozen = frozenset(name for name, one in model.named_parameters().items() if not one.requires_grad)

    def _converted(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = revert_weight_conversion(self._language_model, {name: tensor})
        return found

    def parts(self, unit: GatherUnit, owner: int | None = None) -> list[Tensor] | None:
        return self._gathered(unit, 0 if owner is None else owner, None)

    def deliver(
        self, unit: GatherUnit, destination: int, dtypes: Sequence[torch.dtype], targets: list[Tensor] | None = None
    ) -> list[Tensor] | None:
        """Hands a parameter's tensors to one rank; see `GatherPlan.deliver`. A collective of all ranks."""
        parts = self._gathered(unit, destination, dtypes[0])
        if parts is None or targets is None:
            return parts
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)
        return targets

    def is_whole(self, unit: GatherUnit) -> bool:
        return dist.get_world_size() == 1 and [name for name, _ in unit.tensors] == [unit.name]

    def leave(self) -> None:
        """Ends the group that the plan has made."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _gathered(self, unit: GatherUnit, destination: int, dtype: torch.dtype | None) -> list[Tensor] | None:
        """Returns a parameter's tensors on one rank, in ``dtype`` or their own, None on the others."""
        held, own = self._held[unit.name], local(self._held[unit.name])
        own = own if dtype is None else own.to(dtype)
        whole: Tensor | None = own
        if isinstance(held, DTensor) and dist.get_world_size() > 1:
            whole = self._joined(held, own, destination)
        elif dist.get_rank() != destination:
            whole = None
        if whole is None:
            return None
        made = self._converted(unit.name, whole)
        return [made[name] for name, _ in unit.tensors]

    def _joined(self, held: DTensor, own: Tensor, destination: int) -> Tensor | None:
        """Gathers shards of equal size, the last ones padded, on one rank."""
        world = dist.get_world_size()
        spans = [rows_of(held, rank) for rank in range(world)]
        each = spans[0][1] - spans[0][0]
        padded = own.new_zeros((each, *own.shape[1:]))
        padded[: own.shape[0]] = own
        if dist.get_rank() != destination:
            dist.gather(padded, None, dst=destination, group=self._group)
            return None
        shards = [torch.empty_like(padded) for _ in range(world)]
        dist.gather(padded, shards, dst=destination, group=self._group)
        return torch.cat([shard[: stop - start] for shard, (start, stop) in zip(shards, spans, strict=True)])


def plan_of(model: FsdpModel, apart: bool) -> FsdpGatherPlan:
    return FsdpGatherPlan(model, apart)
