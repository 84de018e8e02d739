"""Makes 8-bit floats of matrices, block by block, and plain numbers of those. Pure; on whichever device the matrix is."""

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.model.quantization import FACTORS, BlockFormat, Quantization

LARGEST = 448.0  # of e4m3, torch.finfo(torch.float8_e4m3fn).max
LEAST = 1e-12  # a block of zeros has a factor, too


def quantized(weight: Tensor, form: BlockFormat) -> tuple[Tensor, Tensor]:
    """Returns a matrix [rows, columns] of any float dtype as float8_e4m3fn of its shape, and float32 factors of `BlockFormat.factors`.

    A factor is the largest magnitude of its block divided by 448, or the next power of two from there; a number is rounded to the nearest.
    """
    rows, columns = weight.shape
    high, wide = form.factors(weight.shape)
    padded = F.pad(weight, (0, wide * form.columns - columns, 0, high * form.rows - rows)).float()
    blocks = padded.view(high, form.rows, wide, form.columns)
    factors = blocks.abs().amax((1, 3), keepdim=True).clamp(min=LEAST) / LARGEST
    if form.powers_of_two:
        mantissa, exponent = torch.frexp(factors)
        factors = torch.ldexp(torch.ones_like(factors), torch.where(mantissa == 0.5, exponent - 1, exponent))
    made = (blocks / factors).clamp(-LARGEST, LARGEST).view(padded.shape)[:rows, :columns]
    return made.to(torch.float8_e4m3fn).contiguous(), factors.view(high, wide)


def plain(weight: Tensor, factors: Tensor, form: BlockFormat, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Inverts `quantized`, but for its rounding: each block times its factor, in float32, rounded once."""
    rows, columns = weight.shape
    spread = factors.float().repeat_interleave(form.rows, 0)[:rows].repeat_interleave(form.columns, 1)[:, :columns]
    return (weight.float() * spread).to(dtype)


def sent(quantization: Quantization | None, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Returns what engines get of a tensor, in the order of `Quantization.specs`."""
    if quantization is None or name not in quantization.names:
        return [(name, tensor)]
    weight, factors = quantized(tensor, quantization.format)
    return [(name, weight), (name + FACTORS, factors)]
