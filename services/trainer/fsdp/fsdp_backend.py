"""transformers' models under FSDP2 as the trainer's backend (``trainer_backend = "torch"``)."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.backend import Backend, ScheduledOptimizer, TrainerSettings, adam
from services.trainer.fsdp import all_ranks, sharded_passes
from services.trainer.fsdp.model import FsdpModel, build, sharded
from services.trainer.fsdp.shards import is_first_copy, local
from services.trainer.parallel import runtime
from services.trainer.parallel.runtime import anywhere, deadline, device
from shared.config.trainer_section import LearningRateSchedule, TrainerSection
from shared.model.families import read_architecture


class FsdpOptimizer(ScheduledOptimizer):
    """Adam with decoupled weight decay, of matrices only, as Megatron's; the biases of stacked experts are none.

    Attributes:
        moments: of the parameters that train, by name: this rank's shards of both, float32.
    """

    def __init__(self, model: FsdpModel, trainer: TrainerSection, schedule: LearningRateSchedule) -> None:
        super().__init__(trainer, schedule)
        self._split = model.split
        self._parameters = {name: one for name, one in model.named_parameters().items() if one.requires_grad}
        self.moments = {name: (torch.zeros_like(local(one)), torch.zeros_like(local(one))) for name, one in self._parameters.items()}

    def reset_moments(self) -> None:
        self.steps = 0
        for moments in self.moments.values():
            torch._foreach_zero_(list(moments))

    def sharded_state(self, model: FsdpModel, loading: bool, steps: int) -> tuple[dict[str, Any], dict[str, Callable[[Any], None]]]:
        held = [(name, one) for name, one in self._parameters.items() if local(one).numel()]
        kinds = (("exp_avg", 0), ("exp_avg_sq", 1))
        state = dict(sharded(f"optimizer.{kind}", name, one, self.moments[name][index]) for name, one in held for kind, index in kinds)
        return {"dense": state}, {}  # what is read is read in place

    def live_tensors(self, model: FsdpModel) -> Iterator[tuple[Tensor, bool]]:
        yield from ((moment, True) for moments in self.moments.values() for moment in moments)

    def weights_loaded(self) -> None:
        """Does nothing: the shards are the main weights."""

    def zero_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def update(self) -> tuple[float, str | None]:
        held = {name: one for name, one in self._parameters.items() if local(one).numel()}
        # zeros where no token has used a parameter
        gradients = {name: torch.zeros_like(local(one)) if one.grad is None else local(one.grad) for name, one in held.items()}
        self._split.complete(gradients, self._parameters)
        norm = _norm([gradient for name, gradient in gradients.items() if is_first_copy(self._parameters[name])])
        if anywhere(not math.isfinite(norm)):
            return norm, f"gradient norm is {norm}"
        if gradients and self.trainer.clip_grad > 0 and (share := self.trainer.clip_grad / (norm + 1e-6)) < 1:
            torch._foreach_mul_(list(gradients.values()), share)
        for decays in (True, False):
            self._step({name: one for name, one in gradients.items() if decays == (one.dim() > 1 and not name.endswith("bias"))}, decays)
        self.steps += 1
        self.updates += 1
        return norm, None

    def _step(self, gradients: Mapping[str, Tensor], decays: bool) -> None:
        trainer = self.trainer
        group = {
            "step": self.steps + 1,
            "lr": self.lr,
            "betas": (trainer.adam_beta1, trainer.adam_beta2),
            "eps": trainer.adam_eps,
            "weight_decay": trainer.weight_decay if decays else 0.0,
        }
        if gradients:
            states = [dict(zip(("exp_avg", "exp_avg_sq"), self.moments[name], strict=True)) for name in gradients]
            adam(group, [local(self._parameters[name]) for name in gradients], list(gradients.values()), states)


def _norm(gradients: list[Tensor]) -> float:
    """Returns the L2 norm of the whole gradient. A collective of all ranks. ``gradients``: this one's shards; no other rank gives them."""
    squares = torch.zeros((), dtype=torch.float32, device=device())
    for norm in torch._foreach_norm(gradients) if gradients else ():
        squares += norm.float().square().to(device())
    dist.all_reduce(squares)
    return float(squares.sqrt())


def create(settings: TrainerSettings, hf_dir: Path, random: bool, initialized: Callable[[], None] | None) -> Backend:
    """Makes this rank's shards of a model; the arguments are those of `services.trainer.actor.Actor.create`."""
    trainer = settings.trainer
    for problem in trainer.torch_problems():
        raise problem
    architecture = read_architecture(hf_dir, backend="torch")
    runtime.start(settings.layout, trainer.seed, trainer.collective_timeout, all_ranks)
    if initialized is not None:
        initialized()
    model = build(settings, hf_dir, architecture, random)
    with deadline("the making of the optimizer"):
        optimizer = FsdpOptimizer(model, trainer, settings.schedule)
    return Backend(model, optimizer, sharded_passes, "the torch backend computes whole sequences", dist.get_world_size() == 1)
