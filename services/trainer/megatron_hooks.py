"""slime's hooks around Megatron: when the process groups are there, before log-probs are computed, and before each optimizer step.

Every rank calls them, at the same places: what they do in collectives has to be the same everywhere. A hook that raises ends training.
"""

from services.trainer.actor import Actor
from services.trainer.megatron.optimizer import Optimizer
from services.trainer.objective.custom_objective import CustomFunctions

INIT = "trainer.custom_megatron_init_path"
BEFORE_LOG_PROBS = "trainer.custom_megatron_before_log_prob_hook_path"
BEFORE_STEP = "trainer.custom_megatron_before_train_step_hook_path"


class SchedulerView:
    """The learning rate's schedule as a hook gets it, in the place of Megatron's ``OptimizerParamScheduler``.

    ``num_steps``: optimizer steps so far.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def num_steps(self) -> int:
        return self._optimizer.updates

    def get_lr(self, param_group: object = None) -> float:
        """Returns the learning rate of the next step, which is the same for all parameter groups."""
        return self._optimizer.lr


class MegatronHooks:
    """Calls the hooks that a run names; the others do nothing. Each raises HookFailed."""

    def __init__(self, custom: CustomFunctions) -> None:
        self._custom = custom

    def initialized(self) -> None:
        """Calls ``f(args)``: the process groups are there, the model is not."""
        if INIT in self._custom:
            self._custom.call(INIT, self._custom.args)

    def before_log_probs(self, actor: Actor, prefix: str) -> None:
        """Calls ``f(args, model, store_prefix)``. ``prefix``: ``""`` for the policy, ``ref_``, ``teacher_``, whose weights are in place."""
        if BEFORE_LOG_PROBS in self._custom:
            actor.model.train(False)
            self._custom.call(BEFORE_LOG_PROBS, self._custom.args, actor.model.chunks, prefix)

    def before_step(self, actor: Actor, step: int, index: int) -> None:
        """Calls ``f(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)``, once gradients are zero. ``index``: of the
        optimizer step in training step ``step``."""
        if BEFORE_STEP in self._custom:
            optimizer = actor.optimizer
            parts = (actor.model.chunks, optimizer.megatron, SchedulerView(optimizer))
            self._custom.call(BEFORE_STEP, self._custom.args, step, index, *parts)
