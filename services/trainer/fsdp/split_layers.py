"""Tensor parallelism by transformers' plans (``base_model_tp_plan``), and experts that ranks share.

Between split matrices all ranks of a group have the same hidden states. Of what follows the layers, each computes its own part of the
tokens, so that the vocabulary's work is split as well: norm, output layer and log-probs come behind `own_part`, and every parameter that is
not within a layer gets the gradient of each token from one rank. Gradients of a parameter within layers that all ranks have, and each uses
for its own heads, are summed by `SplitLayers.complete`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from services.trainer.fsdp import all_ranks
from services.trainer.fsdp.all_ranks import copied, own_part, share, summed
from services.trainer.fsdp.experts import Exchange, experts_of
from services.trainer.fsdp.shards import Split
from shared.model.parallel_layout import ParallelLayout
from shared.runtime.errors import ConfigError

SIZE = "trainer.tensor_model_parallel_size"
WHOLE = {"colwise_gather_output", "rowwise_split_input"}  # entries of plans whose modules stay whole here: nothing needs them split
OF_EXPERTS = {"moe_tp_experts", "packed_colwise", "packed_rowwise", "grouped_gemm", "ep_router"}
PARTIAL = "replicated_with_grad_allreduce"
APART = 0.1  # of gradients that are to be alike, by their mean: far beyond rounding


@dataclass
class SplitLayers:
    """What ranks share within a model's layers.

    Args:
        splits: of parameters, by transformers' names. partial: names of whole ones whose gradients are partial on each rank.
        exchange: of experts, or None. cuts: whether the tokens behind the layers are cut now: their number is a multiple of the ranks'.
        compared: whole parameters whose gradients, other than zeros, were found alike on all ranks of a group.
    """

    splits: dict[str, Split] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    exchange: Exchange | None = None
    cuts: bool = False
    compared: set[str] = field(default_factory=set)

    def complete(self, gradients: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> None:
        """Completes gradients, by transformers' names, in place. A collective of the ranks that share matrices.

        FSDP2 has taken the mean over the ranks of a parameter's mesh of losses that were multiplied by the number of all ranks.
        """
        for name, gradient in gradients.items():
            if (shared := dist.get_world_size() // parameters[name].device_mesh.size()) > 1:
                gradient.div_(shared)
        group = all_ranks.group("tensor")
        if group is None:
            return
        for name in sorted(self.partial & gradients.keys()):
            dist.all_reduce(gradients[name], group=group)
        whole = sorted(name for name in gradients if ".layers." in name and name not in self.splits)
        self._compare({name: gradients[name] for name in whole if name not in self.compared}, group)

    def _compare(self, gradients: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """Raises ConfigError: a parameter that all ranks have whole has another gradient on each, which its plan leaves out."""
        for name, gradient in gradients.items():
            mean = summed(gradient, group) / group.size()
            apart = torch.stack([(gradient - mean).norm(), mean.norm()])
            dist.all_reduce(apart, dist.ReduceOp.MAX, group=group)
            if apart[0] > APART * apart[1]:
                raise ConfigError(SIZE, group.size(), f"1; the model's plan does not say that gradients of {name} are partial")
            if apart[1] > 0:
                self.compared.add(name)


def split(model: Any, layout: ParallelLayout) -> SplitLayers:
    """Cuts a model's layers into the pieces of this rank. Raises ConfigError: the plan does not say how, or the sizes do not divide."""
    found, experts = SplitLayers(), experts_of(model)
    tensor, expert = all_ranks.group("tensor"), all_ranks.group("expert")
    if expert is not None and not experts:
        raise ConfigError("trainer.expert_model_parallel_size", layout.expert, f"1; {type(model).__name__} has no experts in one tensor")
    group = tensor or expert
    if group is not None and experts:
        found.exchange = Exchange(group, alike=tensor is not None)
        size = SIZE if tensor is not None else "trainer.expert_model_parallel_size"
        for name, module in experts.items():
            module.exchange = found.exchange
            for each, _ in list(module.named_parameters()):
                _cut(found, module, each, f"{name}.{each}", 0, group, size)
    if tensor is not None:
        _split_matrices(found, model, tensor)
        base = model.base_model
        strange = [name for name, _ in base.named_parameters() if not re.match(r"layers\.|norm\.|embed_tokens\.", name)]
        if strange:
            raise ConfigError(SIZE, tensor.size(), f"1; {type(model).__name__} has parameters beside its layers: {strange[:3]}")
        model.get_input_embeddings().register_forward_hook(lambda _, __, output: share(output, tensor))
        base.norm.register_forward_pre_hook(lambda _, given: (own_part(given[0][0], tensor)[None], *given[1:]) if found.cuts else None)
    return found


def _entries(model: Any) -> Iterator[tuple[str, Any, str]]:
    """Yields modules and parameters of the base model that its plan names, by their names in the model, with the plan's entry."""
    base = model.base_model
    plan = getattr(base.config.get_text_config(), "base_model_tp_plan", None)
    if not plan:
        raise ConfigError(SIZE, "more than 1", f"1; transformers has no plan of it for {type(model).__name__}")
    things: Iterable[tuple[str, Any]] = [*base.named_modules(), *base.named_parameters()]
    for name, thing in things:
        entry = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if entry is not None:
            yield f"{model.base_model_prefix}.{name}", thing, entry


def _split_matrices(found: SplitLayers, model: Any, group: dist.ProcessGroup) -> None:
    sharing, heads = _Sharing(group), model.config.get_text_config().num_key_value_heads
    if heads % group.size():
        raise ConfigError(SIZE, group.size(), f"a divisor of the model's {heads} key/value heads")
    of_experts = tuple(f"{name}." for name in experts_of(model))
    for name, thing, entry in list(_entries(model)):
        linear = isinstance(thing, torch.nn.Linear)
        if f"{name}.".startswith(of_experts):
            continue
        if entry in ("colwise", "rowwise") and linear:
            _split_linear(found, thing, name, entry == "colwise", sharing)
        elif entry == "colwise" and isinstance(thing, torch.nn.Parameter):
            owner, _, each = name.rpartition(".")
            _cut(found, model.get_submodule(owner), each, name, 0, group, SIZE)
        elif entry == PARTIAL:
            found.partial |= {f"{name}.{each}" for each, _ in thing.named_parameters()}
        elif entry not in WHOLE | OF_EXPERTS:
            raise ConfigError(
                SIZE, group.size(), f"1; the plan of {type(model).__name__} has {entry!r} for {name}, which is not known here"
            )


class _Sharing:
    """Hands a tensor to the split matrices that are given the same one, with one sum of their gradients."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, _: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._last is None or self._last[0] is not given[0]:
            self._last = given[0], copied(given[0], self.group)
        return (self._last[1], *given[1:])


def _split_linear(found: SplitLayers, layer: Any, name: str, by_rows: bool, sharing: _Sharing) -> None:
    if by_rows:
        for each, _ in list(layer.named_parameters()):
            _cut(found, layer, each, f"{name}.{each}", 0, sharing.group, SIZE)
        layer.register_forward_pre_hook(sharing)
    else:
        _cut(found, layer, "weight", f"{name}.weight", 1, sharing.group, SIZE)
        layer.forward = partial(_rowwise, layer, sharing.group)


def _rowwise(module: Any, group: dist.ProcessGroup, given: Tensor) -> Tensor:
    output = summed(F.linear(given, module.weight), group)
    return output if module.bias is None else output + module.bias


def _cut(found: SplitLayers, module: Any, each: str, name: str, dimension: int, group: dist.ProcessGroup, size: str) -> None:
    """Puts this rank's piece into a parameter's place."""
    whole = getattr(module, each)
    count, left = divmod(whole.size(dimension), group.size())
    if left:
        raise ConfigError(size, group.size(), f"a divisor of the {whole.size(dimension)} {'columns' if dimension else 'rows'} of {name}")
    piece = whole.detach().narrow(dimension, group.rank() * count, count).clone()
    setattr(module, each, torch.nn.Parameter(piece, whole.requires_grad))
    found.splits[name] = Split(dimension, group.size())
