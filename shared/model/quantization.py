"""How the weights of a Hugging Face checkpoint are quantized, by its ``config.json`` and the names of its tensors.

In blocks of 8-bit floats (e4m3), as DeepSeek-V3 and Qwen3's FP8 checkpoints are: beside a matrix [rows, columns] lies its float32 matrix of
factors, one for each block, under the matrix's name with `FACTORS` behind it. Which matrices are quantized, the factors tell.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shared.model.hf_checkpoint import read_headers
from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import parse_json
from shared.transfer.manifest import TensorSpec

FACTORS = "_scale_inv"
ENTRY = "quantization_config"
WANTED = """8-bit floats in blocks (quant_method fp8, fmt e4m3, activation_scheme dynamic, weight_block_size of two positive integers, \
scale_fmt ue8m0 or none), or no such entry: `myxo convert` makes bfloat16 weights of MXFP4 ones"""


@dataclass(frozen=True)
class BlockFormat:
    """Rows and columns of a block; those at a matrix's end may be smaller. ``powers_of_two``: whether factors are no others (UE8M0)."""

    rows: int = 128
    columns: int = 128
    powers_of_two: bool = False

    def factors(self, shape: Sequence[int]) -> tuple[int, int]:
        """Returns the shape of a matrix's factors."""
        rows, columns = shape
        return math.ceil(rows / self.rows), math.ceil(columns / self.columns)

    def entry(self, kept: Collection[str]) -> dict[str, Any]:
        """Returns the entry of a ``config.json``. ``kept``: the modules whose weights are not quantized."""
        made = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [self.rows, self.columns]}
        return made | ({"scale_fmt": "ue8m0"} if self.powers_of_two else {}) | {"modules_to_not_convert": sorted(kept)}


def block_format(path: Path, entry: Any) -> BlockFormat:
    """Returns the format that an entry describes. ``path``: of the ``config.json``. Raises ConfigError for any other."""
    defaults = {"fmt": ("e4m3",), "activation_scheme": ("dynamic",), "scale_fmt": (None, "float32", "ue8m0")}
    match entry:
        case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]} if min(rows, columns) > 0:
            if all(entry.get(name, values[0]) in values for name, values in defaults.items()):
                return BlockFormat(rows, columns, entry.get("scale_fmt") == "ue8m0")
    raise ConfigError(f"{path}:{ENTRY}", entry, WANTED)


@dataclass(frozen=True)
class Quantization:
    """A checkpoint's format, and the names of its quantized matrices."""

    format: BlockFormat
    names: frozenset[str]

    def specs(self, name: str, dtype: str, shape: tuple[int, ...]) -> list[TensorSpec]:
        """Returns what engines get of a tensor: a quantized matrix and its factors, anything else as it is."""
        if name not in self.names:
            return [(name, dtype, shape)]
        return [(name, "float8_e4m3fn", shape), (name + FACTORS, "float32", self.format.factors(shape))]


def quantization_of(directory: Path) -> Quantization | None:
    """Returns how a checkpoint is quantized; None where its ``config.json`` has no such entry.

    Raises ConfigError: in another format, or factors are missing, left over or of another shape than their matrices have.
    """
    path = directory / "config.json"
    try:
        entry = parse_json(path.read_bytes()).get(ENTRY)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError("model.hf_checkpoint", str(path), f"a readable JSON object ({error})") from error
    return None if entry is None else _quantization(directory, block_format(path, entry))


@cache
def _quantization(directory: Path, form: BlockFormat) -> Quantization:
    held, problems = read_headers(directory)
    for problem in problems:
        raise problem
    names = {name.removesuffix(FACTORS) for name in held if name.endswith(FACTORS)}
    for name in sorted(names | {name for name, (dtype, _) in held.items() if dtype.startswith("float8")}):
        _check(directory, form, name, held)
    if not names:
        raise ConfigError(f"{directory / 'config.json'}:{ENTRY}", "fp8", f"no such entry: no tensor has factors ({FACTORS})")
    return Quantization(form, frozenset(names))


def _check(directory: Path, form: BlockFormat, name: str, held: Mapping[str, tuple[str, Sequence[int]]]) -> None:
    where = f"{directory}:{name}"
    dtype, shape = held.get(name, ("absent", ()))
    if dtype != "float8_e4m3fn" or len(shape) != 2:
        raise ConfigError(where, f"{dtype} {list(shape)}", f"a matrix of 8-bit floats (float8_e4m3fn), for it has factors ({FACTORS})")
    factors, sizes = held.get(name + FACTORS, ("absent", ()))
    if tuple(sizes) != form.factors(shape) or not factors.startswith(("float32", "bfloat16")):
        wanted = f"float32 {list(form.factors(shape))}: a factor for each block of {form.rows} by {form.columns}"
        raise ConfigError(where + FACTORS, f"{factors} {list(sizes)}", wanted)


_BY_ROWS, _BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def split_problems(form: BlockFormat, shapes: Mapping[str, Sequence[int]], ranks: int, key_ranks: int, expert_ranks: int) -> Iterator[str]:
    """Yields why engine ranks cannot divide quantized matrices into whole blocks, the first of each kind. SGLang keeps what it fuses
    (queries, keys and values, the halves of a gated MLP) in whole blocks even on one rank.

    Args:
        shapes: of the quantized matrices, by their names. ranks: that divide a layer. key_ranks, expert_ranks: that divide keys and values,
            and an expert; the others hold copies, or other experts.
    """
    met = set()
    for name, (rows, columns) in shapes.items():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        parts = expert_ranks if ".experts." in name else key_ranks if kind in ("k_proj", "v_proj") else ranks
        size, block, what = (rows, form.rows, "rows") if kind in _BY_ROWS else (columns, form.columns, "columns")
        divides = kind in _BY_ROWS or (kind in _BY_COLUMNS and parts > 1)
        if divides and size % (parts * block) and kind not in met:
            met.add(kind)
            yield f"{name} has {size} {what}, which {parts} ranks of an engine cannot divide into whole blocks of {block}"
