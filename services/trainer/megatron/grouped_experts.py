"""Experts as one matrix product of groups of rows, in the place of Megatron's loop over them.

The parameters stay those of Megatron's ``SequentialMLP``, one matrix an expert, with their names: checkpoints, exports and pushes know
nothing of this. But they are kept so that the matrices of all experts lie at one distance from each other, in their order. A view of that
memory is what the grouped product takes: nothing is copied, also where the optimizer has moved them into its buffer. Gradients go the same
way, from one product straight into the float32 buffer, without a call for each expert.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from services.trainer.megatron.token_permutation import TokenPermutation

ALIGNED = 16
"""Bytes that rows must be a multiple of for the grouped kernels."""

grouped_mm: Callable[..., Tensor] | None = getattr(F, "grouped_mm", getattr(torch, "_grouped_mm", None))


class GroupedExperts(SequentialMLP):
    """This rank's experts of a layer.

    Attributes:
        loops: computes one expert after the other, for comparison.
    """

    loops = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Megatron's buffers hold parameters in the reverse of the order in which they are found: from the last to the first.
        experts = list(self.local_experts._modules.items())
        self.local_experts._modules.clear()
        self.local_experts._modules.update(reversed(experts))
        self._experts: list[MLP] = [expert for _, expert in experts]

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Computes each expert's rows, weighted.

        Args:
            permuted_local_hidden_states: [rows, H], in the experts' order. tokens_per_expert: integers [experts], on any device.
            permuted_probs: [rows].
        """
        hidden = permuted_local_hidden_states
        up, down = ([getattr(expert, name) for expert in self._experts] for name in ("linear_fc1", "linear_fc2"))
        if self.loops or not len(hidden) or not takes_groups(hidden, up[0].weight, down[0].weight, _rank(up[0], down[0])):
            output: tuple[Tensor, Tensor | None] = self._looped(hidden, tokens_per_expert, permuted_probs)
            return output
        ends = tokens_per_expert.to(hidden.device, non_blocking=True).cumsum(0).int()
        wide = _outputs(hidden, ends, up)
        if self.config.bias_activation_fusion:
            gated = weighted_bias_swiglu_impl(wide, None, permuted_probs.unsqueeze(-1), False)
        else:
            gate, linear = wide.chunk(2, -1)
            gated = (F.silu(gate) * linear * permuted_probs.unsqueeze(-1)).to(wide.dtype)
        return _outputs(gated, ends, down), None

    @torch.no_grad()
    def lay_together(self) -> None:
        """Gives the matrices of frozen experts one memory, of which the product takes a view: no optimizer's buffer holds them."""
        for name in ("linear_fc1", "linear_fc2"):
            weights = [getattr(expert, name).weight for expert in self._experts]
            if not any(weight.requires_grad for weight in weights):
                for weight, place in zip(weights, torch.stack(weights), strict=True):
                    weight.data = place

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Returns Megatron's sharded state. Megatron numbers experts as it finds them, and would save each under another's name."""
        modules = self.local_experts._modules
        found = list(modules.items())
        try:
            modules.clear()
            modules.update(reversed(found))
            sharded: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            return sharded
        finally:
            modules.clear()
            modules.update(found)

    def _looped(self, hidden: Tensor, counts: Tensor, probs: Tensor) -> tuple[Tensor, Tensor | None]:
        sizes = counts.tolist()
        pieces = zip(self._experts, hidden.split(sizes), probs.split(sizes), strict=True)
        return torch.cat([expert(rows, weights)[0] for expert, rows, weights in pieces]), None


def _rank(*layers: Any) -> int:
    """Returns the rank of the adapters of these layers, 0 where there are none."""
    return max(layer.adapter.lora.rank if hasattr(layer, "adapter") else 0 for layer in layers)


def _outputs(rows: Tensor, ends: Tensor, layers: Sequence[Any]) -> Tensor:
    """Returns one linear layer's output of all experts, [rows, outputs], with what adapters add to it."""
    output: Tensor = GroupedProduct.apply(rows, ends, None, *[layer.weight for layer in layers])
    if hasattr(layers[0], "adapter"):
        output = output + layers[0].adapter.of_groups([layer.adapter for layer in layers], rows, ends)
    return output


def takes_groups(hidden: Tensor, up: Tensor, down: Tensor, rank: int = 0) -> bool:
    """Returns whether the grouped product takes rows [rows, H] and matrices of these shapes: on a GPU in bfloat16. ``rank``: adapters'."""
    widths = (up.size(1), up.size(0), down.size(1), rank)
    known = grouped_mm is not None and (not hidden.is_cuda or hidden.dtype == torch.bfloat16)
    return known and up.dtype == hidden.dtype and all(width * hidden.itemsize % ALIGNED == 0 for width in widths)


def stacked(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns a view [experts, …] of equal matrices that lie at one distance from each other in one memory; None where they do not."""
    first = tensors[0]
    size, places = first.itemsize, [tensor.data_ptr() for tensor in tensors]
    distance = places[1] - places[0] if len(places) > 1 else first.numel() * size
    if distance < first.numel() * size or distance % ALIGNED or not first.is_contiguous():
        return None
    together = first.untyped_storage().data_ptr() == tensors[-1].untyped_storage().data_ptr()  # not neighbours by chance
    if not together or places != list(range(places[0], places[0] + distance * len(places), distance)):
        return None
    return first.detach().as_strided((len(tensors), *first.shape), (distance // size, *first.stride()), first.storage_offset())


class GroupedProduct(torch.autograd.Function):
    """Rows [M, K] times the transposes of their experts' matrices [N, K]: [M, N].

    Args:
        ends: int32 [experts], where each one's rows end. group: the ranks that sum their gradients of the matrices, or None.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, group: dist.ProcessGroup | None, *weights: Tensor) -> Tensor:
        ctx.group = group
        assert grouped_mm is not None
        view = stacked(weights)
        matrices = torch.stack(weights) if view is None else view
        ctx.save_for_backward(rows, ends, *weights)
        return grouped_mm(rows, matrices.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        assert grouped_mm is not None
        rows, ends, *weights = ctx.saved_tensors
        gradient, of_rows = gradient.contiguous(), None
        if ctx.needs_input_grad[0]:
            view = stacked(weights)
            of_rows = grouped_mm(gradient, torch.stack(weights) if view is None else view, offs=ends)
        if not any(ctx.needs_input_grad[3:]):
            return (of_rows, None, None, *[None] * len(weights))
        of_weights = grouped_mm(gradient.T, rows, offs=ends)
        if ctx.group is not None:
            dist.all_reduce(of_weights, group=ctx.group)
        if accumulated(weights, of_weights):
            return (of_rows, None, None, *[None] * len(weights))
        return (of_rows, None, None, *of_weights.unbind())


def accumulated(weights: Sequence[Tensor], gradients: Tensor) -> bool:
    """Adds gradients [experts, N, K] to the float32 buffer of the matrices, at once; returns False where they have none of that form.

    Where gradients are reduced while others are still computed, each matrix must say itself that it is done.
    """
    buffers = [getattr(weight, "main_grad", None) for weight in weights]
    if any(buffer is None for buffer in buffers) or not all(getattr(weight, "grouped_gradient", False) for weight in weights):
        return False
    view = stacked([buffer for buffer in buffers if buffer is not None])
    if view is None:
        return False
    view.add_(gradients)
    return True


class SyncFreeDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all, with gathers in the place of masks. Where the rank has all experts the host waits for nothing; otherwise once
    a layer, for the sizes of what ranks send to one another."""

    @property
    def alone(self) -> bool:
        """Returns whether no other rank has a part of the experts."""
        return bool(self.ep_size == 1 and self.tp_size == 1)

    def _maybe_update_cuda_sync_point(self, point: str) -> None:
        if not self.alone:
            super()._maybe_update_cuda_sync_point(point)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor) -> Tensor:
        return tokens_per_expert if self.alone else super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)

    def preprocess(self, routing_map: Tensor) -> Tensor:
        counts: Tensor = super().preprocess(routing_map)
        self.counts = counts
        return counts

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        # kept for its type; with its graph it would keep the layer alive, in a circle that nothing frees, and the layer its ranks' groups
        self.probs = probs.detach()
        self.hidden_shape, self.routing_map = hidden_states.shape, routing_map
        hidden = hidden_states.view(-1, self.hidden_shape[-1])
        self.tokens_per_expert = self.preprocess(routing_map)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden.view(self.hidden_shape))
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", self.tokens_per_expert)
        self.order = TokenPermutation.of(routing_map, self.config.moe_router_topk)
        return self.order.ordered(hidden), self.order.weights(probs)

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.alone:
            tokens, _, probs = super().dispatch_postprocess(global_input_tokens, global_probs)
            return tokens, self.counts, probs
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(global_input_tokens)
        return global_input_tokens, self.counts, global_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        if self.alone:
            return hidden_states
        combined: Tensor = super().combine_preprocess(hidden_states)
        return combined

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(permutated_local_input_tokens)
            self.shared_experts.post_forward_comm()
        output = self.order.restored(permutated_local_input_tokens).view(self.hidden_shape)
        if self.shared_experts is not None:
            output += self.shared_experts.get_output()
        return output
