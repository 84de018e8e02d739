"""Tokens that go to their experts by an allgather, from ranks whose micro-batches differ in length; and the choice of the dispatcher."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor

from shared.model.parallel_layout import ParallelLayout
from shared.runtime.errors import ConfigError

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
