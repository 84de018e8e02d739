"""How large a checkpoint's model is, read from the headers of its safetensors files alone.

The format: eight bytes, little-endian, that say how long the JSON object behind them is; in it each tensor's shape and type.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

LONGEST_HEADER = 100_000_000
"""Bytes that safetensors itself takes at most."""


@dataclass(frozen=True)
class ModelSize:
    """``parameters``: how many there are. ``bytes``: what they take in the files."""

    parameters: int
    bytes: int


def model_size(model: Path) -> ModelSize | None:
    """Returns the size of the model in a directory; None where a file cannot be read, which the check of the weight files reports."""
    parameters = size = 0
    try:
        for path in model.glob("*.safetensors"):
            for name, tensor in _header(path).items():
                if name != "__metadata__":
                    begin, end = tensor["data_offsets"]
                    parameters += math.prod(tensor["shape"])
                    size += end - begin
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return ModelSize(parameters, size) if parameters else None


def _header(path: Path) -> dict[str, dict[str, list[int]]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        header: dict[str, dict[str, list[int]]] = json.loads(file.read(length))
        return header
