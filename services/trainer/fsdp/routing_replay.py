"""Replay of routing in transformers' models: tokens go through experts that were chosen before, by the engine or by an earlier pass.

Families choose in code of their own, and all by PyTorch's ``topk`` over the scores of all experts. Within a module that has experts, what
that finds is replaced. Only the choice is: weights come from the present router's scores, so that gradients reach it.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from services.trainer.fsdp.experts import experts_of
from services.trainer.packing import PackedBatch
from services.trainer.parallel.runtime import device
from shared.model.architecture import Experts


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
    """The choices of all layers with experts. ``experts``, ``chosen``: of a layer, and of a token."""

    def __init__(self, model: Any, experts: int, chosen: int) -> None:
        self.layers: dict[int, ReplayedChoice] = {}
        self._active = False
        for name in experts_of(model):
            block, number = model.get_submodule(name.rpartition(".")[0]), re.search(r"layers\.(\d+)\.", name)
            assert number is not None
            choice = self.layers[int(number[1]) + 1] = ReplayedChoice(experts, chosen)
            block.forward = partial(self._chosen, choice, block.forward)

    @classmethod
    def of(cls, model: Any, experts: Experts | None) -> "RoutingReplay | None":
        """Returns the choices of a model; None where there are no experts to choose."""
        return cls(model, experts.count, experts.per_token) if experts is not None and experts_of(model) else None

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
        """Returns the choices of the last pass, in host memory."""
        return {number: choice.found.cpu() for number, choice in self.layers.items() if choice.found is not None}

    def end(self) -> None:
        """Leaves the choice to the routers."""
        self._active = False
