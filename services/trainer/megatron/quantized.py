"""Reading of Hugging Face checkpoints with 8-bit weights, dequantized.

DeepSeek-V3 and Kimi-K2 are published so: a matrix is float8 (e4m3), with a float32 factor for each of its blocks.
Only the conversion reads them. A run needs a copy in bfloat16, since its engines would take the pushed weights for 8-bit ones.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.trainer.megatron.hf_weights import SafetensorsReader
from shared.runtime.errors import ConfigError

_FACTORS = "_scale_inv"
"""The suffix of the factors' name, after the name of the matrix."""


def block_size(hf_dir: Path) -> tuple[int, int] | None:
    """Returns the rows and columns of a block; None for a checkpoint that is not quantized.

    Raises:
        ConfigError: it is quantized in another format.
    """
    path = hf_dir / "config.json"
    found: Any = json.loads(path.read_text()).get("quantization_config")
    if found is None:
        return None
    size = found.get("weight_block_size")
    if found.get("quant_method") != "fp8" or found.get("fmt", "e4m3") != "e4m3" or not isinstance(size, list) or len(size) != 2:
        raise ConfigError(f"{path}:quantization_config", found, "8-bit floats (e4m3) in blocks, or no such entry")
    return int(size[0]), int(size[1])


class BlockwiseReader(SafetensorsReader):
    """Multiplies each block with its factor.

    Args:
        block: rows and columns of a block; the last ones of a matrix may be smaller.
    """

    def __init__(self, hf_dir: Path, block: tuple[int, int]) -> None:
        super().__init__(hf_dir)
        self._block = block

    def names(self) -> set[str]:
        return {name for name in super().names() if not name.endswith(_FACTORS)}

    def read(self, name: str) -> Tensor:
        tensor = super().read(name)
        if name + _FACTORS not in self.files:
            return tensor
        factors = super().read(name + _FACTORS).float()
        rows, columns = self._block
        wanted = (-(-tensor.size(0) // rows), -(-tensor.size(1) // columns))
        if tuple(factors.shape) != wanted:
            raise ConfigError(f"{self.hf_dir}:{name}{_FACTORS}", tuple(factors.shape), f"shape {wanted}, a factor for each block")
        spread = factors.repeat_interleave(rows, 0)[: tensor.size(0)].repeat_interleave(columns, 1)[:, : tensor.size(1)]
        return (tensor.float() * spread).to(torch.bfloat16)
