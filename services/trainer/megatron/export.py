"""The model in Hugging Face's names: bucket by bucket for a weight push, or as a checkpoint directory.

No rank ever holds more than one bucket besides its own shards: the ranks that share a parameter gather it on the first of
them, which hands it to global rank 0.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from services.trainer.megatron.architecture import Architecture
from services.trainer.megatron.directory import fsync_tree, publish, scratch
from services.trainer.megatron.model import Model
from services.trainer.megatron.names import hf_tensors
from services.trainer.megatron.runtime import deadline, device, gather_json, together
from services.trainer.megatron.weights import LocalParameter, Recipe, parameters, recipe

Bucket = list[tuple[str, Tensor | None]]

_SHARD_BYTES = 4 * 1024**3
_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf"}


@dataclass(frozen=True)
class Shipment:
    """One Megatron parameter on its way out.

    Args:
        name: the parameter's global name. owner: global rank that gathers it: the lowest that holds a part.
        tensors: Hugging Face names and shapes that it becomes. float32: kept so whatever the model's dtype.
    """

    name: str
    owner: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    float32: bool = False

    def dtype(self, model: torch.dtype) -> torch.dtype:
        return torch.float32 if self.float32 else model


class Exporter:
    """Exports one model, any number of times. All ranks construct it together.

    Args:
        model: its parameters are read when an export runs.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._local = {p.name: p for p in parameters(model.modules, model.config, model.architecture)}
        with deadline("the exchange of parameter names"):
            held = gather_json(list(self._local))
        self._shipments = plan(model.architecture, held)

    def buckets(self, bucket_bytes: int) -> Iterator[Bucket]:
        """The whole model in the model's dtype (routers' biases in float32), in the order of its layers; tied embeddings come once.

        A collective: every rank iterates to the end. All get the same names; rank 0 gets full tensors on its device, the
        others None. A tensor may be a view of the live parameter: read it before the next optimizer step.

        Args:
            bucket_bytes: a bucket holds at most this much, unless a single parameter is larger.
        """
        bucket: Bucket = []
        size = 0
        for shipment in self._shipments:
            item = shipment.dtype(self.model.config.params_dtype).itemsize
            shipped = sum(prod(shape) for _, shape in shipment.tensors) * item
            if bucket and size + shipped > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            with deadline(f"the export of {shipment.name}"):
                tensors = self._ship(shipment)
            bucket += [(name, tensor) for (name, _), tensor in zip(shipment.tensors, tensors, strict=True)]
            size += shipped
        if bucket:
            yield bucket

    @torch.no_grad()
    def _ship(self, shipment: Shipment) -> list[Tensor] | list[None]:
        rank = dist.get_rank()
        local = self._local.get(shipment.name)
        full: list[Tensor] = []
        if local is not None and dist.get_global_rank(local.group, 0) == shipment.owner:
            whole = _gather(local)
            if whole is not None:
                full = local.recipe.unfuse(whole, self.model.architecture)
        if shipment.owner != 0 and rank == shipment.owner:
            for tensor in full:
                dist.send(tensor.contiguous(), dst=0)
        if shipment.owner != 0 and rank == 0:
            for _, shape in shipment.tensors:
                full.append(torch.empty(shape, dtype=shipment.dtype(self.model.config.params_dtype), device=device()))
                dist.recv(full[-1], src=shipment.owner)
        return full if rank == 0 else [None] * len(shipment.tensors)


def plan(architecture: Architecture, held: list[list[str]]) -> list[Shipment]:
    """What is shipped, in the model's order, and by whom.

    Args:
        held: by rank, the global names of the parameters that it holds.
    """
    shapes = hf_tensors(architecture)
    position = {name: index for index, name in enumerate(shapes)}
    owners: dict[str, int] = {}
    shipped: dict[Recipe, str] = {}
    for rank, names in enumerate(held):
        for name in names:
            if name not in owners:
                # the last pipeline stage's copy of a tied embedding becomes the same tensors as the first stage's
                shipped.setdefault(recipe(name, architecture), name)
                owners[name] = rank
    return [
        Shipment(name, owners[name], tuple((hf_name, shapes[hf_name]) for hf_name in made.hf_names), made.float32)
        for made, name in sorted(shipped.items(), key=lambda item: position[item[0].hf_names[0]])
    ]


def _gather(local: LocalParameter) -> Tensor | None:
    """The unsplit parameter on the first rank of its group, None on the others."""
    shard, dimension = local.parameter.detach(), local.split_dimension
    first = local.group.rank() == 0
    if dimension is None:
        return shard if first else None
    shards = [torch.empty_like(shard) for _ in range(local.group.size())] if first else None
    dist.gather(shard.contiguous(), shards, group=local.group, group_dst=0)
    return local.recipe.unshard(shards, dimension) if shards is not None else None


def save_hf(exporter: Exporter, source: Path, target: Path) -> None:
    """Write a Hugging Face checkpoint directory. A collective; rank 0 writes.

    ``target`` appears complete or not at all, and replaces an older one.

    Args:
        source: the checkpoint the model was loaded from; its config, tokenizer and whatever else is not weights are copied.
    """
    writer = HfWriter(source, target) if dist.get_rank() == 0 else None
    with together(f"the preparation of {target}"):
        if writer is not None:
            writer.begin()
    for bucket in exporter.buckets(_SHARD_BYTES):
        with together(f"writing to {target}"):
            if writer is not None:
                writer.add({name: tensor for name, tensor in bucket if tensor is not None})
    with together(f"publishing {target}"):
        if writer is not None:
            writer.finish(exporter.model.config.params_dtype)


def copy_beside_weights(source: Path, target: Path) -> None:
    """Copy what a Hugging Face checkpoint holds beside its weights: config, tokenizer, license."""
    for path in source.iterdir():
        copied = path.suffix not in _NOT_COPIED and not path.name.endswith(".index.json")
        if path.is_file() and copied and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)


class HfWriter:
    """Rank 0's side of :func:`save_hf`."""

    def __init__(self, source: Path, target: Path) -> None:
        self.source, self.target = source, target
        self.files: list[list[str]] = []
        self.bytes = 0

    def begin(self) -> None:
        self.scratch = scratch(self.target)

    def add(self, tensors: dict[str, Tensor]) -> None:
        held = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(held, self._numbered(len(self.files)), metadata={"format": "pt"})
        self.files.append(list(held))
        self.bytes += sum(tensor.nbytes for tensor in held.values())

    def finish(self, dtype: torch.dtype) -> None:
        total = len(self.files)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self.files):
            file = "model.safetensors" if total == 1 else f"model-{number + 1:05d}-of-{total:05d}.safetensors"
            self._numbered(number).rename(self.scratch / file)
            weight_map.update(dict.fromkeys(names, file))
        if total > 1:
            index = {"metadata": {"total_size": self.bytes}, "weight_map": weight_map}
            (self.scratch / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        copy_beside_weights(self.source, self.scratch)
        self._write_config(str(dtype).removeprefix("torch."))
        fsync_tree(self.scratch)
        publish(self.scratch, self.target)

    def _numbered(self, number: int) -> Path:
        return self.scratch / f"shard-{number}.safetensors"

    def _write_config(self, dtype: str) -> None:
        """The weights may have another dtype than the ones that the config came with, and draft layers are not exported."""
        path = self.scratch / "config.json"
        config = json.loads(path.read_text())
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
        if config.get("num_nextn_predict_layers"):
            config["num_nextn_predict_layers"] = 0
        path.write_text(json.dumps(config, indent=2) + "\n")
