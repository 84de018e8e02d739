"""A checkpoint directory of the model in Hugging Face's format, gathered and written file by file."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file

from services.trainer.megatron.gather_plan import Bucket, GatherPlan
from services.trainer.megatron.lora import ADAPTER_CONFIG, ADAPTER_DIRECTORY, ADAPTER_WEIGHTS, peft_config
from services.trainer.megatron.runtime import together
from shared.model.hf_checkpoint import INDEX
from shared.runtime.atomic_files import fsync_tree, publish, scratch

_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf"}

FILE_BYTES = 4 * 1024**3


def save_hf(plan: GatherPlan, source: Path, target: Path, file_bytes: int = FILE_BYTES) -> None:
    """Writes a Hugging Face checkpoint directory. A collective; rank 0 writes.

    ``target`` appears complete or not at all, and replaces an older one. For a model with adapters it holds the merged weights and, in
    a directory ``adapter``, the adapters alone.

    Args:
        source: the checkpoint the model was loaded from; its config, tokenizer and whatever else is not weights are copied.
        file_bytes: the most bytes of a file, unless a single parameter is larger.
    """
    dtype, lora = plan.model.config.params_dtype, plan.model.lora
    files = plan.divided(file_bytes)
    names = ["model.safetensors"] if len(files) == 1 else [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    first, draft, weight_map = dist.get_rank() == 0, target, dict[str, str]()
    with together(f"the preparation of {target}"):
        if first:
            draft = scratch(target)
    for name, units in zip(names, files, strict=True):
        bucket = plan.bucket(units)
        weight_map.update((tensor, name) for tensor, _ in bucket)
        with together(f"writing to {target}"):
            if first:
                _write(draft / name, bucket)
    if lora is not None:
        bucket = plan.bucket(plan.adapter_units)
        with together(f"writing the adapters of {target}"):
            if first:
                _write_adapters(draft / ADAPTER_DIRECTORY, bucket, peft_config([name for name, _ in bucket], lora, source))
    with together(f"publishing {target}"):
        if first:
            if len(files) > 1:
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
