"""How an actor's model is shared among the ranks, and how it is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from services.trainer.megatron.optimizer import OptimizerSettings
from shared.config.learning_rate import DecayStyle, LearningRateSchedule
from shared.model.lora_targets import ALL_LINEAR, Lora
from shared.model.parallel_layout import ParallelLayout
from shared.model.recomputation import megatron_fields
from shared.model.trainable_parameters import FREEZE, ONLY_TRAIN, Freezing
from shared.runtime.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ActorConfig:
    """How the model is shared among the ranks, and how it is trained. Names are Megatron's.

    Args:
        use_distributed_optimizer: split the float32 weights and Adam's moments over the data-parallel ranks.
        dtype: of weights and activations, ``float32`` or ``bfloat16``; gradients and main weights are float32 always.
        lr, min_lr, lr_warmup_steps, lr_decay_steps, lr_decay_style: see :class:`LearningRateSchedule`.
        clip_grad: largest L2 norm of the gradient; 0 for no clipping.
        virtual_pipeline_model_parallel_size: model chunks of each pipeline stage, for the interleaved schedule.
        expert_tensor_parallel_size: ranks that share each expert's matrices; None for 1 where experts are distributed, else
            as many as share the other matrices.
        recompute: run every layer's forward pass again in the backward pass instead of keeping its activations; short for
            the granularity ``full`` with the method ``uniform`` over single layers. recompute_granularity,
            recompute_method, recompute_num_layers, recompute_modules: Megatron's finer choices.
        only_train_params_name_list, freeze_params_name_list: see :class:`Freezing`.
        lora_rank, lora_alpha, target_modules: see :class:`Lora`; without a rank the parameters themselves are trained.
        value_head: a critic: a map from each hidden state to one number stands in the place of the output layer.
        deterministic: the same bits in every run, at a price on GPUs; for the whole process.
        megatron: fields of Megatron's ``transformer``, ``optimizer`` and ``ddp`` configurations that are laid over what
            follows from the others; checked by :mod:`.megatron.flags`.
        timeout_seconds: how long a rank waits for the others in any collective.
        temperature: logits are divided by it before log-probabilities are taken.

    Raises:
        ConfigError: a field has no meaning by itself. What depends on the model or the world is checked by ``create``.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = True
    dtype: str = "float32"
    lr: float = 1e-6
    min_lr: float = 0.0
    lr_warmup_steps: int = 0
    lr_decay_steps: int = 0
    lr_decay_style: DecayStyle = "constant"
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    seed: int = 1234
    recompute: bool = False
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] = ()
    only_train_params_name_list: tuple[str, ...] = ()
    freeze_params_name_list: tuple[str, ...] = ()
    lora_rank: int | None = None
    lora_alpha: float = 16.0
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    value_head: bool = False
    deterministic: bool = False
    megatron: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    timeout_seconds: float = 600.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError("trainer.dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        check_temperature(self.temperature)
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"trainer.{name}", getattr(self, name), "at least 0 and below 1")
        for name in ("weight_decay", "clip_grad"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"trainer.{name}", getattr(self, name), "a finite number, at least 0")
        for name in ("adam_eps", "timeout_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"trainer.{name}", getattr(self, name), "a finite number above 0")
        unknown = sorted(self.megatron.keys() - {"transformer", "optimizer", "ddp"})
        if unknown:
            raise ConfigError("trainer.megatron", unknown[0], "transformer, optimizer or ddp")
        self.layout, self.schedule, self.recomputation  # noqa: B018 - they check their fields
        if self.lora is not None and not self.freezing.nothing:
            field = ONLY_TRAIN if self.only_train_params_name_list else FREEZE
            given = self.only_train_params_name_list or self.freeze_params_name_list
            raise ConfigError(field, list(given), "none beside trainer.lora_rank, which trains adapters and nothing else")
        if self.lora is not None and self.value_head:
            raise ConfigError("trainer.lora_rank", self.lora_rank, "none; a critic trains all of its parameters")

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(
            tensor=self.tensor_model_parallel_size,
            pipeline=self.pipeline_model_parallel_size,
            context=self.context_parallel_size,
            expert=self.expert_model_parallel_size,
            sequence_parallel=self.sequence_parallel,
            virtual_pipeline=self.virtual_pipeline_model_parallel_size,
            expert_tensor=self.expert_tensor_parallel_size,
        )

    @property
    def recomputation(self) -> dict[str, Any]:
        """Megatron's fields of what is run again in the backward pass.

        Raises:
            ConfigError: they contradict one another.
        """
        return megatron_fields(self)

    @property
    def freezing(self) -> Freezing:
        return Freezing(self.only_train_params_name_list, self.freeze_params_name_list)

    @property
    def lora(self) -> Lora | None:
        return None if self.lora_rank is None else Lora(self.lora_rank, self.lora_alpha, self.target_modules)

    @property
    def schedule(self) -> LearningRateSchedule:
        return LearningRateSchedule(self.lr, self.min_lr, self.lr_warmup_steps, self.lr_decay_steps, self.lr_decay_style)

    @property
    def optimizer(self) -> OptimizerSettings:
        return OptimizerSettings(
            schedule=self.schedule,
            weight_decay=self.weight_decay,
            adam_beta1=self.adam_beta1,
            adam_beta2=self.adam_beta2,
            adam_eps=self.adam_eps,
            clip_grad=self.clip_grad,
            use_distributed_optimizer=self.use_distributed_optimizer,
            overrides=self.megatron.get("optimizer", {}),
        )


def check_temperature(temperature: float) -> None:
    """Raises ConfigError for a temperature by which logits cannot be divided."""
    if not 0 < temperature < math.inf:
        raise ConfigError("trainer.temperature", temperature, "a finite number above 0")
