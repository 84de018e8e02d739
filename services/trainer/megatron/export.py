"""Export of the model under Hugging Face's names: bucket by bucket for a weight push, or as a checkpoint directory.

No rank ever holds more than one bucket besides its own shards: the ranks that share a parameter gather it on the first of
them, which hands it to global rank 0.
"""

import json
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from services.trainer.megatron import adapters
from services.trainer.megatron.gather_plan import GatherGroups, GatherPlan
from services.trainer.megatron.gpt_model import MegatronModel
from services.trainer.megatron.runtime import deadline, together
from shared.runtime.atomic_files import fsync_tree, publish, scratch
from shared.transfer.tensor_file import draft_shard, name_shards

Bucket = list[tuple[str, Tensor | None]]

_SHARD_BYTES = 4 * 1024**3
_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf"}


class Exporter:
    """Exports one model, any number of times. All ranks construct it together.

    Args:
        model: its parameters are read when an export runs. groups: those to gather over; the training's own if None.
    """

    def __init__(self, model: MegatronModel, groups: GatherGroups | None = None) -> None:
        self.model = model
        self.plan = GatherPlan(model, groups or GatherGroups.of_training())

    def buckets(self, bucket_bytes: int, dtype: torch.dtype | None = None) -> Iterator[Bucket]:
        """Yields the whole model in its dtype (routers' biases in float32), in the order of its layers; tied embeddings come once.

        A collective: every rank iterates to the end. All get the same names; rank 0 gets full tensors on its device, the
        others None. A tensor may be a view of the live parameter: read it before the next optimizer step.

        Args:
            bucket_bytes: a bucket holds at most this much, unless a single parameter is larger. dtype: instead of the model's.
        """
        bucket: Bucket = []
        size = 0
        for unit in self.plan.units:
            trained = unit.dtype(self.model.config.params_dtype)
            sent = trained if dtype is None or unit.float32 else dtype
            nbytes = sum(prod(shape) for _, shape in unit.tensors) * trained.itemsize
            if bucket and size + nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            with deadline(f"the export of {unit.name}"), torch.no_grad():
                tensors = self.plan.deliver(unit, 0, [sent] * len(unit.tensors))
            bucket += [(name, tensors[index] if tensors else None) for index, (name, _) in enumerate(unit.tensors)]
            size += nbytes
        if bucket:
            yield bucket


def save_hf(exporter: Exporter, source: Path, target: Path) -> None:
    """Writes a Hugging Face checkpoint directory. A collective; rank 0 writes.

    ``target`` appears complete or not at all, and replaces an older one. For a model with adapters it holds the merged weights and, in
    a directory ``adapter``, the adapters alone.

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
    lora, plan = exporter.model.lora, exporter.plan
    if lora is not None:
        tensors = plan.adapters.collect(plan.groups.tensor, plan.groups.world)
        with together(f"writing the adapters of {target}"):
            if writer is not None and tensors is not None:
                adapters.write(writer.scratch / adapters.DIRECTORY, tensors, lora, source)
    with together(f"publishing {target}"):
        if writer is not None:
            writer.finish(exporter.model.config.params_dtype)


def copy_beside_weights(source: Path, target: Path) -> None:
    """Copies the files of a Hugging Face checkpoint beside its weights: config, tokenizer, license."""
    for path in source.iterdir():
        copied = path.suffix not in _NOT_COPIED and not path.name.endswith(".index.json")
        if path.is_file() and copied and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)


def write_config(directory: Path, dtype: str) -> None:
    """Makes a copied ``config.json`` fit the weights: their dtype may have changed, and there are no draft layers."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    if config.get("num_nextn_predict_layers"):
        config["num_nextn_predict_layers"] = 0
    path.write_text(json.dumps(config, indent=2) + "\n")


class HfWriter:
    """The writer of rank 0 for :func:`save_hf`."""

    def __init__(self, source: Path, target: Path) -> None:
        self.source, self.target = source, target
        self.files: list[list[str]] = []
        self.bytes = 0

    def begin(self) -> None:
        self.scratch = scratch(self.target)

    def add(self, tensors: dict[str, Tensor]) -> None:
        held = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(held, draft_shard(self.scratch, len(self.files)), metadata={"format": "pt"})
        self.files.append(list(held))
        self.bytes += sum(tensor.nbytes for tensor in held.values())

    def finish(self, dtype: torch.dtype) -> None:
        name_shards(self.scratch, self.files, "model", self.bytes)
        copy_beside_weights(self.source, self.scratch)
        write_config(self.scratch, str(dtype).removeprefix("torch."))
        fsync_tree(self.scratch)
        publish(self.scratch, self.target)
