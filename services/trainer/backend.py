"""The seam between the training and what computes it: Megatron-Core, or transformers' models under FSDP2.

A backend is a module whose function ``create`` makes a `Backend`. Its model is a `TrainedModel`, which
`services.trainer.actor.Actor`, pushes, exports, checkpoints and frozen copies work on. What ranks of either share is in
`services.trainer.parallel`; nothing outside a backend's folder imports that backend.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from services.trainer.parallel.gather_plan import GatherPlan
from services.trainer.parallel.trained_model import TrainedModel
from services.trainer.scheduled_optimizer import ScheduledOptimizer

# trainer.trainer_backend → the module that makes the backend. Only one of them is imported: the other one's imports take seconds
MODULES = {"megatron": "services.trainer.megatron.megatron_backend", "torch": "services.trainer.fsdp.fsdp_backend"}
PLANS = {"megatron": "services.trainer.megatron.hf_conversion", "torch": "services.trainer.fsdp.shard_gathering"}


def gather_plan(model: TrainedModel, apart: bool = False) -> GatherPlan:
    """Returns what gathers a model's weights under Hugging Face's names. A collective of all ranks.

    Args:
        apart: over groups of its own, for exports that run beside the training.
    """
    plan: GatherPlan = import_module(PLANS[model.backend or "megatron"]).plan_of(model, apart)
    return plan


class Passes(Protocol):
    """The functions of a backend's module ``passes``; all are collectives of the ranks that share a model."""

    def log_probs(self, model: Any, batches: Any, temperature: float, recorded: Any = None) -> list[Tensor]: ...

    def values(self, model: Any, batches: Any) -> list[Tensor]: ...

    def balanced_step(self, model: Any, batches: Any) -> Any: ...

    def forward_backward(
        self, model: Any, batches: Any, loss_fn: Any, temperature: float, need_entropy: bool, balanced: Any = None
    ) -> tuple[float, dict[str, float]]: ...

    def loss_alone(self, model: Any, batch: Any, loss_fn: Any, temperature: float, need_entropy: bool) -> float | None: ...


@dataclass(frozen=True)
class Backend:
    """One role's model in a backend.

    Args:
        model, passes: see `services.trainer.backend`. unshared: why beginnings of sequences are not computed once; None where they are.
        independent: whether a data-parallel rank can compute a loss without the others.
        finish_step: is called after an optimizer step with what ``balanced_step`` had made.
    """

    model: TrainedModel
    optimizer: ScheduledOptimizer
    passes: Passes
    unshared: str | None
    independent: bool
    finish_step: Callable[[Any], None] = lambda _: None
