"""Export of the model under Hugging Face's names: bucket by bucket for a weight push, or as a checkpoint directory.

No rank ever holds more than one bucket besides its own shards: the ranks that share a parameter gather it on the first of
them, which hands it to global rank 0.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from services.trainer.megatron import adapters
from services.trainer.megatron.gather_plan import GatherGroups, GatherPlan, GatherUnit
from services.trainer.megatron.gpt_model import MegatronModel
from services.trainer.megatron.runtime import deadline, together
from shared.model.hf_checkpoint import INDEX
from shared.runtime.atomic_files import fsync_tree, publish, scratch

Bucket = list[tuple[str, Tensor | None]]

_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf"}


class Exporter:
    """Exports one model, any number of times. All ranks construct it together.

    Args:
        model: its parameters are read when an export runs. groups: those to gather over; the training's own if None.
    """

    file_bytes = 4 * 1024**3
    """The most bytes of a file that `save_hf` writes."""

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
        for units in self.divided(bucket_bytes):
            yield self.bucket(units, dtype)

    def divided(self, bucket_bytes: int) -> list[list[GatherUnit]]:
        """Returns the units of each bucket."""
        buckets: list[list[GatherUnit]] = []
        size = 0
        for unit in self.plan.units:
            nbytes = unit.nbytes(self.model.config.params_dtype)
            if not buckets or size + nbytes > bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(unit)
            size += nbytes
        return buckets

    def bucket(self, units: Sequence[GatherUnit], dtype: torch.dtype | None = None) -> Bucket:
        """Returns one bucket as `buckets` does. A collective."""
        bucket: Bucket = []
        for unit in units:
            sent = unit.dtype(dtype or self.model.config.params_dtype)
            with deadline(f"the export of {unit.name}"), torch.no_grad():
                tensors = self.plan.deliver(unit, 0, [sent] * len(unit.tensors))
            bucket += [(name, tensors[index] if tensors else None) for index, (name, _) in enumerate(unit.tensors)]
        return bucket


def save_hf(exporter: Exporter, source: Path, target: Path) -> None:
    """Writes a Hugging Face checkpoint directory. A collective; rank 0 writes.

    ``target`` appears complete or not at all, and replaces an older one. For a model with adapters it holds the merged weights and, in
    a directory ``adapter``, the adapters alone.

    Args:
        source: the checkpoint the model was loaded from; its config, tokenizer and whatever else is not weights are copied.
    """
    plan, dtype, lora = exporter.plan, exporter.model.config.params_dtype, exporter.model.lora
    files = exporter.divided(exporter.file_bytes)
    names = ["model.safetensors"] if len(files) == 1 else [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    first, draft = dist.get_rank() == 0, target
    with together(f"the preparation of {target}"):
        if first:
            draft = scratch(target)
    for name, units in zip(names, files, strict=True):
        bucket = exporter.bucket(units)
        with together(f"writing to {target}"):
            if first:
                _write(draft / name, bucket)
    if lora is not None:
        bucket = exporter.bucket(plan.adapter_units)
        with together(f"writing the adapters of {target}"):
            if first:
                _write_adapters(draft / adapters.DIRECTORY, bucket, adapters.peft_config([name for name, _ in bucket], lora, source))
    with together(f"publishing {target}"):
        if first:
            if len(files) > 1:
                weight_map = {
                    tensor: name for name, units in zip(names, files, strict=True) for unit in units for tensor, _ in unit.tensors
                }
                index = {"metadata": {"total_size": sum(unit.nbytes(dtype) for unit in plan.units)}, "weight_map": weight_map}
                write_json(draft / INDEX, index)
            copy_beside_weights(source, draft)
            write_config(draft, str(dtype).removeprefix("torch."))
            fsync_tree(draft)
            publish(draft, target)


def _write(path: Path, bucket: Bucket) -> None:
    save_file({name: tensor.cpu().contiguous() for name, tensor in bucket if tensor is not None}, path, metadata={"format": "pt"})


def _write_adapters(directory: Path, bucket: Bucket, config: dict[str, Any]) -> None:
    directory.mkdir()
    _write(directory / adapters.WEIGHTS, bucket)
    write_json(directory / adapters.CONFIG, config)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


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
    write_json(path, config)
