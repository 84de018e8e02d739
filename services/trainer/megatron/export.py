"""A checkpoint directory of the model in Hugging Face's format, gathered and written file by file."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from services.trainer.megatron import DEVICE_TYPE
from services.trainer.megatron.gather_plan import Bucket, GatherPlan, GatherUnit
from services.trainer.megatron.lora import ADAPTER_CONFIG, ADAPTER_DIRECTORY, ADAPTER_WEIGHTS, peft_config
from services.trainer.megatron.runtime import host_copy, together
from shared.model.hf_checkpoint import INDEX
from shared.runtime.atomic_files import fsync_tree, publish, scratch

_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf"}

FILE_BYTES = 4 * 1024**3


def save_hf(plan: GatherPlan, source: Path, target: Path, file_bytes: int = FILE_BYTES) -> None:
    """Writes a Hugging Face checkpoint directory, file by file. A collective; rank 0 writes.

    ``target`` appears complete or not at all, and replaces an older one. For a model with adapters it holds the merged weights and, in
    a directory ``adapter``, the adapters alone.

    Args:
        source: the checkpoint the model was loaded from; its config, tokenizer and whatever else is not weights are copied.
        file_bytes: the most bytes of a file, unless a single parameter is larger.
    """
    first, draft = dist.get_rank() == 0, HfDraft(plan, source, target)
    with together(f"the preparation of {target}"):
        if first:
            draft.begin()
    for name, units in _files(plan, file_bytes):
        bucket = plan.bucket(units)
        with together(f"writing to {target}"):
            if first:
                draft.write(name, bucket)
    if plan.model.lora is not None:
        bucket = plan.bucket(plan.adapter_units)
        with together(f"writing the adapters of {target}"):
            if first:
                draft.write_adapters(bucket)
    with together(f"publishing {target}"):
        if first:
            draft.publish()


def copy_hf(plan: GatherPlan, source: Path, target: Path, file_bytes: int = FILE_BYTES) -> Callable[[], None] | None:
    """Copies the present weights to rank 0's host memory. A collective.

    Returns there what `save_hf` does with them, to be called from any thread while training goes on; it raises OSError. None elsewhere.
    """
    first = dist.get_rank() == 0

    def copied(units: Sequence[GatherUnit]) -> Bucket:
        return [(name, host_copy(tensor) if tensor is not None and first else None) for name, tensor in plan.bucket(units)]

    buckets = [(name, copied(units)) for name, units in _files(plan, file_bytes)]
    adapters = None if plan.model.lora is None else copied(plan.adapter_units)
    if DEVICE_TYPE != "cpu":
        torch.cuda.current_stream().synchronize()  # the copies are asynchronous

    def write() -> None:
        draft = HfDraft(plan, source, target)
        draft.begin()
        for name, bucket in buckets:
            draft.write(name, bucket)
        if adapters is not None:
            draft.write_adapters(adapters)
        draft.publish()

    return write if first else None


def _files(plan: GatherPlan, file_bytes: int) -> list[tuple[str, Sequence[GatherUnit]]]:
    """Returns the names of a checkpoint's files, each with the parameters that it holds."""
    files = plan.divided(file_bytes)
    if len(files) == 1:
        return [("model.safetensors", files[0])]
    return [(f"model-{number:05d}-of-{len(files):05d}.safetensors", units) for number, units in enumerate(files, start=1)]


class HfDraft:
    """A checkpoint directory that is being written beside its ``target``, and appears there when it is complete."""

    def __init__(self, plan: GatherPlan, source: Path, target: Path) -> None:
        self._plan, self._source, self._target = plan, source, target
        self._directory, self._weight_map = target, dict[str, str]()

    def begin(self) -> None:
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._directory = scratch(self._target)

    def write(self, name: str, bucket: Bucket) -> None:
        self._weight_map.update((tensor, name) for tensor, _ in bucket)
        _write(self._directory / name, bucket)

    def write_adapters(self, bucket: Bucket) -> None:
        assert self._plan.model.lora is not None  # or there were no adapters
        config = peft_config([name for name, _ in bucket], self._plan.model.lora, self._source)
        _write_adapters(self._directory / ADAPTER_DIRECTORY, bucket, config)

    def publish(self) -> None:
        """Writes what stands beside the weights, and puts the directory into its place."""
        draft, dtype = self._directory, self._plan.model.config.params_dtype
        if len(set(self._weight_map.values())) > 1:
            size = sum(unit.nbytes(dtype) for unit in self._plan.units)
            write_json(draft / INDEX, {"metadata": {"total_size": size}, "weight_map": self._weight_map})
        copy_beside_weights(self._source, draft)
        write_config(draft, str(dtype).removeprefix("torch."))
        fsync_tree(draft)
        publish(draft, self._target)


def _write(path: Path, bucket: Bucket) -> None:
    save_file({name: tensor.cpu().contiguous() for name, tensor in bucket if tensor is not None}, path, metadata={"format": "pt"})


def _write_adapters(directory: Path, bucket: Bucket, config: dict[str, Any]) -> None:
    directory.mkdir()
    _write(directory / ADAPTER_WEIGHTS, bucket)
    write_json(directory / ADAPTER_CONFIG, config)


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
