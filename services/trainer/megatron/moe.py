"""Mixture-of-experts layers: grouped experts, permutation of tokens, dispatchers, and replay of routing.

Experts are one matrix product of groups of rows, in the place of Megatron's loop over them. The parameters stay those of Megatron's
``SequentialMLP``, one matrix an expert, with their names: checkpoints, exports and pushes know nothing of this. But they are kept so that
the matrices of all experts lie at one distance from each other, in their order. A view of that memory is what the grouped product takes:
nothing is copied, also where the optimizer has moved them into its buffer. Gradients go the same way, from one product straight into the
float32 buffer, without a call for each expert.

Replay: an engine and a trainer that compute the same logits but for rounding send some tokens to other experts: a choice is not
continuous. The log-probs of such tokens differ by much more than rounding. So training may replay a choice: that of the engine, or that
of the pass that took the log-probs of the batch. Only the choice is replayed. Scores are the present router's, so that gradients reach
it.

A choice belongs to a micro-batch and goes with the arguments of a layer's call (`PackedSequences.routing`): a layer that is computed
again in the backward pass, when other micro-batches have been through it, is called with the same arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_geglu import WeightedQuickGeGLUFunction
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from services.trainer.megatron.packed_sequences import ModelInput, StageRouting
from services.trainer.packing import PackedBatch
from services.trainer.parallel.expert_rows import rows_of_tokens, sums_of_rows
from shared.model.architecture import Architecture
from shared.model.parallel_layout import ParallelLayout
from shared.runtime.errors import ConfigError


@dataclass(frozen=True)
class TokenPermutation:
    """Where tokens lie once they are ordered by their experts, and by their place among the tokens of an expert.

    Args:
        tokens: int64 [N * K], the token of each row. chosen: int64 [N * K], each row's index in a matrix [experts, N].
        rows: int64 [N, K], the rows of each token.
    """

    tokens: Tensor
    chosen: Tensor
    rows: Tensor

    @classmethod
    def of(cls, routing_map: Tensor, per_token: int) -> "TokenPermutation":
        """Makes that of bool [N, experts], of which ``per_token`` are true for each token."""
        count, device = routing_map.size(0), routing_map.device
        flat = routing_map.T.reshape(-1)
        total = count * per_token
        # one more row takes what is not chosen
        places = torch.where(flat, flat.cumsum(0) - 1, total)
        chosen = torch.empty(total + 1, dtype=torch.int64, device=device)
        chosen = chosen.scatter_(0, places, torch.arange(flat.numel(), device=device))[:total]
        tokens = chosen % max(count, 1)
        rows = torch.argsort(tokens, stable=True).view(count, per_token)
        return cls(tokens, chosen, rows)

    def ordered(self, hidden: Tensor) -> Tensor:
        """Returns [N * K, H] of the tokens' [N, H]."""
        return rows_of_tokens(hidden, self.tokens, self.rows)

    def restored(self, ordered: Tensor) -> Tensor:
        """Returns the tokens' [N, H], each the sum of its rows, of [N * K, H]."""
        return sums_of_rows(ordered, self.tokens, self.rows)

    def weights(self, probs: Tensor) -> Tensor:
        """Returns the rows' weights [N * K] of [N, experts]."""
        return probs.T.reshape(-1).index_select(0, self.chosen)


ALIGNED = 16  # bytes that rows must be a multiple of for the grouped kernels
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
        for expert in self._experts if self.config.add_bias_linear else ():
            # no other rank of the tensor-parallel group has it: its gradient is summed over none, and counts in the norm on every rank
            expert.linear_fc2.bias.sequence_parallel = False
            tensor_parallel.set_tensor_model_parallel_attributes(expert.linear_fc2.bias, True, 0, 1)

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
        rank = max(layer.adapter.lora.rank if hasattr(layer, "adapter") else 0 for layer in (up[0], down[0]))
        if self.loops or not len(hidden) or not takes_groups(hidden, up[0].weight, down[0].weight, rank):
            output: tuple[Tensor, Tensor | None] = self._looped(hidden, tokens_per_expert, permuted_probs)
            return output
        ends = tokens_per_expert.to(hidden.device, non_blocking=True).cumsum(0).int()
        if not self.config.add_bias_linear:
            return _outputs(self._gated(_outputs(hidden, ends, up), permuted_probs), ends, down), None
        numbers = torch.searchsorted(ends, torch.arange(len(hidden), device=ends.device, dtype=ends.dtype), right=True)
        own = numbers[:, None] == torch.arange(len(self._experts), device=ends.device)
        own = own.to(hidden.dtype)  # [rows, experts]: a product adds the gradients of biases in float32
        gated = self._gated(torch.addmm(_outputs(hidden, ends, up), own, torch.stack([layer.bias for layer in up])), permuted_probs)
        weighted = own * permuted_probs.unsqueeze(-1).to(own.dtype)
        return torch.addmm(_outputs(gated, ends, down), weighted, torch.stack([layer.bias for layer in down])), None

    def _gated(self, wide: Tensor, probs: Tensor) -> Tensor:
        config, weights = self.config, probs.unsqueeze(-1)
        if config.bias_activation_fusion and config.activation_func is F.silu:
            return weighted_bias_swiglu_impl(wide, None, weights, False)
        gate, linear = wide.chunk(2, -1)
        if (limit := config.activation_func_clamp_value) is not None:
            gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
        if config.bias_activation_fusion:
            # made on the device: the host waits in Megatron's own call
            offset = torch.full((), config.glu_linear_offset, dtype=wide.dtype, device=wide.device)
            gated: Tensor = WeightedQuickGeGLUFunction.apply(torch.cat((gate, linear), -1), weights, False, offset)
            return gated
        return (config.activation_func(gate) * (linear + config.glu_linear_offset) * weights).to(wide.dtype)

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
        one = self._biased if self.config.add_bias_linear else lambda expert, rows, weights: expert(rows, weights)[0]
        return torch.cat([one(*piece) for piece in pieces]), None

    def _biased(self, expert: Any, rows: Tensor, weights: Tensor) -> Tensor:
        """Computes one expert with biases, as Megatron's does; that adds one in place to what may be a view (0.16)."""
        wide, bias = expert.linear_fc1(rows)
        output, bias_after = expert.linear_fc2(self._gated(wide + bias, weights))
        return output + bias_after * weights.unsqueeze(-1).to(output.dtype)


def _outputs(rows: Tensor, ends: Tensor, layers: Sequence[Any]) -> Tensor:
    output = grouped_product(rows, ends, [layer.weight for layer in layers])
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


def grouped_product(rows: Tensor, ends: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> Tensor:
    """Returns rows [M, K] times the transposes of their experts' matrices [N, K]: [M, N].

    Args:
        ends: int32 [experts], where each one's rows end. group: the ranks that sum their gradients of the matrices, or None.
    """
    buffer = _gradient_buffer(weights) if torch.is_grad_enabled() else None
    # autograd takes 10 us for each matrix that it knows of, and a step has thousands
    known = weights if buffer is None else weights[:1]
    output: Tensor = GroupedProduct.apply(rows, ends, group, weights, buffer, *known)
    return output


class GroupedProduct(torch.autograd.Function):
    """The product of `grouped_product`, whose gradient is added to ``buffer`` where there is one, and else goes to ``known`` matrices."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, ends: Tensor, group: Any, weights: Sequence[Tensor], buffer: Tensor | None, *known: Tensor
    ) -> Tensor:
        ctx.group, ctx.weights, ctx.buffer = group, None if buffer is None else weights, buffer
        ctx.save_for_backward(rows, ends, *(known if buffer is None else ()))  # which the backward pass frees: they may be copies
        assert grouped_mm is not None
        return grouped_mm(rows, _matrices(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        assert grouped_mm is not None
        rows, ends, *known = ctx.saved_tensors
        gradient, of_rows = gradient.contiguous(), None
        of_known: Sequence[Tensor | None] = [None] * len(ctx.needs_input_grad[5:])
        if ctx.needs_input_grad[0]:
            of_rows = grouped_mm(gradient, _matrices(ctx.weights or known), offs=ends)
        if any(ctx.needs_input_grad[5:]):
            of_weights = grouped_mm(gradient.T, rows, offs=ends)
            if ctx.group is not None:
                dist.all_reduce(of_weights, group=ctx.group)
            if ctx.buffer is None:
                of_known = of_weights.unbind()
            else:
                ctx.buffer.add_(of_weights)
        return (of_rows, None, None, None, None, *of_known)


def _matrices(weights: Sequence[Tensor]) -> Tensor:
    view = stacked(weights)
    return torch.stack(tuple(weights)) if view is None else view


def _gradient_buffer(weights: Sequence[Tensor]) -> Tensor | None:
    """Returns the float32 buffer [experts, N, K] of the matrices' gradients; None where they have none of that form, or are reduced while
    others are still computed: then each matrix must say itself that it is done."""
    if not all(getattr(weight, "grouped_gradient", False) and hasattr(weight, "main_grad") for weight in weights):
        return None
    return stacked([weight.main_grad for weight in weights])  # type: ignore[attr-defined]


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


DISPATCHER = "moe_token_dispatcher_type"


class PaddedAllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """Megatron's allgather, which wants as many tokens of every rank: the others are filled up with tokens that go to no expert.

    Every rank gets all tokens of the ranks that share the experts, and sends back the sums of its own experts' outputs. That is more to
    send than in an all-to-all, where tokens go to few of the ranks. The host waits twice a layer.
    """

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        hidden, probs = super().dispatch_preprocess(hidden_states, routing_map, probs)
        self._own = own = hidden.size(0)
        if self.tp_size > 1 or self.ep_size > 1:
            most = torch.tensor(own, device=hidden.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.tp_ep_group)
            missing = int(most) - own
            self.routing_map = F.pad(routing_map, (0, 0, 0, missing))
            hidden, probs = F.pad(hidden, (0, 0, 0, missing)), F.pad(probs, (0, 0, 0, missing))
        return hidden, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        permuted, counts, own_probs = super().dispatch_postprocess(hidden_states, probs)
        self.local_probs = own_probs.detach()  # kept for its type; its graph would keep the layer alive, in a circle that nothing frees
        return permuted, counts, own_probs

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[: self._own].view(self.hidden_shape)


def dispatcher_of(given: Mapping[str, Any], layout: ParallelLayout) -> str:
    """Returns the dispatcher of a run, by Megatron's name.

    Args:
        given: the user's fields of Megatron's configuration.

    Raises ConfigError: what else is given does not go with it.
    """
    kind: str = given.get(DISPATCHER, "alltoall")
    if kind == "allgather" and given.get("moe_shared_expert_overlap"):
        raise ConfigError(f"trainer.megatron.{DISPATCHER}", kind, "alltoall with moe_shared_expert_overlap")
    if kind == "flex" and layout.expert * layout.expert_tensor_size == 1:
        return "alltoall"  # nothing is sent
    return kind


@dataclass
class GivenChoice:
    """A layer's choice for the tokens of one call, in the place of Megatron's ``RouterReplay``.

    Args:
        routing: of the micro-batch. layer: its number, from 1.
    """

    routing: StageRouting
    layer: int

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Returns the scores of the chosen experts and their indices, [tokens, topk] each.

        Args:
            scores: [tokens, experts]. compute: Megatron's choice by them.
        """
        _, chosen = compute(scores, topk, num_groups=num_groups, group_topk=group_topk)
        given = self.routing.given.get(self.layer)
        if given is not None:
            chosen = torch.where(given >= 0, given.long(), chosen)
        if self.routing.recorded is not None:
            self.routing.recorded[self.layer] = chosen.to(torch.int16)
        return scores.gather(1, chosen), chosen


class ReplayedLayer(TransformerLayer):
    """A layer whose router takes its choice, and the tokens to balance, from the packed sequences that it is called with."""

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        router, routing = getattr(self.mlp, "router", None), getattr(packed_seq_params, "routing", None)
        if router is not None:
            router.router_replay = None if routing is None else GivenChoice(routing, self.layer_number)
            router.tokens = getattr(packed_seq_params, "balanced", None)
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


class ReplayedMoELayer(MoELayer):
    """Experts that are computed again in the backward pass (``recompute_modules`` moe) by the choice of the forward pass."""

    moe_layer_recompute: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.transformer_impl == "local" and type(self.token_dispatcher) is MoEAlltoAllTokenDispatcher:
            self.token_dispatcher.__class__ = SyncFreeDispatcher  # Megatron names its dispatchers itself; this one has the same state
        elif type(self.token_dispatcher) is MoEAllGatherTokenDispatcher:
            self.token_dispatcher.__class__ = PaddedAllGatherDispatcher

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        choice, tokens = self.router.router_replay, self.router.tokens
        if (choice is None and tokens is None) or not self.moe_layer_recompute:
            return super().forward(hidden_states, *args, **kwargs)

        def compute(given: Tensor) -> Tensor:
            self.router.router_replay, self.router.tokens, self.moe_layer_recompute = choice, tokens, False
            try:
                output, _ = super(ReplayedMoELayer, self).forward(given, *args, **kwargs)
            finally:
                self.moe_layer_recompute = True
            assert isinstance(output, Tensor)
            return output

        return tensor_parallel.checkpoint(compute, False, hidden_states), None


def stage_routing(batch: PackedBatch, given: ModelInput, architecture: Architecture, record: bool) -> StageRouting | None:
    """Returns what the routers of this rank do with a micro-batch; None where they choose by themselves and no record is wanted.

    Args:
        given: the micro-batch as the layers see it. record: whether the choices are to be kept.
    """
    if batch.routing is None and batch.experts is None and not record:
        return None
    device, choices = given.tokens.device, batch.routing or {}
    if batch.routing is None and batch.experts is not None:
        group = parallel_state.get_tensor_model_parallel_group()
        own = given.own(batch.experts.to(device), -1).chunk(group.size())[group.rank()]
        numbers = [index + 1 for index in range(architecture.num_layers) if architecture.is_moe_layer(index)]
        choices = {number: own[:, place] for place, number in enumerate(numbers)}
    return StageRouting({layer: chosen.to(device, non_blocking=True) for layer, chosen in choices.items()}, {} if record else None)
