"""Merges an adapter into an engine's weights: adds its low-rank products to the matrices of the engine's own checkpoint.

The base is read from disk at every push, mapped and not copied, so that the engine holds no second copy and rounding errors do not
accumulate over pushes. Matrices without an adapter are not yielded, since training does not change them.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.runtime.errors import BadMessage, ConfigError
from shared.transfer.manifest import Manifest

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def merged(
    manifest: Manifest, tensors: Mapping[str, Tensor], model_path: Path, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, Tensor]]:
    """Yields the adapted matrices under their Hugging Face names, one at a time, for ``model.load_weights``: W + scale * B A.

    Args:
        manifest: of kind ``adapter``, with the scale. tensors: by PEFT's names, on the device where the products are to be computed.
        model_path: the engine's checkpoint. dtype: of the result, which is computed in float32 and rounded once, here or by the loading.

    Raises:
        BadMessage: an adapter is incomplete or does not fit its matrix. ConfigError: the checkpoint lacks that matrix, or cannot be read.
            Both are raised before the first matrix is yielded.
    """
    matrices = _matrices(manifest)
    with ExitStack() as files:
        base = _Base(model_path, files)
        for name, (a, b) in matrices.items():
            shape, wanted = base.shape(name), (tensors[b].size(0), tensors[a].size(1))
            if shape != wanted or tensors[a].size(0) != tensors[b].size(1):
                raise BadMessage(f"adapter {a} {tuple(tensors[a].shape)} and {b} {tuple(tensors[b].shape)} for {name} of shape {shape}")
        for name, (a, b) in matrices.items():
            weight = base.read(name).to(tensors[a].device).float()  # in this order, half as many bytes are copied to a GPU
            yield name, torch.addmm(weight, tensors[b].float(), tensors[a].float(), alpha=manifest.scale).to(dtype)


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


class _Base:
    """The tensors of the engine's checkpoint directory.

    Args:
        files: closes the checkpoint's files.
    """

    def __init__(self, model_path: Path, files: ExitStack) -> None:
        self._path = model_path
        self._files: dict[str, safe_open] = {}
        index = model_path / "model.safetensors.index.json"
        try:
            held = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
            for path in [model_path / name for name in sorted(held)] or sorted(model_path.glob("*.safetensors")):
                opened = files.enter_context(safe_open(path, framework="pt"))
                self._files.update(dict.fromkeys(opened.keys(), opened))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ConfigError("model.hf_checkpoint", str(model_path), f"readable safetensors: {type(error).__name__}: {error}") from error

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._files:
            raise ConfigError("model.hf_checkpoint", str(self._path), f"a checkpoint with {name}, for which there is an adapter")
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)
