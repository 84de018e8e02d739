"""Routers that send tokens to given experts, and tell where they have sent them.

An engine and a trainer that compute the same logits but for rounding send some tokens to other experts: a choice is not continuous. The
log-probs of such tokens differ by much more than rounding. So training may replay a choice: that of the engine, or that of the pass
that took the log-probs of the batch. Only the choice is replayed. Scores are the present router's, so that gradients reach it.

A choice belongs to a micro-batch and goes with the arguments of a layer's call (`PackedSequences.routing`): a layer that is computed again
in the backward pass, when other micro-batches have been through it, is called with the same arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from services.trainer.megatron.grouped_experts import SyncFreeDispatcher
from services.trainer.megatron.packed_sequences import ModelInput, StageRouting
from services.trainer.megatron.padded_allgather import PaddedAllGatherDispatcher
from services.trainer.packing import PackedBatch
from shared.model.architecture import Architecture


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
        local, padded = self.config.transformer_impl == "local", self.config.moe_router_padding_for_quantization
        if local and not padded and type(self.token_dispatcher) is MoEAlltoAllTokenDispatcher:
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


def stage_routing(
    batch: PackedBatch, given: ModelInput, architecture: Architecture, sequence_parallel: bool, record: bool
) -> StageRouting | None:
    """Returns what the routers of this rank do with a micro-batch; None where they choose by themselves and nobody asks.

    Args:
        given: the micro-batch as the layers see it. record: whether the choices are to be kept.
    """
    if batch.routing is None and batch.experts is None and not record:
        return None
    recorded: dict[int, Tensor] | None = {} if record else None
    if batch.routing is not None:
        device = given.tokens.device
        return StageRouting({layer: chosen.to(device, non_blocking=True) for layer, chosen in batch.routing.items()}, recorded)
    if batch.experts is None:
        return StageRouting({}, recorded)
    own = given.own(batch.experts.to(given.tokens.device), -1)
    if sequence_parallel:
        group = parallel_state.get_tensor_model_parallel_group()
        own = own.chunk(group.size())[group.rank()]
    numbers = [index + 1 for index in range(architecture.num_layers) if architecture.is_moe_layer(index)]
    return StageRouting({number: own[:, place] for place, number in enumerate(numbers)}, recorded)


def on_host(routing: StageRouting) -> dict[int, Tensor]:
    """Returns what a pass has recorded, in host memory."""
    return {layer: chosen.cpu() for layer, chosen in (routing.recorded or {}).items()}
