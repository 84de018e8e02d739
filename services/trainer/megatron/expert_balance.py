"""Losses that spread tokens over the experts, and the routers' biases that do so without one.

The formulas are Megatron's. What they count differs: tokens of sequences that train, not padding, and a micro-batch weighs its share of the
whole optimizer step, as in a loss function's weights. The layout changes nothing then, nor does packing, but for what the losses are:
``aux_loss`` looks at the balance of a micro-batch, ``global_aux_loss`` at that of all micro-batches of the step so far, of all ranks.

With the scores s [T, E] of T tokens, k experts a token, and the tokens c [E] that the k largest scores send to each, the loss of balance
(Fedus et al. 2021) is E / k * sum_e(mean_t(s_te) * c_e / T).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from shared.runtime.errors import ConfigError

# Kind of loss → its metric: the mean over layers, before the coefficient
METRICS = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}


@dataclass(frozen=True)
class Balancing:
    """What a run asks for.

    Args:
        coefficients: by kind of loss, above zero. bias_rate: added to the bias of an expert with too few tokens after each step, and taken
            from that of one with too many.
    """

    coefficients: dict[str, float]
    bias_rate: float = 0.0

    @classmethod
    def of(cls, config: TransformerConfig, *, adapted: bool = False) -> "Balancing | None":
        """Returns what a configuration asks for; None where that is nothing.

        Args:
            adapted: whether only adapters are trained.

        Raises ConfigError: a rate for biases that the model has not, or that adapters cannot carry.
        """
        if config.num_moe_experts is None:
            return None
        kinds, given = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
        several = kinds if isinstance(kinds, list) else [kinds]
        each = given if isinstance(given, list) else [given]
        losses = dict(zip(several, each, strict=True)) | {"z_loss": config.moe_z_loss_coeff or 0.0}
        rate = float(config.moe_router_bias_update_rate)
        if rate and not config.moe_router_enable_expert_bias:
            raise ConfigError("trainer.megatron.moe_router_bias_update_rate", rate, "0: the model's routers have no bias")
        if rate and adapted:
            raise ConfigError("trainer.megatron.moe_router_bias_update_rate", rate, "0 with lora_rank: an adapter holds no biases")
        found = cls({kind: float(losses[kind]) for kind in METRICS if losses.get(kind, 0.0) > 0}, rate)
        return found if found.coefficients or rate else None


@dataclass
class BalancedStep:
    """What this rank's routers find in one optimizer step.

    Args:
        balancing: what is asked for. tokens, sequences: of the step, over all micro-batches and data-parallel ranks.

    Attributes:
        chosen: number of a layer, from 1 → float32 [E], tokens that went to each expert. seen: likewise float32 [E + 1], tokens by their
            scores alone and their number, of all ranks. losses: sums over layers and micro-batches, by kind.
    """

    balancing: Balancing
    tokens: float
    sequences: float
    chosen: dict[int, Tensor] = field(default_factory=dict)
    seen: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def begun(cls, balancing: Balancing, lengths: Sequence[Sequence[int]], device: torch.device) -> "BalancedStep":
        """Counts the step. A collective of the data-parallel ranks. ``lengths``: by micro-batch, of the sequences that train."""
        own = [float(sum(map(sum, lengths))), float(sum(map(len, lengths)))]
        total = torch.tensor(own, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=False))
        tokens, sequences = total.tolist()
        return cls(balancing, max(tokens, 1.0), max(sequences, 1.0))

    def averages(self, layers: int, device: torch.device) -> dict[str, float]:
        """Returns the losses before their coefficients, means over ``layers``. A collective of all ranks."""
        kinds = sorted(self.balancing.coefficients)
        sums = torch.stack([torch.zeros((), device=device), *(self.losses.get(kind, torch.zeros((), device=device)) for kind in kinds)])
        dist.all_reduce(sums)
        return {METRICS[kind]: value / layers for kind, value in zip(kinds, sums.tolist()[1:], strict=True)}


@dataclass(frozen=True)
class BalancedTokens:
    """The tokens of one micro-batch on this rank that are to be balanced.

    Args:
        step: they are a part of. members: float32 [S, U], 1 where a token of this rank's routers is of a sequence that trains.
        lengths: float32 [S], whole lengths of these.
    """

    step: BalancedStep
    members: Tensor
    lengths: Tensor


def trained_lengths(cu_seqlens: Tensor, loss_mask: Tensor) -> tuple[list[int], list[int]]:
    """Returns numbers and lengths of a pack's sequences that train a token. ``cu_seqlens``: integers [S + 1]. ``loss_mask``: [T]."""
    starts = cu_seqlens.tolist()
    trained = torch.cat([loss_mask.new_zeros(1), loss_mask.cumsum(0)])[cu_seqlens.long()].diff().tolist()
    numbers = [number for number, count in enumerate(trained) if count > 0]
    return numbers, [starts[number + 1] - starts[number] for number in numbers]


class BalancedRouter(TopKRouter):
    """Megatron's router, with losses that leave padding out.

    Attributes:
        tokens: of the call, which the layer is given; None: there is nothing to balance.
    """

    tokens: BalancedTokens | None = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns probabilities and choice [U, E] of logits [U, 1, E]."""
        given = self.tokens
        if given is None or not torch.is_grad_enabled():
            probs, chosen = super().routing(logits, padding_mask)
            return probs, chosen
        loss = self._loss(logits.view(-1, logits.size(-1)), given)
        probs, chosen = super().routing(logits if loss is None else _WithLoss.apply(logits, loss), padding_mask)
        counts = (chosen & (given.members.sum(0) > 0)[:, None]).sum(0).float()
        given.step.chosen[self.layer_number] = given.step.chosen.get(self.layer_number, 0) + counts
        return probs, chosen

    def is_aux_loss_enabled(self) -> bool:
        """Returns whether Megatron adds its own losses: never."""
        return False

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        return logits

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Counts nothing for Megatron's own update of the biases, which then changes nothing; `update_biases` does."""

    def _loss(self, logits: Tensor, given: BalancedTokens) -> Tensor | None:
        """Returns this rank's part of the weighted losses of logits [U, E]."""
        step, parts = given.step, dict[str, Tensor]()
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        coefficients, group = step.balancing.coefficients, self.tp_cp_group
        if "z_loss" in coefficients:
            parts["z_loss"] = (wide.logsumexp(-1).square() * given.members.sum(0)).sum() / step.tokens
        if coefficients.keys() - {"z_loss"}:
            chosen, scores = compute_routing_scores_for_aux_loss(wide, self.topk, self.score_function)
            sums, counts = given.members @ scores.float(), given.members @ chosen.float()
            shared = counts.clone()
            if group.size() > 1 and len(shared):
                dist.all_reduce(shared, group=group)
            scale, lengths = self.num_experts / self.topk, given.lengths[:, None]
            if "seq_aux_loss" in coefficients:
                parts["seq_aux_loss"] = scale * (sums / lengths * shared / lengths).sum() / step.sequences
            if "aux_loss" in coefficients:
                parts["aux_loss"] = scale * (sums.sum(0) * shared.sum(0)).sum() / lengths.sum().clamp(min=1) / step.tokens
            if "global_aux_loss" in coefficients:
                parts["global_aux_loss"] = scale * (sums.sum(0) * self._shares(counts, given)).sum() / step.tokens
        for kind, value in parts.items():
            step.losses[kind] = step.losses.get(kind, 0) + value.detach().float()
        return sum((coefficients[kind] * value for kind, value in parts.items()), torch.zeros((), device=logits.device)) if parts else None

    def _shares(self, counts: Tensor, given: BalancedTokens) -> Tensor:
        """Returns each expert's tokens, of all ranks and micro-batches so far, for each token: [E]. ``counts``: this rank's, [S, E]."""
        own = torch.cat([counts.sum(0), given.members.sum()[None]])
        dist.all_reduce(own, group=self.tp_dp_cp_group)
        seen = given.step.seen[self.layer_number] = given.step.seen.get(self.layer_number, 0) + own
        return seen[:-1] / seen[-1].clamp(min=1)


class _WithLoss(torch.autograd.Function):
    """Hands its first argument on; whoever asks for its gradient gets that of the second, a scalar, too."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.detach()
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(ctx.like)


def routers(modules: Sequence[torch.nn.Module]) -> Iterator[BalancedRouter]:
    """Yields the routers of this rank's parts of a model, in the order of the layers."""
    for chunk in modules:
        yield from (module for module in chunk.modules() if isinstance(module, BalancedRouter))


@torch.no_grad()
def update_biases(modules: Sequence[torch.nn.Module], step: BalancedStep) -> None:
    """Moves the routers' biases towards experts that the step has sent too few tokens (Wang et al. 2024). A collective of all ranks."""
    found = list(routers(modules)) if step.balancing.bias_rate else []
    if not found:
        return
    counts = torch.stack([step.chosen.get(router.layer_number, torch.zeros_like(router.expert_bias)) for router in found])
    dist.all_reduce(counts, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
    for router, each in zip(found, counts, strict=True):
        router.expert_bias.add_(torch.sign(each.mean() - each), alpha=step.balancing.bias_rate)
