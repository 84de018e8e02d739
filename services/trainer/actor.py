"""The trainer's actor: a language model that scores tokens, trains on a loss and gives out its weights, in whichever backend.

Every method is a collective: all ranks of the job call it, in the same order. Micro-batches are those of the caller's data-parallel rank;
ranks that share a model or a sequence (tensor, pipeline and context parallelism) pass the same ones, and every data-parallel rank the same
number of them.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import structlog
from torch import Tensor

from services.trainer import flops
from services.trainer.backend import DTYPES, MODULES, Backend, TrainerSettings, gather_plan
from services.trainer.control_client import ControlClient
from services.trainer.packing import PackedBatch, prefixes_of
from services.trainer.parallel import checkpoint, export, runtime
from services.trainer.parallel.gather_plan import Bucket, GatherPlan
from services.trainer.parallel.joint_write import JointWrite, SaveFailed
from services.trainer.parallel.loss_function import LossFunction
from services.trainer.parallel.runtime import deadline
from services.trainer.step_profiler import StepClock
from shared.config.run_config import RunConfig
from shared.config.trainer_section import LearningRateSchedule
from shared.model.architecture import Architecture
from shared.model.families import planned_architecture
from shared.model.final_exports import export_target, exported_steps, mark_of, occupant
from shared.model.quantization import quantization_in_engines
from shared.transfer import batch_invariant


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step; the same on every rank.

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
    """A model, its optimizer, and the checkpoint directory that they came from. :meth:`create` makes one."""

    def __init__(self, settings: TrainerSettings, hf_dir: Path, backend: Backend) -> None:
        self.settings, self.hf_dir, self.backend = settings, hf_dir, backend
        self.quantization, self.clock = quantization_in_engines(hf_dir, settings.precision), StepClock()
        self.model, self.optimizer = backend.model, backend.optimizer
        self._saving: JointWrite | None = None

    @classmethod
    def create(
        cls, settings: TrainerSettings, hf_dir: str | Path, *, random: bool = False, initialized: Callable[[], None] | None = None
    ) -> "Actor":
        """Joins the other ranks (see :mod:`.parallel.runtime`), builds this rank's part of the model in the run's backend and loads it.

        Args:
            hf_dir: a Hugging Face checkpoint: ``config.json``, ``*.safetensors``, tokenizer.
            random: keep Megatron's random weights; ``config.json`` is then enough.
            initialized: is called once the process groups are there.

        Raises:
            ConfigError: the checkpoint is missing, of an unknown family, or not what its config says; the layout divides neither
                the world nor the model; what is to be frozen or adapted is not in the model; or
                ``spec`` names layers that are not here, or are not those of the model.
            DeadlineExceeded, PeerLost, PeerFailed: the other ranks did not keep up.
        """
        if settings.trainer.deterministic:
            runtime.make_deterministic()
        batch_invariant.install()  # where the run's alignment is bitwise
        backend = import_module(MODULES[settings.trainer.trainer_backend])
        return cls(settings, Path(hf_dir), backend.create(settings, Path(hf_dir), random, initialized))

    @property
    def architecture(self) -> Architecture:
        return self.model.architecture

    @cached_property
    def counted_architecture(self) -> Architecture:
        """Returns the architecture by which operations are counted, of which the torch backend's own is an outline."""
        return planned_architecture(self.hf_dir, self.architecture, self.model.backend)

    @property
    def data_parallel_rank(self) -> int:
        return runtime.data_parallel()[0]

    @property
    def data_parallel_size(self) -> int:
        return runtime.data_parallel()[1]

    def log_probs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Returns the log-probabilities of the labels under the current weights, without gradients.

        They are float32 [T] for each micro-batch, on the model's device; what stands at a sequence's last position (label 0)
        has no meaning.
        """
        with deadline("the computation of log-probs"):
            return self.backend.passes.log_probs(self.model, batches, self.settings.temperature)

    def log_probs_and_routing(self, batches: Sequence[PackedBatch]) -> tuple[list[Tensor], list[dict[int, Tensor]]]:
        """Returns the same, and the experts that this rank's routers chose for each micro-batch (`PackedBatch.routing`)."""
        recorded: dict[int, dict[int, Tensor]] = {}
        with deadline("the computation of log-probs"):
            found = self.backend.passes.log_probs(self.model, batches, self.settings.temperature, recorded)
        return found, [recorded[index] for index in range(len(batches))]

    def values(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Returns a critic's values under the current weights, without gradients.

        They are float32 [T] for each micro-batch, on the model's device: at position t the value before label t is generated.
        """
        with deadline("the computation of values"):
            return self.backend.passes.values(self.model, batches)

    def shared_work(self, batches: Sequence[PackedBatch]) -> flops.Work:
        """Returns what these micro-batches have in common that is computed once instead of for each sequence; no collective."""
        found = [prefixes_of(batch, self.model.least_saved) for batch in batches]
        return flops.work([length for each in found if each is not None for length in each.shared.tolist()])

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        loss_fn: LossFunction,
        *,
        need_entropy: bool = False,
        temperature: float | None = None,
        before: Callable[[], None] | None = None,
    ) -> StepResult:
        """Takes one optimizer step on the gradient of the summed loss.

        A loss or gradient norm that is not finite leaves weights, moments and schedule as they were;
        :attr:`StepResult.skipped` says so. The caller decides how many such steps in a row are too many.

        Args:
            batches: this data-parallel rank's micro-batches, at least one.
            loss_fn: see :data:`LossFunction`. need_entropy: compute the entropy for it (differentiable).
            temperature: instead of the configured one. before: is called once gradients are zero.

        Raises:
            BadLoss: the loss function broke its contract. DeadlineExceeded, PeerLost: the other ranks did not keep up.
        """
        self.model.zero_gradients()
        self.optimizer.zero_gradients()
        if before is not None:
            before()
        with deadline("the forward and backward passes"):
            divisor = self.settings.temperature if temperature is None else temperature
            balanced = self.backend.passes.balanced_step(self.model, batches)
            loss, metrics = self.backend.passes.forward_backward(self.model, batches, loss_fn, divisor, need_entropy, balanced)
        lr = self.optimizer.lr
        if not math.isfinite(loss):
            return StepResult(loss, metrics, math.nan, lr, skipped=f"loss is {loss}")
        self.model.readers.wait("optimizer step")
        with self.clock.part("optimizer"), deadline("the optimizer step"):
            grad_norm, skipped = self.optimizer.update()
            if balanced is not None and skipped is None:
                self.backend.finish_step(balanced)
        return StepResult(loss, metrics, grad_norm, lr, skipped)

    def loss_alone(self, batch: PackedBatch, loss_fn: LossFunction, *, need_entropy: bool = False) -> float | None:
        """Returns the loss of one micro-batch, as `train_step` would add it up; None on ranks without the model's last stage.

        It is a collective of the ranks that share the model, and of no others.
        """
        return self.backend.passes.loss_alone(self.model, batch, loss_fn, self.settings.temperature, need_entropy)

    def reset_optimizer(self, schedule: LearningRateSchedule | None = None) -> None:
        """Zeroes Adam's moments and starts a schedule, by default the run's, as between a supervised warm start and RL."""
        self.optimizer.reset(schedule or self.settings.schedule)

    def export(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[Bucket]:
        """Yields the weights under their Hugging Face names, bucket by bucket; tied embeddings come once.

        Every rank must iterate to the end. All ranks get the same names in the same buckets; global rank 0 gets full,
        contiguous tensors in the model's dtype on its device, the others None in their place. A tensor may be a view of a
        live parameter: read it before the next ``train_step``.

        Args:
            bucket_bytes: a bucket holds at most this much, unless a single Megatron parameter is larger. dtype: instead of the model's, but
                for matrices that are quantized, from which pushes round them, too.
        """
        kept = () if self.quantization is None else self.quantization.names
        return self._gather_plan.buckets(bucket_bytes, None if dtype is None else DTYPES[dtype], kept)

    def save_hf(self, directory: str | Path, mark: dict[str, Any] | None = None, *, wait: bool = True) -> JointWrite:
        """Writes a Hugging Face checkpoint: safetensors, config, tokenizer. It appears complete or not at all.

        Args:
            mark: what the checkpoint says of itself (`shared.model.final_exports`). wait: until it is there. Otherwise each rank's share of
                the weights is copied to its host memory, to be written while training continues, and `JointWrite.finish` waits.
        """
        writing = export.start_export(self._gather_plan, self.hf_dir, Path(directory), copied=not wait, mark=mark)
        if wait:
            writing.finish()
        return writing

    def save_adapters(self, directory: str | Path) -> None:
        """Writes LoRA's adapters alone, in PEFT's format. The directory appears complete or not at all."""
        export.save_adapters(self._gather_plan, self.hf_dir, Path(directory))

    def save_checkpoint(
        self, root: str | Path, step: int, extra: dict[str, Any] | None = None, keep: int | None = None, *, wait: bool = True
    ) -> Path:
        """Writes everything that an exact resume needs; see :func:`.parallel.checkpoint.start_saving`.

        Args:
            wait: until the checkpoint is published. Otherwise the state of this moment is copied to host memory and written
                while training continues; it appears under the returned name when all ranks have written, or never. An error
                is raised by :meth:`finish_save` or the next save.

        Raises SaveFailed: this checkpoint, or the one before it, could not be written.
        """
        self.finish_save()
        self._saving = checkpoint.start_saving(self.model, self.optimizer, Path(root), step, extra or {}, keep, copied=not wait)
        target = self._saving.target
        if wait:
            self.finish_save()
        return target

    def finish_save(self) -> Path | None:
        """Waits for a checkpoint that is still being written. Returns its directory, or None if there was none.

        Raises:
            SaveFailed: it could not be written. DeadlineExceeded, PeerLost: another rank did not keep up.
        """
        saving, self._saving = self._saving, None
        return None if saving is None else saving.finish()

    def load_checkpoint(self, root: str | Path, step: int | None = None, *, reset_optimizer_states: bool = False) -> dict[str, Any]:
        """Goes back to a checkpoint, the newest if ``step`` is None, and returns its ``extra``.

        Args:
            reset_optimizer_states: load the weights only, and start the optimizer and its schedule anew.
        """
        self.finish_save()
        self.model.readers.wait("loading of a checkpoint")
        return checkpoint.load_checkpoint(self.model, self.optimizer, Path(root), step, reset_optimizer_states)

    def close(self) -> None:
        """Leaves the process group. The actor cannot be used afterwards."""
        runtime.stop()

    @cached_property
    def _gather_plan(self) -> GatherPlan:
        return gather_plan(self.model)


class PolicyExporter:
    """Exports the actor's policy in Hugging Face's format at the run's checkpoints (`save_hf`). All ranks construct it and call its methods
    together.

    Each rank copies its share of the weights to host memory as for a checkpoint, and writes it while the next steps train, unless
    `async_save` is off. An error of the disk never stops the training: it is logged, and the next export is tried.

    Args:
        control: rank 0's client; None on the other ranks.
    """

    def __init__(self, config: RunConfig, control: ControlClient | None, actor: Actor) -> None:
        self._config, self._control, self._actor = config, control, actor
        self._writing: JointWrite | None = None
        self._started = 0.0
        self._log: Any = structlog.get_logger()

    def begin(self, steps: int, anew: bool = False) -> None:
        """Exports the policy after ``steps`` steps where that is due and, unless it is made ``anew`` after a checkpoint, lacking. Waits for
        the export before it, and for the last one, since the run ends behind it.

        A collective. Raises DeadlineExceeded.
        """
        path = export_target(self._config, steps)
        if path is None or (not anew and runtime.gather_json(exported_steps(self._config, path))[0] == steps):
            return
        self.finish()
        self._started = time.monotonic()
        try:
            with runtime.together(f"the look at {path}"):
                if runtime.rank() == 0 and (what := occupant(self._config, path)):
                    raise FileExistsError(f"it would replace {what}")
            self._writing = self._actor.save_hf(path, mark_of(self._config, steps), wait=False)
        except (OSError, runtime.PeerFailed) as error:  # on all ranks: they prepare the directory together
            self._tell(path, error)
        if not self._config.trainer.async_save or steps == self._config.rollout.num_rollout:
            self.finish()

    def finish(self) -> None:
        """Waits until what was begun is on disk, or has failed. A collective. Raises DeadlineExceeded."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.finish()
            self._log.info("policy_exported", path=str(writing.target), seconds=round(time.monotonic() - self._started, 2))
        except SaveFailed as error:
            self._tell(writing.target, error)

    def _tell(self, path: Path, error: Exception) -> None:
        self._log.error("policy_not_exported", path=str(path), error=f"{type(error).__name__}: {error}")
        if self._control is not None:
            self._control.publish_event("policy_not_exported", f"{path}: {error}")
