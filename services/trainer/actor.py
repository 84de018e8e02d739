"""The trainer's actor: a language model on Megatron-Core that scores tokens, trains on a loss and hands out its weights.

Every method is a collective: all ranks of the job call it, in the same order. Micro-batches are those of the caller's
data-parallel rank; ranks that share a model (tensor and pipeline parallelism) pass the same ones, and every data-parallel
rank the same number of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.trainer.megatron import checkpoint, export, passes, runtime
from services.trainer.megatron.checkpoint import latest_step
from services.trainer.megatron.export import Bucket, Exporter
from services.trainer.megatron.families import Architecture, read_architecture
from services.trainer.megatron.model import Model, build_chunks, check_divisible, transformer_config, wrap_chunks
from services.trainer.megatron.optimizer import Optimizer, OptimizerSettings
from services.trainer.megatron.passes import LossFunction
from services.trainer.megatron.runtime import ParallelLayout, deadline, together
from services.trainer.megatron.schedule import DecayStyle, LearningRateSchedule
from services.trainer.megatron.weights import load_hf
from services.trainer.packing import PackedBatch
from shared.errors import ConfigError

__all__ = ["Actor", "ActorConfig", "StepResult", "latest_step"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ActorConfig:
    """How the model is shared among the ranks, and how it is trained. Names are Megatron's.

    Args:
        use_distributed_optimizer: split the float32 weights and Adam's moments over the data-parallel ranks.
        dtype: of weights and activations, ``float32`` or ``bfloat16``; gradients and main weights are float32 always.
        lr, min_lr, lr_warmup_steps, lr_decay_steps, lr_decay_style: see :class:`LearningRateSchedule`.
        clip_grad: largest L2 norm of the gradient; 0 for no clipping.
        recompute: run every layer's forward pass again in the backward pass instead of keeping its activations.
        timeout_seconds: how long a rank waits for the others in any collective.
        temperature: logits are divided by it before log-probabilities are taken.

    Raises:
        ConfigError: a field has no meaning by itself. What depends on the model or the world is checked by ``create``.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
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
    timeout_seconds: float = 600.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError("trainer.dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        check_temperature(self.temperature)
        for field in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, field) < 1:
                raise ConfigError(f"trainer.{field}", getattr(self, field), "at least 0 and below 1")
        for field in ("weight_decay", "clip_grad"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ConfigError(f"trainer.{field}", getattr(self, field), "a finite number, at least 0")
        for field in ("adam_eps", "timeout_seconds"):
            if not 0 < getattr(self, field) < math.inf:
                raise ConfigError(f"trainer.{field}", getattr(self, field), "a finite number above 0")
        self.layout, self.schedule  # noqa: B018 - they check their fields

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(
            tensor=self.tensor_model_parallel_size,
            pipeline=self.pipeline_model_parallel_size,
            context=self.context_parallel_size,
            expert=self.expert_model_parallel_size,
            sequence_parallel=self.sequence_parallel,
        )

    @property
    def schedule(self) -> LearningRateSchedule:
        return LearningRateSchedule(
            self.lr, self.min_lr, self.lr_warmup_steps, self.lr_decay_steps, self.lr_decay_style
        )

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
        )


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank.

    Args:
        loss: sum over all micro-batches and data-parallel ranks. metrics: the loss function's, summed likewise.
        grad_norm: L2 norm of the whole gradient, before clipping. lr: learning rate of the step.
        skipped: None, or why the weights were left as they were (a loss or gradient norm that is not finite).
    """

    loss: float
    metrics: dict[str, float]
    grad_norm: float
    lr: float
    skipped: str | None = None


class Actor:
    """A model, its optimizer, and the checkpoint directory that they came from. Made by :meth:`create`."""

    def __init__(self, config: ActorConfig, hf_dir: Path, model: Model, optimizer: Optimizer) -> None:
        self.config, self.hf_dir = config, hf_dir
        self.model, self.optimizer = model, optimizer
        self._exporter: Exporter | None = None

    @classmethod
    def create(cls, config: ActorConfig, hf_dir: str | Path) -> Actor:
        """Join the other ranks, build this rank's part of the model and load it.

        The ranks' addresses come from torchrun's environment variables (see :mod:`.megatron.runtime`).

        Args:
            hf_dir: a Hugging Face checkpoint: ``config.json``, ``*.safetensors``, tokenizer.

        Raises:
            ConfigError: the checkpoint is missing, of an unknown family, or not what its config says; or the layout divides
                neither the world nor the model. It names the field, the value, and what would be right.
            DeadlineExceeded, PeerLost, PeerFailed: the other ranks did not keep up.
        """
        hf_dir = Path(hf_dir)
        architecture = read_architecture(hf_dir)
        check_divisible(architecture, config.layout)
        runtime.start(config.layout, config.seed, config.timeout_seconds)
        megatron = transformer_config(architecture, config.layout, DTYPES[config.dtype], config.recompute)
        chunks = build_chunks(architecture, megatron, config.layout)
        with together(f"loading {hf_dir}"):
            load_hf(chunks, megatron, architecture, hf_dir)
        wrapped = wrap_chunks(chunks, megatron, config.use_distributed_optimizer)
        model = Model(architecture, megatron, config.layout, wrapped)
        with deadline("the making of the optimizer"):
            optimizer = Optimizer(model, config.optimizer)
        return cls(config, hf_dir, model, optimizer)

    @property
    def architecture(self) -> Architecture:
        return self.model.architecture

    @property
    def data_parallel_rank(self) -> int:
        return runtime.data_parallel()[0]

    @property
    def data_parallel_size(self) -> int:
        return runtime.data_parallel()[1]

    def log_probs(self, batches: Sequence[PackedBatch], temperature: float | None = None) -> list[Tensor]:
        """Log-probabilities of the labels under the current weights, without gradients.

        Args:
            temperature: instead of the configured one.

        Returns:
            float32 [T] for each micro-batch, on the model's device; what stands at a sequence's last position (label 0)
            has no meaning.
        """
        with deadline("the computation of log-probs"):
            return passes.log_probs(self.model, self._checked(batches), self._temperature(temperature))

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        loss_fn: LossFunction,
        *,
        need_entropy: bool = False,
        temperature: float | None = None,
    ) -> StepResult:
        """One optimizer step on the gradient of the summed loss.

        A loss or gradient norm that is not finite leaves weights, moments and schedule as they were;
        :attr:`StepResult.skipped` says so. A sum over infinitely many such steps is the caller's to notice.

        Args:
            batches: this data-parallel rank's micro-batches, at least one.
            loss_fn: see :data:`LossFunction`. need_entropy: compute the entropy for it (differentiable).
            temperature: instead of the configured one.

        Raises:
            BadLoss: the loss function broke its contract. DeadlineExceeded, PeerLost: the other ranks did not keep up.
        """
        self.model.zero_gradients()
        self.optimizer.zero_gradients()
        with deadline("the forward and backward passes"):
            sums = passes.forward_backward(
                self.model, self._checked(batches), loss_fn, self._temperature(temperature), need_entropy
            )
        if not math.isfinite(sums.loss):
            return StepResult(sums.loss, sums.metrics, math.nan, self.optimizer.lr, skipped=f"loss is {sums.loss}")
        with deadline("the optimizer step"):
            update = self.optimizer.update()
        return StepResult(sums.loss, sums.metrics, update.grad_norm, update.lr, update.skipped)

    def set_lr(self, lr: float) -> None:
        """Change the peak of the learning-rate schedule; its position and Adam's moments stay."""
        self.optimizer.set_lr(lr)

    def reset_optimizer(
        self,
        *,
        lr: float | None = None,
        min_lr: float | None = None,
        lr_warmup_steps: int | None = None,
        lr_decay_steps: int | None = None,
        lr_decay_style: DecayStyle | None = None,
    ) -> None:
        """Zero Adam's moments and start a schedule at its beginning, as between a supervised warm start and RL.

        What is not given is taken from the configuration.

        Raises:
            ConfigError: the schedule's fields contradict one another.
        """
        given = {
            "lr": lr,
            "min_lr": min_lr,
            "lr_warmup_steps": lr_warmup_steps,
            "lr_decay_steps": lr_decay_steps,
            "lr_decay_style": lr_decay_style,
        }
        changed = dataclasses.replace(self.config, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
        self.optimizer.reset(changed.schedule)

    def export(self, bucket_bytes: int) -> Iterator[Bucket]:
        """The weights under their Hugging Face names, bucket by bucket; tied embeddings come once.

        Every rank must iterate to the end. All ranks get the same names in the same buckets; global rank 0 gets full,
        contiguous tensors in the model's dtype on its device, the others None in their place. A tensor may be a view of a
        live parameter: read it before the next ``train_step``.

        Args:
            bucket_bytes: a bucket holds at most this much, unless a single Megatron parameter is larger.
        """
        if bucket_bytes < 1:
            raise ConfigError("trainer.update_weight_buffer_size", bucket_bytes, "at least 1 byte")
        return self._export().buckets(bucket_bytes)

    def save_hf(self, directory: str | Path) -> None:
        """Write a Hugging Face checkpoint: safetensors, config, tokenizer. It appears complete or not at all."""
        export.save_hf(self._export(), self.hf_dir, Path(directory))

    def save_checkpoint(
        self, root: str | Path, step: int, extra: dict[str, Any] | None = None, keep: int | None = None
    ) -> Path:
        """Write everything that an exact resume needs; see :func:`.megatron.checkpoint.save_checkpoint`."""
        return checkpoint.save_checkpoint(self.model, self.optimizer, Path(root), step, extra or {}, keep)

    def load_checkpoint(self, root: str | Path, step: int | None = None) -> dict[str, Any]:
        """Go back to a checkpoint, the newest if ``step`` is None, and return its ``extra``."""
        return checkpoint.load_checkpoint(self.model, self.optimizer, Path(root), step)

    def close(self) -> None:
        """Leave the process group. The actor is of no use afterwards."""
        runtime.stop()

    def _export(self) -> Exporter:
        if self._exporter is None:
            self._exporter = Exporter(self.model)
        return self._exporter

    def _temperature(self, override: float | None) -> float:
        if override is None:
            return self.config.temperature
        check_temperature(override)
        return override

    def _checked(self, batches: Sequence[PackedBatch]) -> Sequence[PackedBatch]:
        if not batches:
            raise ConfigError("batches", [], "at least one micro-batch on every rank")
        return batches


def check_temperature(temperature: float) -> None:
    """Raises ConfigError for a temperature by which logits cannot be divided."""
    if not 0 < temperature < math.inf:
        raise ConfigError("trainer.temperature", temperature, "a finite number above 0")
