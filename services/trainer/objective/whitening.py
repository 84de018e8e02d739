"""Advantages to mean 0 and variance 1 over the trained tokens of a whole batch, whoever holds its parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

WHITEN_EPSILON = 1e-8


@dataclass(frozen=True)
class Moments:
    """Of a set of numbers: how many, their mean, and the sum of squared distances from it.

    Those of parts merge into those of the whole (Chan, Golub, LeVeque 1983), so that ranks need to exchange three numbers each.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @classmethod
    def of(cls, values: Sequence[npt.ArrayLike], masks: Sequence[npt.NDArray[np.generic]]) -> Moments:
        """Of all values whose mask is not 0. Args: values: of each sample, one float or [R]. masks: [R] of each."""
        if len(values) != len(masks):
            raise ValueError(f"{len(values)} advantages for {len(masks)} masks")
        kept = [_spread(value, mask)[np.asarray(mask) != 0] for value, mask in zip(values, masks, strict=True)]
        flat = np.concatenate([np.empty(0), *kept])
        if not flat.size:
            return cls()
        mean = float(flat.mean())
        return cls(int(flat.size), mean, float(np.square(flat - mean).sum()))

    @classmethod
    def merged(cls, parts: Iterable[Moments]) -> Moments:
        """Of the sets of all parts together."""
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
        """Bessel-corrected; 0 of fewer than two numbers."""
        return self.m2 / (self.count - 1) if self.count > 1 else 0.0


def whitened(values: npt.ArrayLike, mask: npt.NDArray[np.generic], moments: Moments, *, shift_mean: bool = True) -> FloatArray:
    """``(x - mean) / sqrt(variance + 1e-8)`` where the mask is not 0, else 0: float64 [R].

    Args:
        values: one float or [R]. mask: [R]. moments: of the whole batch. shift_mean: False adds the mean again.

    Source: REINFORCE++, Hu et al. 2025 (arXiv:2501.03262); slime's masked whitening.
    """
    trained = np.asarray(mask) != 0
    spread = _spread(values, trained)
    result = np.zeros(trained.shape)
    result[trained] = (spread[trained] - moments.mean) / math.sqrt(moments.variance + WHITEN_EPSILON)
    if not shift_mean:
        result[trained] += moments.mean
    return result


def whiten(values: npt.NDArray[np.floating], mask: npt.NDArray[np.generic], *, shift_mean: bool = True) -> FloatArray:
    """``whitened`` by its own moments: float64 [T]. Args: values, mask: [T], the whole batch's."""
    return whitened(values, mask, Moments.of([values], [mask]), shift_mean=shift_mean)


def whiten_samples(advantages: Sequence[npt.ArrayLike], masks: Sequence[npt.NDArray[np.generic]]) -> list[FloatArray]:
    """Each sample whitened by the moments of all: float64 [R] each. Args: advantages: one float or [R] each. masks: [R] each."""
    moments = Moments.of(advantages, masks)
    return [whitened(advantage, mask, moments) for advantage, mask in zip(advantages, masks, strict=True)]


def _spread(values: npt.ArrayLike, mask: npt.NDArray[np.generic]) -> FloatArray:
    """One number, or [R], as [R]."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim and array.shape != np.shape(mask):
        raise ValueError(f"values {array.shape} and mask {np.shape(mask)}: expected one shape")
    return np.broadcast_to(array, np.shape(mask))
