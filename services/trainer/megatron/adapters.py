"""Export and loading of LoRA's adapters: under PEFT's names, or merged into the matrices that they belong to.

For a push of adapters alone: `Adapters.tensors` lists what this pipeline stage has to send, the same on all of its ranks, and
`Adapters.gather`, called with each name by all ranks of the tensor-parallel group, gives the whole tensor on the first of them. The
manifest is of kind ``adapter`` with `Adapters.scale`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.trainer.megatron.gpt_model import MegatronModel
from services.trainer.megatron.hf_weights import recipe
from services.trainer.megatron.lora import Adapter, Part, layers
from services.trainer.megatron.runtime import deadline, device, gather_json
from shared.model.lora_targets import Lora
from shared.runtime.errors import ConfigError

DIRECTORY = "adapter"
"""The directory beside a merged model that holds its adapters in PEFT's format."""

_FILE, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class _Part:
    """``a`` or ``b`` of one matrix. ``matrix``: its Hugging Face name; ``layer``: that of Megatron's layer, global."""

    layer: str
    matrix: str
    part: Part
    adapter: Adapter

    @property
    def name(self) -> str:
        return f"base_model.model.{self.matrix.removesuffix('.weight')}.lora_{self.part.upper()}.weight"

    @property
    def projection(self) -> str:
        """Returns PEFT's name of the matrix."""
        return self.matrix.split(".")[-2]

    @property
    def local(self) -> Tensor:
        """Returns what this rank holds of it."""
        held: Tensor = getattr(self.adapter.pairs[self.projection], self.part)
        return held

    @property
    def shape(self) -> tuple[int, ...]:
        shape, axis = list(self.local.shape), self.adapter.split_axis(self.part)
        if axis is not None and self.adapter.group is not None:
            shape[axis] *= self.adapter.group.size()
        return tuple(shape)

    def whole(self, group: dist.ProcessGroup) -> Tensor | None:
        """Returns it on the group's first rank, None on the others."""
        axis, held, first = self.adapter.split_axis(self.part), self.local.detach(), group.rank() == 0
        if axis is None or group.size() == 1:
            return held if first else None
        shards = [torch.empty_like(held) for _ in range(group.size())] if first else None
        dist.gather(held.contiguous(), shards, group=group, group_dst=0)
        return None if shards is None else torch.cat(shards, axis)


class Adapters:
    """The adapters of this rank's pipeline stage. Making it needs no communication with the other ranks.

    Args:
        model: its adapters are read at each call. Without LoRA there are none.
    """

    def __init__(self, model: MegatronModel) -> None:
        self.lora: Lora | None = model.lora
        self._parts: dict[str, _Part] = {}
        self._of: dict[str, tuple[_Part, _Part]] = {}
        for layer, linear in layers(model.modules, model.config) if model.lora is not None else ():
            adapter: Adapter | None = getattr(linear, "adapter", None)
            for matrix in recipe(f"{layer}.weight", model.architecture).hf_names:
                if adapter is not None and matrix.split(".")[-2] in adapter.pairs:
                    pair = _Part(layer, matrix, "a", adapter), _Part(layer, matrix, "b", adapter)
                    self._of[matrix] = pair
                    self._parts.update({part.name: part for part in pair})

    @property
    def scale(self) -> float:
        """Returns the factor of the product of a matrix's ``b`` and ``a``."""
        return self.lora.scale if self.lora is not None else 0.0

    def parameters(self) -> dict[str, Tensor]:
        """Returns what this rank holds, by Megatron's global names."""
        return {f"{part.layer}.adapter.{part.projection}.{part.part}": part.local for part in self._parts.values()}

    def tensors(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Returns the name, dtype and whole shape of each, in the order of the layers."""
        return [(part.name, str(part.local.dtype).removeprefix("torch."), part.shape) for part in self._parts.values()]

    def gather(self, name: str, group: dist.ProcessGroup) -> Tensor | None:
        """Returns a whole tensor on the first rank of the tensor-parallel ``group``, None on the others. A collective of them.

        It may be the live parameter: read it before the next optimizer step.
        """
        return self._parts[name].whole(group)

    def adapt(self, names: Sequence[str]) -> bool:
        """Returns whether any of these matrices has an adapter."""
        return any(name in self._of for name in names)

    @torch.no_grad()
    def merged(
        self, matrices: Sequence[tuple[str, tuple[int, ...]]], base: list[Tensor] | None, group: dist.ProcessGroup
    ) -> list[Tensor] | None:
        """Returns matrices with their adapters laid over them: computed in float32, rounded once. A collective of the tensor-parallel
        ``group``.

        Args:
            matrices: Hugging Face names and shapes. base: their tensors on the group's first rank, None on the others.

        Returns:
            On the first rank tensors in the dtypes of ``base``, those of matrices without adapters untouched.
        """
        found = list(base) if base is not None else None
        for index, (name, shape) in enumerate(matrices):
            if name not in self._of:
                continue
            a, b = (part.whole(group) for part in self._of[name])
            if found is not None:
                assert a is not None and b is not None  # of the same rank
                weight = found[index].reshape(shape)
                found[index] = torch.addmm(weight.float(), b.float(), a.float(), alpha=self.scale).to(weight.dtype)
        return found

    def collect(self, tensor_group: dist.ProcessGroup, world: dist.ProcessGroup | None = None) -> dict[str, Tensor] | None:
        """Returns all adapters of the model on global rank 0, None on the others. This is a collective of all ranks."""
        with deadline("the export of the adapters"):
            reported = gather_json(self.tensors())
            owners: dict[str, int] = {}
            for rank, tensors in enumerate(reported):
                for name, _, _ in tensors:
                    owners.setdefault(name, rank)
            known = {name: (dtype, shape) for tensors in reported for name, dtype, shape in tensors}
            rank, found = dist.get_rank(), {}
            for name, owner in owners.items():
                mine = name in self._parts and dist.get_global_rank(tensor_group, 0) == owner
                tensor = self.gather(name, tensor_group) if mine else None
                if owner != 0 and rank == owner:
                    assert tensor is not None
                    dist.send(tensor.contiguous(), dst=0, group=world)
                if rank == 0:
                    if owner != 0:
                        dtype, shape = known[name]
                        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device())
                        dist.recv(tensor, src=owner, group=world)
                    assert tensor is not None
                    found[name] = tensor
        return found if rank == 0 else None

    @torch.no_grad()
    def silence(self) -> None:
        """Zeroes every adapter's ``b``, so that the model computes what its base would."""
        for _, b in self._of.values():
            b.local.zero_()

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Takes the adapters from a directory in PEFT's format, whatever layout wrote it.

        Raises:
            ConfigError: they cannot be read, or are not those of this model.
        """
        path = directory / _FILE
        try:
            with safe_open(path, framework="pt") as held:
                for name, part in self._parts.items():
                    whole = held.get_tensor(name)
                    if tuple(whole.shape) != part.shape:
                        raise ConfigError(f"{path}:{name}", tuple(whole.shape), f"shape {part.shape}")
                    part.local.copy_(part.adapter.shard(whole, part.part))
        except (OSError, SafetensorError) as error:
            raise ConfigError("trainer.lora_rank", str(path), f"a readable file with the adapters of this model ({error})") from error


def write(directory: Path, tensors: dict[str, Tensor], lora: Lora, base: Path) -> None:
    """Writes adapters as PEFT reads them.

    Args:
        directory: made here. tensors: by PEFT's names. base: the Hugging Face checkpoint that they belong to.
    """
    directory.mkdir()
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, directory / _FILE, metadata={"format": "pt"})
    (directory / _CONFIG).write_text(json.dumps(_config(tensors, lora, base), indent=2) + "\n")


def _config(tensors: dict[str, Tensor], lora: Lora, base: Path) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }
