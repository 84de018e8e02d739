"""The frequencies of a rotary position embedding."""

from __future__ import annotations

import math

import torch

from shared.model.architecture import Llama3Scaling, Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Float32 [rotated dimensions / 2], for every scaling but YaRN's."""
    rotated = int(head_dim * rope.fraction)
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated))
    return _stretched(rope.scaling, frequencies) if isinstance(rope.scaling, Llama3Scaling) else frequencies


def _stretched(scaling: Llama3Scaling, frequencies: torch.Tensor) -> torch.Tensor:
    """``frequencies``: float32 [pairs]; in the order of operations of the Hugging Face implementation."""
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_positions / scaling.low_freq_factor
    shortest = scaling.original_max_positions / scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), between, stretched)
