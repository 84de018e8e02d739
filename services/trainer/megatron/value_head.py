"""The critic's head, in the place of the output layer."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from services.trainer.megatron.runtime import device


class ValueHead(torch.nn.Module):
    """A linear map from each hidden state to one number, without bias, zero at first. Every tensor-parallel rank holds it.

    With sequence parallelism each rank maps its part of the sequence and the values are gathered; the weight is marked so
    that its gradient is summed over the tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.split = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.weight.value_head = True  # type: ignore[attr-defined]  # no tensor of a Hugging Face checkpoint

    def forward(self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> tuple[Tensor, None]:
        """``hidden``: [U, 1, hidden size]. Returns float32 [U, 1, 1], and no bias; the other arguments are the output layer's."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self.split:  # all ranks go on with the same values, so each takes its own part of the gradient
            group = parallel_state.get_tensor_model_parallel_group()
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=group)
        return values, None
