"""How the weights of a Hugging Face checkpoint are quantized, by its ``config.json`` and the names of its tensors.

A quantized matrix, ``….weight`` of [rows, columns], is held as several tensors, its parts. Which matrices are quantized, the parts tell.
"""

import contextlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from shared.config.engine_limits import model_config_of, needed_model_config
from shared.model.hf_checkpoint import VISION, read_headers
from shared.runtime.errors import ConfigError
from shared.transfer.manifest import ITEM_BYTES, TensorSpec

ENTRY = "quantization_config"
WANTED = """8-bit floats in blocks (quant_method fp8, fmt e4m3, activation_scheme dynamic, weight_block_size of two positive integers \
or none, scale_fmt ue8m0 or none), 4-bit integers in groups of 32 or 128 (quant_method compressed-tensors, pack-quantized, symmetric; \
or quant_method awq, version gemm), or no such entry: `myxo convert` makes bfloat16 weights of MXFP4 ones; MXFP8 and NVFP4 are not read"""

GROUP_SIZES = (32, 128)  # columns of a group of 4-bit integers that engines have kernels for
ENDINGS = {
    "blocks": ("weight", "weight_scale_inv"),
    "whole": ("weight", "weight_scale"),
    "packed": ("weight_packed", "weight_scale"),
    "awq": ("qweight", "qzeros", "scales"),
}
"""How the names of a matrix's parts end, in the place of ``weight``, by the layout."""

LINEAR = re.compile(r"\.layers\.\d+\..*(_proj|\.w[123]|\.wq_b|\.wk|_proj_with_mqa)\.weight$")
"""The names of layers' matrices: projections, experts of MiniMax, the indexer of sparse attention."""
KEPT = re.compile(r"\.(eh_proj|weights_proj|in_proj_(a|b|ba)|kv_b_proj)\.weight$")
"""Those of them that engines have in plain numbers, and latent attention's ``kv_b_proj``: SGLang would round it a second time, whole."""
PRECISION = "rollout.rollout_precision"


@dataclass(frozen=True)
class QuantizedFormat:
    """How numbers are rounded, and held.

    With 8 bits: floats (e4m3) in blocks of ``rows`` by ``columns``, smaller at a matrix's end, each with a float32 factor, as DeepSeek-V3
    and Qwen3's FP8 checkpoints are; with 0 the whole matrix is one block. With 4: integers, eight in an int32, with a scale for each
    ``columns`` numbers of a row (W4A16); from -7 to 7 as Kimi-K2-Thinking is, or with 8 rows in AWQ's layout: transposed, each group with
    a zero point from 0 to 15. ``powers_of_two``: whether factors are no others (UE8M0). ``scales``: the dtype of 4-bit scales.
    """

    rows: int = 128
    columns: int = 128
    powers_of_two: bool = False
    bits: int = 8
    scales: str = "float32"

    @property
    def layout(self) -> str:
        """Returns which of `ENDINGS` parts have."""
        if self.bits == 8:
            return "blocks" if self.rows else "whole"
        return "awq" if self.rows == 8 else "packed"

    @property
    def endings(self) -> tuple[str, ...]:
        return ENDINGS[self.layout]

    @property
    def copies(self) -> int:
        return 2 if self.bits == 4 else 1  # 4-bit weights are there as they were pushed, and as kernels want them

    @property
    def title(self) -> str:
        return "blocks of 8-bit floats" if self.bits == 8 else "groups of 4-bit integers"

    def factors(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of a matrix's factors in blocks."""
        rows, columns = shape
        return (math.ceil(rows / self.rows), math.ceil(columns / self.columns)) if self.rows else ()

    def parts(self, shape: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the dtypes and shapes of a matrix's parts."""
        rows, columns = shape
        if self.bits == 8:
            return [("float8_e4m3fn", (rows, columns)), ("float32", self.factors(shape))]
        groups = columns // self.columns
        if self.layout == "awq":
            return [("int32", (columns, rows // 8)), ("int32", (groups, rows // 8)), (self.scales, (groups, rows))]
        return [("int32", (rows, columns // 8)), (self.scales, (rows, groups))]

    def shape(self, first: Sequence[int]) -> tuple[int, ...]:
        """Returns a matrix's shape, by that of its first part."""
        if self.bits == 8:
            return tuple(first)
        return (first[1] * 8, first[0]) if self.layout == "awq" else (first[0], first[1] * 8)

    def obstacle(self, shape: Sequence[int]) -> str | None:
        """Returns what a matrix should have to be quantized so; None where it can be."""
        if self.bits == 4 and shape[1] % self.columns:
            return f"columns that groups of {self.columns} divide"
        return f"rows that {self.rows} divides" if self.bits == 4 and shape[0] % self.rows else None

    def entry(self, kept: Collection[str]) -> dict[str, Any]:
        """Returns the entry of a ``config.json``. ``kept``: the modules whose weights are not quantized."""
        made: dict[str, Any] = {"modules_to_not_convert": sorted(kept)}
        if self.bits == 8:
            made |= {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
            made |= {"weight_block_size": [self.rows, self.columns]} if self.rows else {}
            return made | ({"scale_fmt": "ue8m0"} if self.powers_of_two else {})
        if self.layout == "awq":
            return made | {"quant_method": "awq", "bits": 4, "group_size": self.columns, "zero_point": True, "version": "gemm"}
        weights: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": self.columns}
        weights |= {"dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {}}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        made = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
        return made | {"config_groups": {"group_0": group}, "ignore": sorted(kept), "kv_cache_scheme": None}


def in_groups(columns: int = 32, awq: bool = False, scales: str = "bfloat16") -> QuantizedFormat:
    """Returns the format of groups of 4-bit integers."""
    return QuantizedFormat(8 if awq else 1, columns, False, 4, scales)


FORMATS = {"fp8": QuantizedFormat(), "int4": in_groups()}  # `rollout_precision` → the format that a plain checkpoint's layers get


def format_of(path: Path, entry: Any) -> QuantizedFormat:
    """Returns the format that an entry describes. ``path``: of the ``config.json``. Raises ConfigError for any other."""
    found = _blocks(entry) or _groups(entry)
    if found is None:
        raise ConfigError(f"{path}:{ENTRY}", entry, WANTED)
    return found


def _blocks(entry: Any) -> QuantizedFormat | None:
    defaults = {"fmt": ("e4m3",), "activation_scheme": ("dynamic",), "scale_fmt": (None, "float32", "ue8m0")}
    match entry:
        case {"quant_method": "fp8"} if all(entry.get(name, values[0]) in values for name, values in defaults.items()):
            powers = entry.get("scale_fmt") == "ue8m0"
            match entry.get("weight_block_size", [0, 0] if "activation_scheme" in entry else None):
                case [int(rows), int(columns)] if min(rows, columns) > 0 or "weight_block_size" not in entry:
                    return QuantizedFormat(rows, columns, powers)
    return None


def _groups(entry: Any) -> QuantizedFormat | None:
    match entry:
        case {"quant_method": "awq", "bits": 4, "group_size": size} if size in GROUP_SIZES:
            return in_groups(size, awq=True) if str(entry.get("version", "gemm")).lower() == "gemm" else None
        case {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {**groups}} if len(groups) == 1:
            group: Any = next(iter(groups.values()))
            weights = group.get("weights") if isinstance(group, dict) else None
            wanted = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
            if isinstance(weights, dict) and weights.get("group_size") in GROUP_SIZES and wanted.items() <= weights.items():
                others = weights.get("actorder") or weights.get("dynamic") or group.get("input_activations")
                return None if others else in_groups(weights["group_size"])
    return None


@dataclass(frozen=True)
class Quantization:
    """A checkpoint's format, the names of its quantized matrices, and the entry of its ``config.json``."""

    format: QuantizedFormat
    names: frozenset[str]
    entry: dict[str, Any] = field(default_factory=dict, compare=False)

    def specs(self, name: str, dtype: str, shape: tuple[int, ...]) -> list[TensorSpec]:
        """Returns what engines get of a tensor: a quantized matrix's parts, anything else as it is."""
        if name not in self.names:
            return [(name, dtype, shape)]
        return [(part, *spec) for part, spec in zip(parts_of(name, self.format), self.format.parts(shape), strict=True)]

    def shapes(self, held: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of tensors with matrices in the place of their parts; what is plain still is left as it is."""
        parts = {part for name in self.names for part in (*parts_of(name, self.format), f"{name}_shape")}
        firsts = {name: parts_of(name, self.format)[0] for name in self.names - held.keys()}
        whole = {name: self.format.shape(held[first]) for name, first in firsts.items() if first in held}
        return {name: tuple(shape) for name, shape in held.items() if name in self.names or name not in parts} | whole


def engine_bytes(directory: Path, precision: str = "checkpoint") -> float | None:
    """Returns the bytes of a parameter of the layers in an engine on a GPU, on average; None: as many as without quantization. Where
    there is a ``config.json`` alone, as for `myxo plan`, these are those of a layer whose matrices are all quantized."""
    try:
        if (found := quantization_in_engines(directory, precision)) is None:
            return None
        held = {name: tensor for name, tensor in read_headers(directory)[0].items() if ".layers." in name}
    except ConfigError:  # which has a check of its own
        return _without_weights(directory, precision)
    shapes, copies = found.shapes({name: shape for name, (_, shape) in held.items()}), found.format.copies
    sizes = 0
    for name, shape in shapes.items():
        specs = found.specs(name, held.get(name, ("",))[0], shape)
        sizes += sum(math.prod(of) * ITEM_BYTES[dtype] for _, dtype, of in specs) * (copies if name in found.names else 1)
    return sizes / sum(map(math.prod, shapes.values()))


def _without_weights(directory: Path, precision: str) -> float | None:
    """Returns what `engine_bytes` is where there is a ``config.json`` alone: that of a large matrix."""
    with contextlib.suppress(ConfigError):
        form = FORMATS.get(precision) if (entry := needed_model_config(directory).get(ENTRY)) is None else _blocks(entry) or _groups(entry)
        if form is not None:
            sizes = [math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in form.parts((4096, 4096))]
            return form.copies * sum(sizes) / 4096**2
    return None


def parts_of(name: str, form: QuantizedFormat) -> tuple[str, ...]:
    """Returns the names of a matrix's parts."""
    return tuple(name.removesuffix("weight") + ending for ending in form.endings)


def quantization_of(directory: Path) -> Quantization | None:
    """Returns how a checkpoint is quantized; None where its ``config.json`` has no such entry.

    Raises ConfigError: in another format, or parts are missing, left over or of another shape than their matrices have.
    """
    entry = needed_model_config(directory).get(ENTRY)
    return None if entry is None else _quantization(directory, format_of(directory / "config.json", entry), json.dumps(entry))


def quantization_in_engines(directory: Path, precision: str) -> Quantization | None:
    """Returns how engines have the weights of a checkpoint: as it has them, or a plain one's in another ``precision`` (of `FORMATS`).

    Raises ConfigError: see `quantization_of`; or for a precision: it is quantized already, is of other dtypes, has no matrices that can
        be, one that groups do not divide, or experts in one tensor.
    """
    if precision not in FORMATS:
        return quantization_of(directory)
    if (entry := needed_model_config(directory).get(ENTRY)) is not None:
        raise ConfigError(PRECISION, precision, f"checkpoint: {directory} is quantized already ({dict(entry).get('quant_method')})")
    form, names, kept = FORMATS[precision], set[str](), set[str]()
    held, problems = read_headers(directory)
    for problem in problems:
        raise problem
    for name, (dtype, shape) in held.items():
        if not is_quantized(directory, name, shape):
            kept |= {name.removesuffix(".weight")} if len(shape) == 2 and name.endswith(".weight") else set()
            continue
        names.add(name)
        if dtype not in ("float32", "bfloat16", "float16") or (wanted := form.obstacle(shape)):
            wanted = "numbers of 16 or 32 bits" if dtype not in ("float32", "bfloat16", "float16") else wanted
            raise ConfigError(f"{directory}:{name}", f"{dtype} {list(shape)}", f"{wanted}, for {PRECISION} = {precision}")
    if not names:
        raise ConfigError(PRECISION, precision, f"checkpoint: {directory} has no layers' matrices (…_proj.weight)")
    return Quantization(form, frozenset(names), form.entry(kept))


def is_quantized(source: Path, name: str, shape: Sequence[int]) -> bool:
    """Returns whether a tensor is one of the layers' matrices that fewer bits are enough for. Raises ConfigError: of experts in one."""
    if ".experts." in name and len(shape) == 3:
        raise ConfigError(f"{source}:{name}", list(shape), "a matrix of one expert: tensors of all experts are not quantized")
    return len(shape) == 2 and _is_linear(name)


def entry_format(directory: Path) -> QuantizedFormat | None:
    """Returns the format of a checkpoint by its ``config.json`` alone; None where there is none that is known."""
    try:
        return format_of(directory, (model_config_of(directory) or {})[ENTRY])
    except (OSError, ValueError, LookupError, TypeError, ConfigError):
        return None


@cache
def _quantization(directory: Path, form: QuantizedFormat, entry: str) -> Quantization:
    held, problems = read_headers(directory)
    for problem in problems:
        raise problem
    own = form.endings if form.bits == 4 else form.endings[1:]
    names = {name.removesuffix(end) + "weight" for name in held for end in own if name.endswith(f".{end}")}
    if form.bits == 4 and names:
        form = replace(form, scales=held.get(parts_of(min(names), form)[-1], (form.scales,))[0])
    for name in sorted(names | {name for name, (dtype, _) in held.items() if dtype.startswith("float8")}):
        _check(directory, form, name, held)
    if not names:
        wanted = f"no such entry: no tensor has parts ({', '.join(form.endings)})"
        raise ConfigError(f"{directory / 'config.json'}:{ENTRY}", form.entry(())["quant_method"], wanted)
    found = Quantization(form, frozenset(names), json.loads(entry))
    _check_list(directory, found, [name for name, (_, shape) in held.items() if len(shape) == 2])
    return found


def _check_list(directory: Path, found: Quantization, matrices: Sequence[str]) -> None:
    """Refuses a list of plain modules that is not the files': engines go by it, and would have such a matrix as memory is."""
    field = "ignore" if found.format.layout == "packed" else "modules_to_not_convert"
    groups = found.entry.get("config_groups") or {}
    if any(group.get("targets") != ["Linear"] for group in groups.values()):  # which say themselves what is quantized
        return
    where, rules = f"{directory / 'config.json'}:{ENTRY}.{field}", list(map(str, found.entry.get(field) or ()))
    for name in sorted({*filter(_is_linear, matrices), *found.names}):
        module, quantized = name.removesuffix(".weight"), name in found.names
        named = any(re.match(rule[3:], module) if rule.startswith("re:") else rule == module for rule in rules)
        if named == quantized and (named or not any(each in module for each in rules)):
            wanted = f"modules without {', '.join(found.format.endings[1:])}" if named else f"{module} among them: the files have it plain"
            raise ConfigError(where, module if named else rules[:4], wanted)


def _is_linear(name: str) -> bool:
    return not name.startswith(VISION) and bool(LINEAR.search(name)) and not KEPT.search(name)


def _check(directory: Path, form: QuantizedFormat, name: str, held: Mapping[str, tuple[str, Sequence[int]]]) -> None:
    first, *others = parts_of(name, form)
    dtype, sizes = held.get(first, ("absent", ()))
    kind = form.parts((form.rows or 1, form.columns or 1))[0][0]
    if dtype != kind or len(sizes) != 2 or (wanted := form.obstacle(form.shape(sizes))):
        wanted = "a matrix" if dtype != kind or len(sizes) != 2 else wanted
        what = f"{wanted} in {form.title} ({kind}), for it has {', '.join(form.endings[1:])}"
        raise ConfigError(f"{directory}:{first}", f"{dtype} {list(sizes)}", what)
    for part, (kind, shape) in zip(others, form.parts(form.shape(sizes))[1:], strict=True):
        dtype, found = held.get(part, ("absent", ()))
        fits = tuple(found) == shape or (not shape and tuple(found) == (1,))  # a number may be held as one of a list
        if not fits or (dtype != kind and not {dtype, kind} <= {"float32", "bfloat16", "float16"}):
            wanted = f"{kind} {list(shape)}: for the {form.title} of {form.rows} by {form.columns}"
            raise ConfigError(f"{directory}:{part}", f"{dtype} {list(found)}", wanted)


_BY_ROWS, _BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def split_problems(
    form: QuantizedFormat, shapes: Mapping[str, Sequence[int]], ranks: int, key_ranks: int, expert_ranks: int
) -> Iterator[str]:
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
        if divides and block and size % (parts * block) and kind not in met:
            met.add(kind)
            yield f"{name} has {size} {what}, which {parts} ranks of an engine cannot divide into whole blocks of {block}"
