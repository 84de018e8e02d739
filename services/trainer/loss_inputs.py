"""The inputs of the loss on one rank: rewards, advantages and importance-weight statistics, or the results of the user's functions."""

import itertools
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from services.trainer.batch_metrics import Sum
from services.trainer.batches import TEACHER, TrainBatch
from services.trainer.megatron import runtime
from services.trainer.megatron.passes import LossFunction
from services.trainer.objective import (
    CustomFunctions,
    Moments,
    Statistics,
    batch_statistics,
    distilled,
    loss_of,
    needs,
    reward_advantages,
    token_advantages,
    whitened,
)
from services.trainer.partition import Partition
from shared.config.algorithm import AlgorithmSection
from shared.hooks import HookSample
from shared.hooks.sample_conversion import from_stored
from shared.schema import sample
from shared.schema.sample import Score
from shared.store.payload_store import BlockingStore

SHOWN = {
    "rollout_log_probs": "rollout_log_probs",
    "log_probs": "proximal_log_probs",
    "ref_log_probs": "ref_log_probs",
    "kl": "kl",
    TEACHER: TEACHER,
}
"""Name of an advantage function's input → the field that it is taken from, where the batch has it."""


class LossInputs:
    """Makes the inputs of one rank's losses.

    Args:
        custom: the user's own functions.
    """

    def __init__(self, objective: AlgorithmSection, custom: CustomFunctions, store: BlockingStore) -> None:
        self._objective, self._custom, self._store = objective, custom, store

    def with_advantages(self, batch: TrainBatch) -> TrainBatch:
        """Returns the batch with fields ``advantages`` and, for a critic, ``returns``. A collective where they are whitened."""
        return with_advantages(batch, self._objective, self._rewards(batch.partition), _merged_over_ranks, self._custom)

    def loss(self, batch: TrainBatch, step: int) -> LossFunction:
        """Returns the loss of the batch's optimizer step ``step``, from 0. A collective where it needs statistics of all ranks' tokens."""
        statistics = Statistics()
        if needs(self._objective).statistics:
            statistics = batch_statistics(self._objective, [item.packed for item in batch.steps[step]], _gathered_from_ranks)
        denominator = batch.denominators[step]
        found = loss_of(self._objective, self._custom, version=batch.version, statistics=statistics, denominator=denominator)
        return cast(LossFunction, found)  # a custom loss takes logits, and has an attribute for that

    def _rewards(self, partition: Partition) -> list[float]:
        """Returns the whole batch's rewards by index, as ``custom_reward_post_process_path``, which gets all samples, returns them."""
        if self._custom.rewards is None:
            return partition.rewards
        with runtime.together(f"the rewards of step {partition.batch.step}"):
            return self._custom.post_processed(scored(partition, self._store))[1]


def with_advantages(
    batch: TrainBatch,
    objective: AlgorithmSection,
    rewards: Sequence[float],
    merged: Callable[[Moments], Moments],
    custom: CustomFunctions | None = None,
) -> TrainBatch:
    """Returns the batch with fields ``advantages`` and, where a critic learns from it, ``returns``.

    It reads the fields ``kl``, ``values``, ``teacher_log_probs`` and those of the old policy, where the objective needs them.

    Args:
        rewards: of the whole batch. merged: returns the moments of all data-parallel ranks for this one's; a collective.

    Raises:
        BadReward, HookFailed; BadSample: an advantage that is not finite.
    """
    wanted, own, groups = needs(objective), batch.indices, batch.partition.batch.groups
    group_names = [groups[item.group].group for item in batch.partition.items]
    of_sample = reward_advantages(objective, rewards, group_names, batch.rollouts)[own]
    trained = batch.masks()
    masks = [trained[index] for index in own]

    def values_of(field: str) -> list[Tensor]:
        values = batch.per_sample(field)
        return [values[index] for index in own]

    if custom is not None and custom.advantage is not None:
        shown = {name: values_of(field) for name, field in SHOWN.items() if field in batch.micro_batches()[0].fields}
        raw = batch.partition.rewards
        found = custom.advantages(masks, {"rewards": of_sample.tolist(), "raw_reward": [raw[index] for index in own], **shown})
    else:
        kl = values_of("kl") if wanted.kl else None
        found = token_advantages(objective, of_sample, masks, kl=kl, values=values_of("values") if wanted.values else None)
    advantages = found.advantages
    if wanted.teacher_gap:
        old = values_of(old_log_probs(objective))
        advantages = distilled(objective, advantages, old, values_of(TEACHER), masks)
    if objective.normalize_advantages:
        moments = merged(Moments.of(advantages, masks))
        advantages = [whitened(values, mask, moments) for values, mask in zip(advantages, masks, strict=True)]
    batch = batch.with_values("advantages", dict(zip(own, advantages, strict=True)))
    return batch if found.returns is None else batch.with_values("returns", dict(zip(own, found.returns, strict=True)))


def old_log_probs(objective: AlgorithmSection) -> str:
    """Returns the field with the log-probs that the loss clips around and that KL and the teacher's gap are measured from."""
    return "rollout_log_probs" if objective.correction == "rollout" else "proximal_log_probs"


def scored(partition: Partition, store: BlockingStore) -> list[HookSample]:
    """Returns every sample of a batch with its reward, as hooks have them. Raises PayloadMissing, DeadlineExceeded, StoreRefused."""
    keys, removed = [group.payload.keys for group in partition.batch.groups], partition.removed()
    blobs = store.stream(list(itertools.chain.from_iterable(keys)))
    stored = [item for of_group in keys for item in sample.decode(itertools.islice(blobs, len(of_group)))]
    scores = [Score(reward=reward, removed=index in removed) for index, reward in enumerate(partition.rewards)]
    return [from_stored(item, score) for item, score in zip(stored, scores, strict=True)]


def gathered(values: Tensor, rank: int, ranks: int, total: Sum) -> Tensor:
    """Returns the ranks' one-dimensional float64 tensors, of any length, end to end: each adds its own to a table of zeros.

    Args:
        total: the sum of a table over the ranks.
    """
    sizes = np.zeros(ranks)
    sizes[rank] = values.numel()
    ends: list[int] = np.cumsum(total(sizes)).astype(int).tolist()
    table = np.zeros(ends[-1])
    table[ends[rank] - values.numel() : ends[rank]] = values.numpy()
    return torch.from_numpy(total(table))


def _gathered_from_ranks(values: Tensor) -> Tensor:
    return gathered(values, *runtime.data_parallel(), runtime.sum_over_data_parallel)


def _merged_over_ranks(own: Moments) -> Moments:
    rank, ranks = runtime.data_parallel()
    rows = np.zeros((ranks, 3))
    rows[rank] = own.count, own.mean, own.m2
    return Moments.merged(Moments(int(count), mean, m2) for count, mean, m2 in runtime.sum_over_data_parallel(rows).tolist())
