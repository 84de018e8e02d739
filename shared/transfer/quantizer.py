"""Quantizes matrices as `shared.model.quantization` describes, and makes plain numbers of them. Pure; on whichever device the matrix is."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.model.quantization import Quantization, QuantizedFormat, parts_of

LARGEST = 448.0  # of e4m3, torch.finfo(torch.float8_e4m3fn).max
LEAST = 1e-12  # a block of zeros has a factor, too
LEAST_SCALE = 1e-5  # of a group: float16 has it
LEVELS, STEPS = 7, 15  # the largest 4-bit integer of symmetric groups; the steps between the numbers of a group with a zero point
PACKED = (0, 1, 2, 3, 4, 5, 6, 7)  # the places of eight consecutive integers in an int32, from the lowest bits on
PACKED_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def quantized(weight: Tensor, form: QuantizedFormat) -> tuple[Tensor, ...]:
    """Returns the parts of a matrix [rows, columns] of any float dtype, or of several [matrices, rows, columns] alike, in the order of the
    format's.

    In blocks a factor is the largest magnitude divided by 448, or the next power of two from there. In groups a scale is the largest
    magnitude divided by 7, with zero points the whole range divided by 15. A number is rounded to the nearest, by the scale as it is sent.
    """
    if form.bits == 8:
        return _in_blocks(weight, form)
    integers, scales, zeros = _integers(weight, form)
    if zeros is None:
        return packed(integers + 8, PACKED), scales
    return packed(integers.mT, PACKED_AWQ), packed(zeros.mT, PACKED_AWQ), scales.mT.contiguous()


def _in_blocks(weight: Tensor, form: QuantizedFormat) -> tuple[Tensor, Tensor]:
    (*many, rows, columns), shape = weight.shape, form.factors(weight.shape[-2:])
    high, wide = shape or (1, 1)
    block_rows, block_columns = form.rows or rows, form.columns or columns
    beyond = (wide * block_columns - columns, high * block_rows - rows)
    padded = F.pad(weight, (0, beyond[0], 0, beyond[1])) if any(beyond) else weight
    blocks = padded.reshape(*many, high, block_rows, wide, block_columns)
    largest = torch.linalg.vector_norm(blocks, math.inf, (-3, -1), keepdim=True, dtype=torch.float32)
    factors = largest.clamp(min=LEAST) / LARGEST
    if form.powers_of_two:
        mantissa, exponent = torch.frexp(factors)
        factors = torch.ldexp(torch.ones_like(factors), torch.where(mantissa == 0.5, exponent - 1, exponent))
    made = (blocks / factors).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(padded.shape)[..., :rows, :columns]
    return made.contiguous(), factors.view((*many, *shape))


def _integers(weight: Tensor, form: QuantizedFormat) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns int32 [rows, columns], scales [rows, groups], and zero points of that shape where the format has some."""
    groups, dtype = weight.float().unflatten(-1, (-1, form.columns)), getattr(torch, form.scales)
    if form.layout == "packed":
        scales = (groups.abs().amax(-1) / LEVELS).clamp(min=LEAST_SCALE).to(dtype)
        made = (groups / scales.float()[..., None]).round().clamp(-LEVELS, LEVELS)
        return made.int().flatten(-2), scales, None
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / STEPS).clamp(min=LEAST_SCALE).to(dtype)
    zeros = (-low / scales.float()).round().clamp(0, STEPS)
    made = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, STEPS)
    return made.int().flatten(-2), scales, zeros.int()


def packed(integers: Tensor, places: Sequence[int]) -> Tensor:
    """Returns integers from 0 to 15 [rows, columns] as int32 [rows, columns / 8]. ``places``: of eight, in steps of four bits."""
    shifts = 4 * torch.tensor(places, dtype=torch.int32, device=integers.device)
    return (integers.int().unflatten(-1, (-1, 8)) << shifts).sum(-1, dtype=torch.int32)


def unpacked(words: Tensor, places: Sequence[int]) -> Tensor:
    """Inverts `packed`."""
    shifts = 4 * torch.tensor(places, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).flatten(-2)


def plain(parts: Sequence[Tensor], form: QuantizedFormat, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Inverts `quantized`, but for its rounding: each number times its factor or scale, in float32, rounded once."""
    if form.bits == 4:
        if form.layout == "awq":
            integers, zeros = (unpacked(part, PACKED_AWQ).t() for part in parts[:2])
            return _numbers(integers, parts[2].t(), zeros, form).to(dtype)
        return _numbers(unpacked(parts[0], PACKED) - 8, parts[1], None, form).to(dtype)
    weight, factors = parts
    rows, columns = weight.shape
    spread = factors.float().view(form.factors(weight.shape))
    if form.rows:
        spread = spread.repeat_interleave(form.rows, 0)[:rows].repeat_interleave(form.columns, 1)[:, :columns]
    return (weight.float() * spread).to(dtype)


def _numbers(integers: Tensor, scales: Tensor, zeros: Tensor | None, form: QuantizedFormat) -> Tensor:
    groups = integers.unflatten(-1, (-1, form.columns))
    centred = groups if zeros is None else groups - zeros[..., None]
    return (centred.float() * scales.float()[..., None]).flatten(-2)


class FakeQuantized(torch.autograd.Function):
    """The numbers that engines compute with, of a matrix; its gradient is that of the matrix itself (straight-through)."""

    @staticmethod
    def forward(_ctx: object, weight: Tensor, form: QuantizedFormat) -> Tensor:
        return _numbers(*_integers(weight, form), form).to(weight.dtype)

    @staticmethod
    def backward(_ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


TOGETHER = 1 << 24  # the numbers of matrices that are quantized at once: few launches, and little memory beside a bucket


def all_quantized(matrices: Sequence[Tensor], form: QuantizedFormat) -> list[tuple[Tensor, ...]]:
    """Returns the parts of each of the matrices. Those of one shape and dtype are quantized together."""
    made: list[tuple[Tensor, ...]] = [()] * len(matrices)
    alike: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for index, matrix in enumerate(matrices):
        alike.setdefault((matrix.shape, matrix.dtype), []).append(index)
    for (shape, _), places in alike.items():
        step = max(1, TOGETHER // max(shape.numel(), 1))
        for first in range(0, len(places), step):
            some = places[first : first + step]
            stacked = torch.stack([matrices[index] for index in some]) if len(some) > 1 else matrices[some[0]][None]
            for index, *parts in zip(some, *quantized(stacked, form), strict=True):
                made[index] = tuple(parts)
    return made


def sent(quantization: Quantization | None, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Returns what engines get of a tensor, in the order of `Quantization.specs`."""
    if quantization is None or name not in quantization.names:
        return [(name, tensor)]
    return list(zip(parts_of(name, quantization.format), quantized(tensor, quantization.format), strict=True))
