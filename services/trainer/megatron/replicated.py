"""A linear layer that every tensor-parallel rank holds whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from services.trainer.megatron.runtime import device


class ReplicatedLinear(torch.nn.Module):
    """Latent attention's projections to low ranks, whose outputs all heads share.

    With sequence parallelism each rank maps its part of the sequence; the weight is marked so that its gradient is summed
    over the tensor-parallel group.

    Args:
        input_size, output_size: of the last dimension. The others are those that Megatron gives to every linear layer; of
            them only ``config`` and ``init_method`` have a meaning here.
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
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device()))
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """``hidden``: [..., input_size]. Returns [..., output_size], and no bias."""
        return torch.nn.functional.linear(hidden, self.weight), None
