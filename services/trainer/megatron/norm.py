"""RMS norm for the local layer spec, also with sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from services.trainer.megatron.runtime import device


class RMSNorm(torch.nn.Module):
    """RMS norm over the last dimension (Zhang and Sennrich 2019).

    On a CPU with the order of casts of the Hugging Face models: the statistics in float32, the product with the weight in the input's
    dtype. On a GPU it is one of PyTorch's kernels, which casts once, at the end, as the kernels of engines do.

    Megatron's ``WrappedTorchNorm`` refuses sequence parallelism. All that it needs is the mark on the weight: each rank
    sees only its part of the sequence, so the weight's gradient is summed over the tensor-parallel group.

    Args:
        config: the model's. hidden_size: size of the last dimension. eps: added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden``: [..., hidden_size]; the same shape and dtype come back."""
        if hidden.is_cuda:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        normed: Tensor = _RmsNorm.apply(hidden, self.weight, self.eps)
        return normed


class LatentNorm(RMSNorm):
    """The norm of latent attention's low-rank vectors: its epsilon is a constant of the models, not an entry of their config."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__(config, hidden_size, 1e-6)


class NormedResidual(torch.nn.Module):
    """In the place of Megatron's sum of a block's output with the residual: the output is normed first."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """The function that Megatron calls with the block's (output, bias), the residual and a dropout probability."""

        def add(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_and_bias
            assert bias is None and not dropout
            return residual + self.norm(output)

        return add


class _RmsNorm(torch.autograd.Function):
    """Keeps its input and one float32 number a row; autograd would keep four float32 copies of the input."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(hidden, weight, scale)
        return weight * (wide * scale).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, scale = ctx.saved_tensors
        normed = hidden.float() * scale
        upstream = gradient.float()
        for_weight = (upstream * normed).flatten(0, -2).sum(0)
        upstream = upstream * weight
        along = (upstream * normed).mean(-1, keepdim=True)
        for_hidden = upstream.addcmul_(normed, along, value=-1).mul_(scale)
        return for_hidden.to(hidden.dtype), for_weight.to(weight.dtype), None
