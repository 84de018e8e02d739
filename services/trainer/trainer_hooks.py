"""slime's hooks in the trainer: those that make or change the data of a batch, that log it, and those around Megatron.

``custom_convert_samples_to_train_data_path`` is called before a batch is laid out, ``rollout_data_postprocess_path`` once its advantages
are there. Both may take tokens out of the loss, and neither may put any in: what is trained has a log-prob and a version of the rollout's,
and the batch was formed within the staleness bound by them.

Every rank calls the hooks around Megatron, at the same places: what they do in collectives has to be the same everywhere. A hook that
raises ends training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.trainer import loss_inputs
from services.trainer.actor import Actor
from services.trainer.backend import ScheduledOptimizer
from services.trainer.batch_metrics import StatColumn, stats_row
from services.trainer.batches import TEACHER, Shard, TrainBatch
from services.trainer.loss_inputs import scored
from services.trainer.objective.custom_objective import CustomFunctions
from services.trainer.partition import Partition
from shared.hooks import HookSample
from shared.runtime.errors import MyxoError
from shared.schema.sample import Sample
from shared.store.payload_store import BlockingStore

CONVERT = "algorithm.custom_convert_samples_to_train_data_path"
POSTPROCESS = "algorithm.rollout_data_postprocess_path"
NOT_READ = {"total_lengths", "truncated", "sample_indices", "rollout_mask_sums", "round_number", "metadata", "source_names", "prompt"}
NOT_READ |= {"multimodal_train_inputs", "rollout_top_p_token_ids", "rollout_top_p_token_offsets"}
"""Keys of slime's train data that nothing here reads: they follow from the batch, or are shown and not trained by."""

SHOWN = {**loss_inputs.SHOWN, "values": "values", "advantages": "advantages", "returns": "returns"}
"""Key of slime's ``rollout_data`` → the batch's field, where it has that."""


@dataclass(frozen=True)
class TrainData:
    """What a convert function makes of a batch's samples, by their indices.

    rewards: what advantages are made of. raw: as they are shown. masks: uint8 [R]. log_probs: float32 [R] of the rollout, teacher:
    float32 [R]; None: those of the samples.
    """

    rewards: list[float]
    raw: list[float]
    masks: list[NDArray[np.uint8]]
    log_probs: list[NDArray[np.float32] | None] | None = None
    teacher: list[NDArray[np.float32] | None] | None = None

    def applied(self, shard: Shard) -> Shard:
        """Returns a shard whose samples have these masks and log-probs."""
        samples, stats = dict(shard.samples), shard.stats.copy()
        for index, sample in samples.items():
            samples[index] = made = self._sample(index, sample)
            stats[index] = stats_row(made, int(np.count_nonzero(made.mask)))
            stats[index, StatColumn.MASKED] = shard.stats[index, StatColumn.MASKED]
        return replace(shard, samples=samples, stats=stats, rewards=self.rewards, raw=self.raw)

    def _sample(self, index: int, sample: Sample) -> Sample:
        metadata = sample.metadata if self.teacher is None else {**sample.metadata, TEACHER: np.asarray(self.teacher[index]).tolist()}
        given = None if self.log_probs is None else self.log_probs[index]
        log_probs = sample.log_probs if given is None else given
        return replace(sample, mask=sample.mask & self.masks[index], log_probs=log_probs, metadata=metadata)


def converted(custom: CustomFunctions, partition: Partition, samples: Sequence[HookSample]) -> TrainData:
    """Returns what the convert function makes of the samples of a whole batch. Raises HookFailed.

    Args:
        samples: with their rewards, by the partition's indices.
    """
    tokens = [list(sample.tokens) for sample in samples]
    masks = [np.asarray([1] * sample.response_length if sample.loss_mask is None else sample.loss_mask, np.uint8) for sample in samples]
    given = custom.call(CONVERT, custom.args, list(samples))
    reader = _Columns(custom, given, len(samples))
    for index, (own, length) in enumerate(zip(reader.column("tokens"), reader.column("response_lengths"), strict=True)):
        if np.asarray(own).tolist() != tokens[index] or length != len(masks[index]):
            problem = f"tokens or response_lengths of sample {index} are not the sample's: what is trained is what was generated and scored"
            raise reader.refused(problem)
    reader.check_rollouts([(item.group, sample.rollout_id) for item, sample in zip(partition.items, samples, strict=True)])
    rewards = reader.numbers("rewards")
    if unread := sorted(set(map(str, reader.given)) & NOT_READ):
        structlog.get_logger().debug("train_data_not_read", keys=unread)
    return TrainData(
        rewards=rewards,
        raw=reader.numbers("raw_reward") if "raw_reward" in reader.given else rewards,
        masks=reader.masks("loss_masks", masks),
        log_probs=reader.arrays("rollout_log_probs", masks, gaps=True) if reader.given.get("rollout_log_probs") is not None else None,
        teacher=reader.arrays(TEACHER, masks) if reader.given.get(TEACHER) is not None else None,
    )


class _Columns:
    """Train data in slime's form, a dict of lists with one entry a sample, checked column by column. Raises HookFailed."""

    _KNOWN = frozenset({"tokens", "response_lengths", "rewards", "raw_reward", "loss_masks", "rollout_ids", "rollout_log_probs", TEACHER})

    def __init__(self, custom: CustomFunctions, given: object, size: int) -> None:
        self._custom, self._size = custom, size
        if not isinstance(given, Mapping):
            raise self.refused(f"gave a {type(given).__name__}; expected a dict of lists with an entry for each sample")
        if unknown := sorted(set(map(str, given)) - self._KNOWN - NOT_READ):
            raise self.refused(f"gave {', '.join(unknown)}, which the trainer does not know; it reads {', '.join(sorted(self._KNOWN))}")
        self.given: Mapping[str, Any] = given

    def refused(self, reason: str) -> Exception:
        return self._custom.refused(CONVERT, reason)

    def column(self, name: str) -> list[Any]:
        values = self.given.get(name)
        if not isinstance(values, list | tuple) or len(values) != self._size:
            found = "no list" if not isinstance(values, list | tuple) else f"{len(values)} entries"
            raise self.refused(f"{name}: {found} for {self._size} samples; samples may not be added or left out (mask them)")
        return list(values)

    def numbers(self, name: str) -> list[float]:
        try:
            values = [float(value) for value in self.column(name)]
        except (TypeError, ValueError) as error:
            raise self.refused(f"{name}: {error}; expected numbers") from None
        if not np.isfinite(values).all():
            raise self.refused(f"{name}: some are not finite")
        return values

    def arrays(self, name: str, masks: Sequence[NDArray[np.uint8]], *, gaps: bool = False) -> list[NDArray[np.float32] | None]:
        """Returns numbers of each response token, finite where the mask is 1; None, which ``gaps`` allows, for a sample without."""
        arrays = [None if values is None else np.asarray(values, np.float32) for values in self.column(name)]
        for index, (array, mask) in enumerate(zip(arrays, masks, strict=True)):
            if array is None and gaps:
                continue
            if array is None or array.shape != mask.shape or not np.isfinite(array[mask != 0]).all():
                raise self.refused(f"{name} of sample {index}: expected {len(mask)} numbers, finite on trained tokens")
        return arrays

    def masks(self, name: str, allowed: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
        arrays = [np.asarray(values) for values in self.column(name)]
        for index, (array, mask) in enumerate(zip(arrays, allowed, strict=True)):
            if array.shape != mask.shape or not np.isin(array, (0, 1)).all():
                raise self.refused(f"{name} of sample {index}: expected {len(mask)} entries, 0 or 1")
            if (array > mask).any():
                raise self.refused(f"{name} of sample {index} trains token {int(np.argmax(array > mask))}, which its loss mask leaves out")
        return [array.astype(np.uint8) for array in arrays]

    def check_rollouts(self, own: list[tuple[int, int | None]]) -> None:
        """Refuses rollout ids that put samples together otherwise than the batch does."""
        if (ids := self.given.get("rollout_ids")) is None:
            return
        pairs = set(zip(self.column("rollout_ids"), own, strict=True))
        if not len(pairs) == len(set(ids)) == len(set(own)):
            raise self.refused("rollout_ids: samples of one rollout have one id, and those of others have others, as in the samples")


def postprocessed(custom: CustomFunctions, batch: TrainBatch) -> TrainBatch:
    """Returns the batch as the postprocess function leaves it: this rank's samples, by ascending index. Raises HookFailed, BadSample."""
    masks = [mask for _, mask in sorted(batch.masks().items())]
    fields = {name: field for name, field in SHOWN.items() if field in batch.packed[0].fields}
    before = {name: [values for _, values in sorted(batch.per_sample(field).items())] for name, field in fields.items()}
    data = _rollout_data(batch) | {name: [value.clone() for value in values] for name, values in before.items()}
    custom.call(POSTPROCESS, custom.args, batch.step, data)
    changed = {name: _tensors(custom, name, data.get(name), masks) for name in fields}
    kept = [values != 0 for values in _tensors(custom, "loss_masks", data.get("loss_masks"), masks)]
    for name, field in fields.items():
        if not _equal(changed[name], before[name]):
            batch = _changed(custom, batch, field, changed[name])
    for index, new, old in zip(batch.indices, kept, masks, strict=True):
        if (new & ~old).any():
            where = f"loss_masks of sample {batch.partition.name(index)}"
            raise custom.refused(POSTPROCESS, f"{where} trains token {int(torch.nonzero(new & ~old)[0])}, which was left out before")
    return batch if _equal(kept, masks) else batch.with_masks(kept)


def _changed(custom: CustomFunctions, batch: TrainBatch, field: str, values: Sequence[Tensor]) -> TrainBatch:
    if field in ("returns", "values") and "values" in batch.packed[0].fields:
        raise custom.refused(POSTPROCESS, f"{field} changed: the critic makes its own")
    return batch.with_values(field, values)


def _rollout_data(batch: TrainBatch) -> dict[str, Any]:
    """Returns what slime's ``rollout_data`` has of this rank's samples besides `SHOWN`."""
    samples = {index: sample for item in batch.micro_batches for index, sample in zip(item.indices, item.samples, strict=True)}
    own = [samples[index] for index in batch.indices]
    raw = batch.partition.rewards if batch.raw is None else batch.raw
    rewards = raw if batch.rewards is None else batch.rewards
    return {
        "tokens": [torch.from_numpy(np.concatenate([sample.prompt, sample.response]).astype(np.int64)) for sample in own],
        "total_lengths": [sample.length for sample in own],
        "response_lengths": [len(sample.response) for sample in own],
        "loss_masks": [torch.from_numpy(sample.mask.astype(np.int32)) for sample in own],
        "rewards": [rewards[index] for index in batch.indices],
        "raw_reward": [raw[index] for index in batch.indices],
        "truncated": [int(sample.finish == "length") for sample in own],
        "sample_indices": list(batch.indices),
    }


def _tensors(custom: CustomFunctions, name: str, values: object, masks: Sequence[Tensor]) -> list[Tensor]:
    found = [torch.as_tensor(value).detach().cpu() for value in values] if isinstance(values, list | tuple) else []
    if [value.shape for value in found] != [mask.shape for mask in masks]:
        raise custom.refused(POSTPROCESS, f"{name}: expected a list with a tensor of each sample, one number a response token")
    return found


def _equal(values: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(value, other) for value, other in zip(values, others, strict=True))


ROLLOUT_LOG = "monitoring.custom_rollout_log_function_path"


class RolloutLog:
    """Calls the function that the run names, if it names one."""

    def __init__(self, custom: CustomFunctions, store: BlockingStore) -> None:
        self._custom, self._store = custom, store

    def wrote(self, partition: Partition, seconds: float) -> bool:
        """Returns whether the function has logged the batch in the place of Myxo. One that fails has not, which is an error in the log.

        Args:
            seconds: for which the trainer waited for the batch.
        """
        if ROLLOUT_LOG not in self._custom:
            return False
        step = partition.batch.step
        try:
            samples = scored(partition, self._store, self._custom.args.reward_key)
            return bool(self._custom.call(ROLLOUT_LOG, step, self._custom.args, samples, {}, seconds))
        except MyxoError as error:
            structlog.get_logger().error("rollout_log_failed", step=step, error=str(error))
            return False


INIT = "trainer.custom_megatron_init_path"
BEFORE_LOG_PROBS = "trainer.custom_megatron_before_log_prob_hook_path"
BEFORE_STEP = "trainer.custom_megatron_before_train_step_hook_path"


class SchedulerView:
    """The learning rate's schedule as a hook gets it, in the place of Megatron's ``OptimizerParamScheduler``.

    ``num_steps``: optimizer steps so far.
    """

    def __init__(self, optimizer: ScheduledOptimizer) -> None:
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
            optimizer: Any = actor.optimizer  # Megatron's: with another backend the hooks are refused
            parts = (actor.model.chunks, optimizer.megatron, SchedulerView(optimizer))
            self._custom.call(BEFORE_STEP, self._custom.args, step, index, *parts)
