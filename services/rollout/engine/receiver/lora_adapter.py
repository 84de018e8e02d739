"""Merges an adapter into an engine's weights: adds its low-rank products to the matrices of the engine's own checkpoint.

The base is read from disk at every push, mapped and not copied, so that the engine holds no second copy and rounding errors do not
accumulate over pushes. Matrices without an adapter are not yielded, since training does not change them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from shared.model.hf_checkpoint import weight_files
from shared.runtime.errors import BadMessage, ConfigError
from shared.transfer.bucket_ring import torch_dtype
from shared.transfer.manifest import Manifest
from shared.transfer.tensor_file import TensorFileBroken, TensorFiles

FIELD = "model.hf_checkpoint"

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def merged(manifest: Manifest, tensors: Mapping[str, Tensor], model_path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the adapted matrices under their Hugging Face names, one at a time, for ``model.load_weights``: W + scale * B A, float32.

    Args:
        manifest: of kind ``adapter``, with the scale. tensors: by PEFT's names, on the device where the products are to be computed.
        model_path: the engine's checkpoint.

    Raises:
        BadMessage: an adapter is incomplete or does not fit its matrix. ConfigError: the checkpoint lacks that matrix, or cannot be read.
            Both are raised before the first matrix is yielded.
    """
    matrices = _matrices(manifest)
    try:
        base = TensorFiles(weight_files(model_path)[0], links=True)
    except TensorFileBroken as error:
        raise ConfigError(FIELD, str(model_path), f"readable safetensors: {error}") from error
    for name, (a, b) in matrices.items():
        if name not in base.tensors:
            raise ConfigError(FIELD, str(model_path), f"a checkpoint with {name}, for which there is an adapter")
        shape, wanted = base.tensors[name][1], (tensors[b].size(0), tensors[a].size(1))
        if shape != wanted or tensors[a].size(0) != tensors[b].size(1):
            raise BadMessage(f"adapter {a} {tuple(tensors[a].shape)} and {b} {tuple(tensors[b].shape)} for {name} of shape {shape}")
    for name, (a, b) in matrices.items():
        dtype, shape = base.tensors[name]
        weight = torch.from_numpy(base[name]).view(torch_dtype(dtype)).view(shape)
        weight = weight.to(tensors[a].device).float()  # in this order, half as many bytes are copied to a GPU
        yield name, torch.addmm(weight, tensors[b].float(), tensors[a].float(), alpha=manifest.scale)


def _matrices(manifest: Manifest) -> dict[str, tuple[str, str]]:
    """Returns the Hugging Face name of each adapted matrix → PEFT's names of its A and B."""
    held = [slot.name for slot in manifest.slots()]
    names: dict[str, tuple[str, str]] = {}
    for name in held:
        stem = name.removesuffix(_A).removesuffix(_B)
        if not name.startswith(_PREFIX) or stem == name:
            raise BadMessage(f"{name!r} in the manifest of an adapter: no name of PEFT's")
        names[f"{stem.removeprefix(_PREFIX)}.weight"] = stem + _A, stem + _B
    missing = sorted({part for pair in names.values() for part in pair} - set(held))
    if missing:
        raise BadMessage(f"the manifest of an adapter lacks {missing[0]}")
    return names
