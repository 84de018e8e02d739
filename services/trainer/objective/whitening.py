"""Whitening of advantages to mean 0 and variance 1 over the trained tokens of a whole batch, on all ranks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WHITEN_EPSILON = 1e-8


@dataclass(frozen=True)
class Moments:
    """The count of a set of numbers, their mean, and the sum of squared distances from it.

    Moments of parts merge into those of the whole (Chan, Golub, LeVeque 1983), so ranks exchange only three numbers each.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @classmethod
    def of(cls, values: Sequence[Tensor], masks: Sequence[Tensor]) -> "Moments":
        """Returns the moments of all values whose mask is true. ``values``: float64 [R] of each sample. ``masks``: bool [R] of each."""
        kept = [value[mask] for value, mask in zip(values, masks, strict=True)]
        flat = torch.cat([torch.empty(0, dtype=torch.float64), *kept])
        if not flat.numel():
            return cls()
        mean = float(flat.mean())
        return cls(flat.numel(), mean, float((flat - mean).square().sum()))

    @classmethod
    def merged(cls, parts: "Iterable[Moments]") -> "Moments":
        """Returns the moments of the sets of all parts together."""
        count, mean, m2 = 0, 0.0, 0.0
        for part in parts:
            if not part.count:
                continue
            total, distance = count + part.count, part.mean - mean
            mean += distance * part.count / total
            m2 += part.m2 + distance**2 * count * part.count / total
            count = total
        return cls(count, mean, m2)

    @property
    def variance(self) -> float:
        """Returns the Bessel-corrected variance; 0 for fewer than two numbers."""
        return self.m2 / (self.count - 1) if self.count > 1 else 0.0


def whitened(values: Tensor, mask: Tensor, moments: Moments) -> Tensor:
    """Returns ``(x - mean) / sqrt(variance + 1e-8)`` where the mask is true, else 0: float64 [R].

    Args:
        values: float64 [R]. mask: bool [R]. moments: of the whole batch.

    Source: REINFORCE++, Hu et al. 2025 (arXiv:2501.03262); slime's masked whitening.
    """
    return torch.where(mask, (values - moments.mean) / math.sqrt(moments.variance + WHITEN_EPSILON), torch.zeros_like(values))
