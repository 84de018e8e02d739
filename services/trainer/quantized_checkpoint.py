"""Makes a checkpoint with 8-bit or 4-bit weights of a plain one, file by file: ``myxo convert --to``."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from services.trainer.parallel.export import copy_beside_weights, write_json
from shared.model.hf_checkpoint import INDEX, weight_files
from shared.model.quantization import ENTRY, QuantizedFormat, is_quantized, parts_of
from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import fsync_tree, publish, scratch
from shared.transfer.quantizer import quantized

EXPERTS = re.compile(r"\.experts\.\d+\.")


def quantize(source: Path, target: Path, form: QuantizedFormat, progress: Callable[[int, int], None], experts: bool = False) -> Path:
    """Writes the checkpoint ``source`` with its layers' matrices quantized. Embeddings, the output layer, norms, routers and what sees stay
    as they are.

    Args:
        target: must not exist; it appears complete or not at all. progress: is called with the bytes read and those in all. experts:
            whether experts alone are quantized.

    Raises ConfigError: the source is quantized already, has no layers that can be, a matrix that groups do not divide, or experts in one
        tensor; the target exists.
    """
    config = json.loads((source / "config.json").read_text())
    if config.get(ENTRY) is not None:
        raise ConfigError(f"{source / 'config.json'}:{ENTRY}", config[ENTRY], "no such entry: a checkpoint of plain numbers")
    if target.exists():
        raise ConfigError("TARGET", str(target), "a path where nothing is yet")
    files, _ = weight_files(source)
    total, done, places, kept = sum(path.stat().st_size for path in files), 0, dict[str, str](), set[str]()
    draft, nbytes, chosen = scratch(target), 0, 0
    for path in files:
        made = dict[str, torch.Tensor]()
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                parts = _quantized(source, name, tensor, form) if EXPERTS.search(name) or not experts else {}
                made |= parts or {name: tensor}
                chosen += bool(parts)
                if not parts and tensor.dim() == 2 and name.endswith(".weight"):
                    kept.add(name.removesuffix(".weight"))
        save_file(made, draft / path.name, metadata={"format": "pt"})
        places |= dict.fromkeys(made, path.name)
        nbytes, done = nbytes + sum(tensor.nbytes for tensor in made.values()), done + path.stat().st_size
        progress(done, total)
    if not chosen:
        what = ("layers", "experts")[experts]
        raise ConfigError("SOURCE", str(source), f"a checkpoint with {what}' matrices (…_proj.weight); it has none")
    if len(files) > 1:
        write_json(draft / INDEX, {"metadata": {"total_size": nbytes}, "weight_map": places})
    copy_beside_weights(source, draft)
    write_json(draft / "config.json", config | {ENTRY: form.entry(kept)})
    fsync_tree(draft)
    publish(draft, target)
    return target


def _quantized(source: Path, name: str, tensor: torch.Tensor, form: QuantizedFormat) -> dict[str, torch.Tensor]:
    if not is_quantized(source, name, tensor.shape):
        return {}
    shape = {f"{name}_shape": torch.tensor(tensor.shape)} if form.endings[0] == "weight_packed" else {}
    return dict(zip(parts_of(name, form), quantized(checked(source, name, tensor, form), form), strict=True)) | shape


def checked(source: Path, name: str, tensor: torch.Tensor, form: QuantizedFormat) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.element_size() == 1 or not bool(tensor.isfinite().all()):
        raise ConfigError(f"{source}:{name}", str(tensor.dtype), "finite numbers of 16 or 32 bits")
    if wanted := form.obstacle(tensor.shape):
        raise ConfigError(f"{source}:{name}", list(tensor.shape), wanted)
    return tensor
