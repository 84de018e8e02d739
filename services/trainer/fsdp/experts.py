"""Experts of transformers' models: grouped matrix products of rows in the order of their experts, which ranks may share.

transformers' own way to order rows and bring them back takes index kernels whose backward passes sort; here both are sums of known rows.
Ranks that share experts have whole ones, neighbours neighbouring ones. In expert parallelism each trains tokens of its own: they are
gathered, each rank's experts take theirs, and what they give is summed and handed back. In tensor parallelism all have the same tokens.

Routing is replayed here: tokens go through experts that were chosen before, by the engine or by an earlier pass. Families choose in code of
their own, and all by PyTorch's ``topk`` over the scores of all experts. Within a module that has experts, what that finds is replaced. Only
the choice is: weights come from the present router's scores, so that gradients reach it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate, _grouped_linear

from services.trainer.fsdp.all_ranks import copied, gathered, own_sum, rows_of_all, summed
from services.trainer.fsdp.fused_layers import weighted_gate
from services.trainer.packing import PackedBatch
from services.trainer.parallel.expert_rows import rows_of_tokens, sums_of_rows
from services.trainer.parallel.runtime import device
from shared.model.architecture import Experts
from shared.runtime.errors import ConfigError

NAME, REPLAY = "packed", "trainer.use_routing_replay"


@dataclass
class Exchange:
    """How ranks share a model's experts.

    Args:
        group: of these ranks. alike: whether they have the same tokens. tokens: of the rank with most in this pass, where they have not.
    """

    group: dist.ProcessGroup
    alike: bool
    tokens: int = 0

    def agree(self, tokens: int) -> None:
        """Makes known how many tokens ranks have in the next pass. A collective of them."""
        if not self.alike:
            most = torch.tensor([tokens], device=device())
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
            self.tokens = int(most.item())

    def given(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tokens that this rank's experts may take, their choices of experts, and the weights of these."""
        if self.alike:
            return copied(hidden, self.group), chosen, copied(weights, self.group)
        missing = (0, 0, 0, self.tokens - len(hidden))
        hidden, weights = (rows_of_all(F.pad(tensor, missing), self.group) for tensor in (hidden, weights))
        return hidden, gathered(F.pad(chosen, missing, value=-1), self.group), weights

    def summed(self, output: Tensor, tokens: int) -> Tensor:
        """Returns what all ranks' experts give for this rank's tokens."""
        return (summed if self.alike else own_sum)(output, self.group)[:tokens]


def experts_of(model: torch.nn.Module) -> dict[str, Any]:
    """Returns the modules of experts by their names."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "_apply_gate") and hasattr(module, "down_proj")}


def installed(model: Any) -> Any:
    """Has a model's experts, if there are some, compute by `compute`. Returns the model."""
    if experts_of(model):
        model.set_experts_implementation(NAME)
    return model


def compute(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes [N, H] of tokens [N, H] by the experts that each has chosen, int64 [N, K], and their weights, [N, K]."""
    exchange: Exchange | None = getattr(self, "exchange", None)
    tokens, first = len(hidden_states), 0
    if exchange is not None:
        hidden_states, top_k_index, top_k_weights = exchange.given(hidden_states, top_k_index, top_k_weights)
        first = exchange.group.rank() * self.down_proj.size(0)
    output = _computed(self, hidden_states, top_k_index - first if first else top_k_index, top_k_weights, exchange is not None)
    return output if exchange is None else exchange.summed(output, tokens)


def _computed(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, some: bool) -> Tensor:
    """Computes what this rank's experts give. ``some``: whether other numbers than theirs are among those chosen."""
    count, (tokens, each) = module.down_proj.size(0), chosen.shape
    numbers = chosen.reshape(-1)
    taken = ((numbers >= 0) & (numbers < count)).nonzero()[:, 0] if some else None
    if taken is not None and not len(taken):  # whatever other ranks wait for in the backward pass gets gradients of zeros
        # a tensor, which is saved: a layer that computes again begins with it where the other ranks do, and exchanges with them
        zero = hidden.new_zeros(())
        return hidden * zero + (weights.sum() + sum(parameter.sum() for parameter in module.parameters())).to(hidden.dtype) * zero
    own = numbers if taken is None else numbers[taken]
    ordered, order = own.sort(stable=True)
    places = order if taken is None else taken[order]  # [rows], of each row in the flattened choices
    rows = torch.zeros_like(numbers).scatter_(0, places, torch.arange(len(places), device=places.device)).view(tokens, each)
    valid = None if taken is None else torch.zeros_like(numbers, dtype=torch.bool).index_fill_(0, taken, True).view(tokens, each)
    bounds = torch.arange(1, count + 1, device=ordered.device)
    ends = torch.searchsorted(ordered, bounds).int()
    given = rows_of_tokens(hidden, places // each, rows, valid)
    scale = weights.reshape(-1).index_select(0, places)[:, None]

    def product(name: str, rows: Tensor) -> Tensor:
        bias = getattr(module, f"{name}_bias")[ordered] if module.has_bias else None
        found: Tensor = _grouped_linear(rows, getattr(module, name), ends, bias, module.is_transposed)
        if (adapted := getattr(module, "adapted", {}).get(name)) is None:
            return found
        own = module.adapter
        added = [own[kind].of_groups(rows, ends) if kind in own else rows.new_zeros(len(rows), size) for kind, size in adapted.items()]
        return found + torch.cat(added, -1)

    if not module.has_gate:
        inner = module.act_fn(product("up_proj", given)) * scale
    elif type(module)._apply_gate is _default_apply_gate and isinstance(getattr(module, "act_fn", None), torch.nn.SiLU):
        inner = weighted_gate(product("gate_up_proj", given), scale)
    elif module.has_bias:
        inner = module._apply_gate(product("gate_up_proj", given))
    else:
        inner = module._apply_gate(product("gate_up_proj", given)) * scale
    output = product("down_proj", inner.to(given.dtype))
    if module.has_bias:
        output = output * scale
    return sums_of_rows(output.to(hidden.dtype), places // each, rows, valid)


ALL_EXPERTS_FUNCTIONS.register(NAME, compute)


class ReplayedChoice(TorchFunctionMode):
    """The choices of one layer.

    Attributes:
        given: int16 [tokens, experts a token] of this rank's tokens; -1: the router's own choice; None: its own everywhere. found: the
            choices made in the last pass, likewise.
    """

    def __init__(self, experts: int, chosen: int) -> None:
        super().__init__()
        self.experts, self.chosen = experts, chosen
        self.given: Tensor | None = None
        self.found: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or (args[0].size(-1), found[1].size(-1)) != (self.experts, self.chosen):
            return found
        indices = found[1] if self.given is None else torch.where(self.given >= 0, self.given.long(), found[1])
        self.found = indices.to(torch.int16)
        return args[0].gather(-1, indices), indices


class RoutingReplay:
    """The choices of all layers with experts; of a model without them there are none. ``experts``: what is known of them."""

    def __init__(self, model: Any, experts: Experts | None) -> None:
        self.layers: dict[int, ReplayedChoice] = {}
        self._active = False
        for name in experts_of(model) if experts is not None else ():
            assert experts is not None
            block, number = model.get_submodule(name.rpartition(".")[0]), re.search(r"layers\.(\d+)\.", name)
            assert number is not None
            choice = self.layers[int(number[1]) + 1] = ReplayedChoice(experts.count, experts.per_token)
            block.forward = partial(self._chosen, choice, block.forward)

    def _chosen(self, choice: ReplayedChoice, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not self._active:
            return forward(*args, **options)
        with choice:
            return forward(*args, **options)

    def begin(self, batch: PackedBatch, own: Callable[[Tensor], Tensor], record: bool) -> None:
        """Sets the choices for the next pass, also where layers are computed again. ``own``: takes this rank's rows of a tensor."""
        given: Mapping[int, Tensor] = {}
        if batch.routing is not None:
            given = batch.routing
        elif batch.experts is not None:
            given = {number: own(batch.experts[:, place]) for place, number in enumerate(self.layers)}
        self._active = record or bool(given)
        for number, choice in self.layers.items():
            choice.given, choice.found = given[number].to(device()) if number in given else None, None

    def recorded(self) -> dict[int, Tensor]:
        """Returns the choices of the last pass, in host memory. Raises ConfigError where routers chose in a way that is not known."""
        found = {number: choice.found.cpu() for number, choice in self.layers.items() if choice.found is not None}
        if len(found) < max(len(self.layers), 1):
            why = "false; this model's choices are not known: those that routers make by PyTorch's topk of experts in one tensor are"
            raise ConfigError(REPLAY, True, why)
        return found
