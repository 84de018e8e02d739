"""Gathering of an FSDP2 model's weights under Hugging Face's names, one parameter at a time, and checkpoints converted to that form."""

from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from services.trainer.backend import TrainerSettings
from services.trainer.fsdp import all_ranks
from services.trainer.fsdp.adapters import MARK, LinearAdapter, adapters_of, peft_name
from services.trainer.fsdp.model import FIELD, FsdpModel, assemble
from services.trainer.fsdp.shards import box_of, local, shard_group, split_of, whole_shape
from services.trainer.parallel import runtime
from services.trainer.parallel.checkpoint import check_architecture, policy_checkpoint, weights_only
from services.trainer.parallel.export import start_export
from services.trainer.parallel.gather_plan import GatherPlan, GatherUnit
from services.trainer.parallel.runtime import device
from shared.config.trainer_section import TrainerSection
from shared.model.families import read_architecture
from shared.model.hf_checkpoint import read_headers, some
from shared.runtime.errors import ConfigError


class FsdpGatherPlan(GatherPlan):
    """Each parameter is a unit: its shards meet on the rank that wants it, where transformers' conversion makes the checkpoint's tensors of
    it. No rank ever holds more than one whole parameter besides its shards.

    Args:
        apart: gathers over groups of its own, for pushes beside the training.
    """

    def __init__(self, model: FsdpModel, apart: bool = False) -> None:
        self.model, self._language_model, self.model_directory = model, model.language_model, model.hf_dir
        world, parameters = dist.get_world_size(), model.named_parameters()
        if apart:
            self.form_own_groups({shard_group(one) for one in parameters.values() if isinstance(one, DTensor) and split_of(one) is None})
        self.stage = self.source = 0
        self._stage_of = [0] * world
        buffers = model.buffers()
        named = dict(model.language_model.named_parameters())
        self._held: dict[str, Tensor] = {**{name: one for name, one in named.items() if MARK not in name}, **buffers}
        self.units = list(self._of_model(buffers))
        adapters = adapters_of(self._language_model) if model.lora is not None else []
        self._adapters = {matrix: adapter for adapter in adapters for matrix in adapter.matrices}
        self._matrices = dict[str, Tensor]()
        self.adapter_units = [unit for adapter in adapters for unit in self._of_adapter(adapter)]
        self.holders = {unit.name: list(range(world)) for unit in [*self.units, *self.adapter_units]}
        self.frozen = frozenset(name for name, one in parameters.items() if not one.requires_grad)

    def _of_model(self, buffers: Container[str]) -> Iterator[GatherUnit]:
        """Yields the units of the model. Raises ConfigError: the checkpoint's tensors have other names."""
        directory = self.model_directory
        known, _ = read_headers(directory) if any(directory.glob("*.safetensors")) else ({}, [])
        seen = set[str]()
        for name, one in self._held.items():
            made = self._converted(name, torch.empty(whole_shape(one), device="meta"))
            if strange := [each for each in made if known and each not in known]:
                raise ConfigError(FIELD, "torch", f"megatron; transformers gives the checkpoint's tensors other names: {some(strange)}")
            if parted := sorted(seen & made.keys()):
                raise ConfigError(FIELD, "torch", f"megatron; transformers cuts tensors of the checkpoint in parts: {some(parted)}")
            seen |= made.keys()
            yield GatherUnit(name, 0, tuple((each, tuple(part.shape)) for each, part in made.items()), float32=name in buffers)

    def _of_adapter(self, adapter: LinearAdapter) -> Iterator[GatherUnit]:
        for part, one in adapter.named_parameters():
            tensors = tuple((peft_name(each, part), tuple(one.shape[-2:])) for each in adapter.matrices)
            self._matrices[tensors[0][0]] = one
            yield GatherUnit(tensors[0][0], 0, tensors)

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
        if dist.get_world_size() > 1 or [name for name, _ in unit.tensors] != [unit.name] or unit.name in self._adapters:
            return False
        held = self._held.get(unit.name)  # what lies in host memory is copied each time
        return local(self._matrices[unit.name] if held is None else held).device.type == device().type

    def _gathered(self, unit: GatherUnit, destination: int, dtype: torch.dtype | None) -> list[Tensor] | None:
        """Returns a parameter's tensors on one rank, in ``dtype`` or their own, None on the others."""
        held = self._held.get(unit.name)
        if adapters := list(dict.fromkeys(self._adapters[name] for name, _ in unit.tensors if name in self._adapters)):
            return self._merged(unit, adapters, destination, dtype)
        whole = self._whole(self._matrices[unit.name] if held is None else held, destination, dtype)
        if whole is None or held is None:
            return None if whole is None else list(whole.unbind()) if whole.dim() == 3 else [whole]
        made = self._converted(unit.name, whole)
        return [made[name] for name, _ in unit.tensors]

    def _merged(self, unit: GatherUnit, adapters: list[LinearAdapter], destination: int, dtype: torch.dtype | None) -> list[Tensor] | None:
        """Returns a parameter's tensors with adapters added, computed in float32 and rounded once."""
        wanted = self._held[unit.name], *(part for each in adapters for part in (each.a, each.b))
        wholes = [whole for one in wanted if (whole := self._whole(one, destination, None)) is not None]
        if not wholes:
            return None
        made = self._converted(unit.name, wholes[0])
        for adapter, a, b in zip(adapters, wholes[1::2], wholes[2::2], strict=True):
            for name in adapter.matrices:
                made[name] = torch.addmm(made[name], adapter.of(name, b), adapter.of(name, a), alpha=adapter.scale)
        return [made[name].to(dtype or made[name].dtype) for name, _ in unit.tensors]

    def _whole(self, held: Tensor, destination: int, dtype: torch.dtype | None) -> Tensor | None:
        """Returns a whole parameter on one rank, in ``dtype`` or its own, None on the others."""
        own = local(held).to(device=device(), dtype=dtype)
        if isinstance(held, DTensor) and dist.get_world_size() > 1:
            group = self.group(None if split_of(held) else shard_group(held))
            return self._joined(held, own, destination, group) if destination in dist.get_process_group_ranks(group) else None
        return own if dist.get_rank() == destination else None

    def _joined(self, held: DTensor, own: Tensor, destination: int, group: dist.ProcessGroup) -> Tensor | None:
        """Gathers shards of equal size, the last ones padded, on one rank."""
        boxes = [box_of(held, rank) for rank in range(group.size())]
        padded = own.new_zeros((boxes[0][0].stop - boxes[0][0].start, *own.shape[1:]))
        padded[: own.shape[0]] = own
        if dist.get_rank() != destination:
            dist.gather(padded, None, dst=destination, group=group)
            return None
        shards = [torch.empty_like(padded) for _ in boxes]
        dist.gather(padded, shards, dst=destination, group=group)
        whole = own.new_empty(whole_shape(held))
        for box, shard in zip(boxes, shards, strict=True):
            whole[box] = shard[: box[0].stop - box[0].start]
        return whole


def plan_of(model: FsdpModel, apart: bool) -> FsdpGatherPlan:
    return FsdpGatherPlan(model, apart)


def to_hf(source: Path, target: Path, hf: Path | None, step: int | None, progress: Callable[[int, int], None]) -> Path:
    """Converts a checkpoint, with adapters merged. The whole model is in host memory meanwhile, in float32.

    Args:
        source: a directory of checkpoints, or one of them. step: which; None for the newest.
        target: must not exist; it appears complete or not at all.
        hf: the Hugging Face checkpoint that the run started from, for config and tokenizer.

    Raises:
        CheckpointMissing: there is none. ConfigError: it is a critic's, or of another model than ``hf``; or the target exists.
    """
    path, marker = policy_checkpoint(source, step)
    if hf is None:
        raise ConfigError("--hf", None, f"the Hugging Face checkpoint that {path} was trained from, for config and tokenizer")
    architecture = read_architecture(hf, backend="torch")
    check_architecture(path, marker, architecture)
    if target.exists():
        raise ConfigError("TARGET", str(target), "a path where nothing is yet")
    adapted = marker.get("lora")
    lora = {"lora_rank": adapted["rank"], "lora_alpha": adapted["alpha"], "target_modules": adapted["targets"]} if adapted else {}
    settings = TrainerSettings(TrainerSection(trainer_backend="torch", train_dtype=marker["dtype"], **lora))
    runtime.start(settings.layout, 0, 600.0, all_ranks)
    try:
        model = assemble(settings, hf, architecture)
        with weights_only():
            model.read_state(model.sharded_state(), path, with_random=False, exact=False)
        plan = FsdpGatherPlan(model)
        start_export(plan, hf, target, copied=False).finish()
        nbytes = sum(unit.nbytes(model.dtype) for unit in plan.units)
        progress(nbytes, nbytes)
    finally:
        runtime.stop()
    return target
