"""The modules of a layer that Megatron's local spec lacks, or that do not support sequence parallelism there.

With sequence parallelism each rank sees its part of the sequence only. A weight that every rank holds whole is marked for that: its
gradient is then summed over the tensor-parallel group.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from services.trainer.megatron.runtime import device


def shared_weight(content: Tensor, config: TransformerConfig) -> torch.nn.Parameter:
    """Returns a parameter that every tensor-parallel rank holds whole, in the model's dtype on this rank's device."""
    parameter = torch.nn.Parameter(content.to(dtype=config.params_dtype, device=device()))
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


class RMSNorm(torch.nn.Module):
    """RMS norm over the last dimension (Zhang and Sennrich 2019).

    On a CPU the casts have the order of the Hugging Face models: the statistics in float32, the product with the weight in the input's
    dtype. On a GPU it is one of PyTorch's kernels, which casts once, at the end, as the kernels of engines do.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = shared_weight(torch.ones(hidden_size), config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Takes [..., hidden_size] and returns the same shape and dtype."""
        if hidden.is_cuda:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        normed: Tensor = _RmsNorm.apply(hidden, self.weight, self.eps)
        return normed


class LatentNorm(RMSNorm):
    """The norm of latent attention's low-rank vectors, whose epsilon is a constant of the models, not an entry of their config."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__(config, hidden_size, 1e-6)


class NormedResidual(torch.nn.Module):
    """Replaces Megatron's sum of a block's output with the residual: the output is normed first."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """Returns the function that Megatron calls with the block's (output, bias), the residual and a dropout probability."""

        def add(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_and_bias
            assert bias is None and not dropout
            return residual + self.norm(output)

        return add


class ReplicatedLinear(torch.nn.Module):
    """A linear layer that every tensor-parallel rank holds whole: latent attention's projections to low ranks, which all heads share.

    Args:
        input_size, output_size: of the last dimension. Megatron gives the others to every linear layer; of them only ``config`` and
            ``init_method`` have a meaning here.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        bias: bool = False,
        **_: object,
    ) -> None:
        super().__init__()
        assert not bias
        self.weight = shared_weight(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device()), config)
        if config.perform_initialization:
            init_method(self.weight)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Takes [..., input_size]; returns [..., output_size], and no bias."""
        return F.linear(hidden, self.weight), None


class ValueHead(torch.nn.Module):
    """The critic's head, in the place of the output layer: a linear map from hidden states to numbers, without bias, zero at first."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.split = config.sequence_parallel
        self.weight = shared_weight(torch.zeros(1, config.hidden_size), config)
        self.weight.value_head = True  # type: ignore[attr-defined]  # no tensor of a Hugging Face checkpoint

    def forward(self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> tuple[Tensor, None]:
        """Takes [U, 1, hidden size]; returns float32 [U, 1, 1], and no bias. The other arguments are the output layer's."""
        values = F.linear(hidden.float(), self.weight.float())
        if self.split:  # all ranks compute the same from the values, so each takes its own part of the gradient
            group = parallel_state.get_tensor_model_parallel_group()
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=group)
        return values, None


class RotaryByPlace(torch.nn.Module):
    """Megatron's rotary embedding, which knows the place of every token where sequences share beginnings.

    Megatron counts places from each sequence's start, but takes a table with a row for each token as it is.

    Args:
        embedding: Megatron's own, for an attention of any kind.
    """

    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        self.embedding: Any = embedding
        self._places: Tensor | None = None

    def get_rotary_seq_len(self, *inputs: Any) -> int:
        """Returns the places of the table that Megatron asks for next. The last input is the micro-batch's `PackedSequences`."""
        shared = inputs[-1].shared
        self._places = None if shared is None else shared.places
        length: int = self.embedding.get_rotary_seq_len(*inputs)
        return length

    def forward(self, length: int, **options: Any) -> Any:
        """Returns the table, and what else the embedding returns, as YaRN's factor."""
        found, places = self.embedding(length, **options), self._places
        if places is None:
            return found
        return found[places] if isinstance(found, Tensor) else (found[0][places], *found[1:])


def rotate_by_place(model: torch.nn.Module) -> None:
    """Puts `RotaryByPlace` around every rotary embedding of a model."""
    for module in list(model.modules()):
        if isinstance(embedding := getattr(module, "rotary_pos_emb", None), torch.nn.Module):
            module.rotary_pos_emb = RotaryByPlace(embedding)


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
