"""The tensors of a Hugging Face checkpoint, read one at a time as plain numbers, however they are quantized.

DeepSeek-V3, Kimi-K2 and others are published with 8-bit or 4-bit weights (`shared.model.quantization`). gpt-oss has experts in MXFP4: 32
numbers of four bits share a power of two; engines would take pushed weights for such, so that only the conversion reads those.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.config.engine_limits import needed_model_config
from shared.model.architecture import Architecture
from shared.model.hf_checkpoint import VISION, draft_prefixes, tensor_problems, weight_files
from shared.model.quantization import ENTRY, Quantization, parts_of, quantization_of
from shared.model.tensor_table import hf_tensors
from shared.runtime.errors import ConfigError
from shared.transfer.quantizer import plain


class SafetensorsReader:
    """The tensors of a Hugging Face checkpoint directory, read one at a time.

    Args:
        hf_dir: holds ``*.safetensors``, which stay open while the reader lives.

    Raises:
        ConfigError: there are none, or one cannot be read.
    """

    def __init__(self, hf_dir: Path) -> None:
        self.hf_dir = hf_dir
        self.files: dict[str, safe_open] = {}
        for path in weight_files(hf_dir)[0]:
            try:
                opened = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ConfigError("model.hf_checkpoint", str(path), f"a readable safetensors file ({error})") from error
            self.files.update(dict.fromkeys(opened.keys(), opened))

    def check(self, architecture: Architecture) -> int:
        """Compares names and shapes with the model's; layers of :func:`draft_prefixes` may be there.

        Returns the number of tensors in the latter. Raises the first ConfigError of `shared.model.hf_checkpoint.tensor_problems`.
        """
        unread = draft_prefixes(architecture)
        shapes = {name: self.shape(name) for name in self.names()}
        for problem in tensor_problems(self.hf_dir, shapes, hf_tensors(architecture), unread, "model.hf_checkpoint"):
            raise problem
        return sum(name.startswith(unread) and not name.startswith(VISION) for name in self.names())

    def names(self) -> set[str]:
        """Returns the tensors that are part of a model."""
        return set(self.files)

    def shape(self, name: str) -> Sequence[int]:
        shape: Sequence[int] = self.files[name].get_slice(name).get_shape()
        return shape

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """Returns a tensor, or an expert's part of one of all experts."""
        if expert is None:
            return self.files[name].get_tensor(name)
        part: Tensor = self.files[name].get_slice(name)[expert]
        return part

    def read_range(self, name: str, dimension: int, start: int, stop: int) -> Tensor:
        """Returns the part of a tensor from ``start`` to ``stop`` of a dimension; nothing else of it is read."""
        part: Tensor = self.files[name].get_slice(name)[(slice(None),) * dimension + (slice(start, stop),)]
        return part


def reader_of(hf_dir: Path) -> SafetensorsReader:
    """Returns a reader that makes plain numbers of a checkpoint's.

    Raises:
        ConfigError: it is quantized in another format.
    """
    entry = needed_model_config(hf_dir).get(ENTRY)
    if isinstance(entry, dict) and entry.get("quant_method") == "mxfp4":
        return Mxfp4Reader(hf_dir)
    found = quantization_of(hf_dir)
    return SafetensorsReader(hf_dir) if found is None else QuantizedReader(hf_dir, found)


class QuantizedReader(SafetensorsReader):
    """Makes bfloat16 matrices of quantized ones."""

    def __init__(self, hf_dir: Path, quantization: Quantization) -> None:
        super().__init__(hf_dir)
        self._quantization = quantization
        self._shapes = quantization.shapes({name: super(QuantizedReader, self).shape(name) for name in self.files})

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> Sequence[int]:
        return self._shapes[name]

    def read(self, name: str, expert: int | None = None) -> Tensor:
        if name not in self._quantization.names:
            return super().read(name, expert)
        names = parts_of(name, self._quantization.format)
        parts = [super(QuantizedReader, self).read(part) for part in names]
        if not bool((parts[-1] > 0).all() and parts[-1].isfinite().all()):
            raise ConfigError(f"{self.hf_dir}:{names[-1]}", "a factor that is not positive and finite", "positive factors")
        return plain(parts, self._quantization.format)

    def read_range(self, name: str, dimension: int, start: int, stop: int) -> Tensor:
        if name not in self._quantization.names:
            return super().read_range(name, dimension, start, stop)
        return self.read(name).narrow(dimension, start, stop - start)


FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # the numbers of e2m1, by their bits


class Mxfp4Reader(SafetensorsReader):
    """Makes bfloat16 tensors of all experts, [experts, inputs, outputs], of MXFP4 ones.

    Those are ``_blocks``, uint8 [experts, outputs, inputs / 32, 16], two numbers in a byte, the lower bits first, and ``_scales``, uint8
    [experts, outputs, inputs / 32], exponents of two above -127.
    """

    def names(self) -> set[str]:
        return {name.removesuffix("_blocks") for name in super().names() if not name.endswith("_scales")}

    def shape(self, name: str) -> Sequence[int]:
        if name in self.files:
            return super().shape(name)
        experts, outputs, blocks, nbytes = super().shape(f"{name}_blocks")
        return experts, 2 * blocks * nbytes, outputs

    def read(self, name: str, expert: int | None = None) -> Tensor:
        if name in self.files:
            return super().read(name, expert)
        packed, scales = (super(Mxfp4Reader, self).read(f"{name}_{part}", expert) for part in ("blocks", "scales"))
        numbers = torch.tensor(FOUR_BITS)[torch.stack([packed & 15, packed >> 4], -1).int()].flatten(-2)
        return torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2).transpose(-1, -2).to(torch.bfloat16)

    def read_range(self, name: str, dimension: int, start: int, stop: int) -> Tensor:
        if name in self.files:
            return super().read_range(name, dimension, start, stop)
        return torch.stack([self.read(name, expert) for expert in range(start, stop)])  # of the first dimension, as shards are
