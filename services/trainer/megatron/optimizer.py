"""Megatron's optimizer (distributed or not), its Adam, and an update that checks the gradient before it changes anything."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import megatron.core.optimizer.distrib_optimizer as distributed_optimizer
import torch
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor
from torch.optim.adamw import adamw

from services.trainer.megatron.gpt_model import MegatronModel, laid_over
from services.trainer.megatron.precision_adam import PrecisionAdam, arm, precision_adam, without_keeping
from services.trainer.megatron.runtime import anywhere
from shared.config import optimizer_state
from shared.config.learning_rate import LearningRateSchedule
from shared.config.optimizer_state import OptimizerState
from shared.config.trainer_section import TrainerSection


class Adam(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with the interface and state of Apex' and Transformer Engine's ``FusedAdam``.

    The number of updates is in the parameter group, not beside each parameter. Megatron's distributed optimizer reloads
    a ``torch.optim.AdamW`` wrongly without an error: all parameters come to share one ``step`` tensor, which every one of
    them then increments. An optimizer of this shape takes the code path that GPUs with either library take.

    Args:
        params: parameters or groups. lr, weight_decay, betas, eps: as in ``torch.optim.AdamW``.
        adam_w_mode: must be true; the name is ``FusedAdam``'s.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("only decoupled weight decay (AdamW) is implemented")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "bias_correction": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient. ``closure`` is not supported."""
        if closure is not None:
            raise ValueError("closures are not supported")
        for group in self.param_groups:
            if not group["params"]:
                continue  # as FusedAdam: an empty group does not count
            group["step"] = int(group.get("step", 0)) + 1
            parameters = [p for p in group["params"] if p.grad is not None and p.numel()]
            if not parameters:
                continue
            for parameter in parameters:
                self.initialize_state(parameter)
            beta1, beta2 = group["betas"]
            adamw(
                parameters,
                [p.grad for p in parameters],
                [self.state[p]["exp_avg"] for p in parameters],
                [self.state[p]["exp_avg_sq"] for p in parameters],
                [],
                list(torch.full((len(parameters),), float(group["step"] - 1), device=parameters[0].device).unbind()),
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def initialize_state(self, parameter: Tensor) -> None:
        """Makes zero moments for parameters that have none."""
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def register_adam() -> None:
    """Gives Megatron :class:`Adam` where neither Transformer Engine nor Apex provides a ``FusedAdam``. Idempotent."""
    if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        return
    megatron_optimizer.Adam = distributed_optimizer.Adam = Adam
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed_optimizer.HAVE_APEX_OR_TE = True
    distributed_optimizer.USING_APEX_OPTIMIZER = True


class Optimizer:
    """Adam over float32 main weights, its moments split over the data-parallel ranks if so configured.

    Args:
        model: loaded; in bfloat16 the main weights are copied from it now. overrides: fields of Megatron's OptimizerConfig as given.
    """

    def __init__(self, model: MegatronModel, trainer: TrainerSection, schedule: LearningRateSchedule, overrides: Mapping[str, Any]) -> None:
        register_adam()
        self.trainer, self.schedule, self.updates = trainer, schedule, 0
        bfloat16 = model.config.params_dtype == torch.bfloat16
        for problem in optimizer_state.problems(overrides, trainer.train_dtype, trainer.use_distributed_optimizer):
            raise problem
        keeping = OptimizerState.of(overrides)
        config = arm(
            laid_over(
                OptimizerConfig,
                {
                    "optimizer": "adam",
                    "lr": schedule.lr,
                    "weight_decay": trainer.weight_decay,
                    "adam_beta1": trainer.adam_beta1,
                    "adam_beta2": trainer.adam_beta2,
                    "adam_eps": trainer.adam_eps,
                    "clip_grad": trainer.clip_grad,
                    "bf16": bfloat16,
                    "params_dtype": model.config.params_dtype,
                    "use_distributed_optimizer": trainer.use_distributed_optimizer,
                    "log_num_zeros_in_grad": False,
                },
                without_keeping(overrides),
                "optimizer",
            ),
            keeping,
        )
        with precision_adam(keeping):
            self.megatron: ChainedOptimizer = get_megatron_optimizer(config, list(model.chunks), use_gloo_process_groups=False)
        for part in self.parts().values():
            if isinstance(part.optimizer, PrecisionAdam):
                part._copy_model_params_to_main_params = part.optimizer.renew_main
            part.init_state_fn(part.optimizer, part.config)  # saving before the first update needs moments, as loading does

    @property
    def lr(self) -> float:
        """Returns the learning rate of the next update."""
        return self.schedule.at(self.updates)

    def reset(self, schedule: LearningRateSchedule) -> None:
        """Starts over with zero moments at the beginning of ``schedule``. The float32 main weights keep their precision."""
        self.schedule, self.updates = schedule, 0
        self.reset_moments()

    def reset_moments(self) -> None:
        """Zeroes Adam's moments and its count of updates, which corrects their bias; the schedule goes on."""
        for part in self.parts().values():
            for group in part.optimizer.param_groups:
                group.pop("step", None)
            for state in part.optimizer.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()

    def resume(self, schedule: LearningRateSchedule, updates: int) -> None:
        """Takes a loaded checkpoint's schedule, at the position that it had reached."""
        self.schedule, self.updates = schedule, updates

    def update(self) -> tuple[float, str | None]:
        """Applies the gradients that the backward passes have left. This is a collective of all ranks.

        A gradient whose norm is not finite changes nothing: neither weights, nor moments, nor the schedule's position.

        Returns:
            The L2 norm of the whole gradient before clipping; and why nothing was changed, or None.
        """
        optimizer = self.megatron
        optimizer.prepare_grads()
        grad_norm = float(optimizer.get_grad_norm())
        if anywhere(not math.isfinite(grad_norm)):
            return grad_norm, f"gradient norm is {grad_norm}"
        for part in optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters and self.trainer.clip_grad > 0:
                decoupled = isinstance(part.optimizer, PrecisionAdam)
                clip_grad_by_total_norm_fp32(parameters, self.trainer.clip_grad, grad_norm, use_decoupled_grad=decoupled)
        for group in optimizer.param_groups:
            group["lr"] = self.lr
            group["weight_decay"] = self.trainer.weight_decay * group["wd_mult"]
        optimizer.step_with_ready_grads()
        self.updates += 1
        return grad_norm, None

    def zero_gradients(self) -> None:
        """Zeroes the gradients before the backward passes. Without a distributed optimizer the parameters' gradients *are* the model's
        buffers after an update, and the next backward pass would add each buffer to itself."""
        self.megatron.zero_grad()

    def parts(self) -> dict[str, Any]:
        """Returns Megatron's optimizers of this rank by what they update: ``dense`` and, where the rank has some, ``experts``."""
        held = [part for part in self.megatron.chained_optimizers if not part.is_stub_optimizer]
        return dict(zip(("dense", "experts")[: len(held)], held, strict=True))
