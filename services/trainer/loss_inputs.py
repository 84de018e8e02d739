"""What the objective makes of a batch on one rank: the user's own functions where a run names some, and the loss of each optimizer step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.batches import PerSample, TrainBatch
from services.trainer.megatron import runtime
from services.trainer.megatron.passes import LossFunction
from services.trainer.objective import Advantages, CustomFunctions, Statistics, batch_statistics, loss_of, needs
from services.trainer.partition import Partition
from services.trainer.sample_stats import Sum
from shared.config.algorithm import AlgorithmSection
from shared.config.run_config import RunConfig
from shared.hooks import HookSample
from shared.hooks.sample_conversion import from_stored
from shared.schema import sample
from shared.schema.messages import Score
from shared.store.payload_store import BlockingStore

SHOWN = {
    "rollout_log_probs": "rollout_log_probs",
    "log_probs": "proximal_log_probs",
    "ref_log_probs": "ref_log_probs",
    "kl": "kl",
    "teacher_log_probs": "teacher_log_probs",
}
"""What an advantage function is given, where the batch has it → the field."""


class LossInputs:
    """Of one rank.

    Raises:
        ConfigError: a function that cannot be imported.
    """

    def __init__(self, config: RunConfig, objective: AlgorithmSection, store: BlockingStore) -> None:
        self._objective, self._store = objective, store
        self._custom = CustomFunctions.of(config)

    def rewards(self, deal: Partition) -> list[float]:
        """The whole batch's, in the order of the deal; as ``custom_reward_post_process_path`` has them, which gets all samples."""
        if self._custom.rewards is None:
            return raw_rewards(deal)
        with runtime.together(f"the rewards of step {deal.batch.step}"):
            return self._custom.post_processed(scored(deal, self._store))[1]

    def advantages(self, batch: TrainBatch) -> Callable[[NDArray[np.float64]], Advantages] | None:
        """``custom_advantage_function_path`` for `token_advantages`; None without one."""
        if self._custom.advantage is None:
            return None
        own, masks, raw = batch.numbers, batch.masks(), raw_rewards(batch.deal)
        fields = batch.micro_batches()[0].fields
        shown = {name: batch.per_sample(field) for name, field in SHOWN.items() if field in fields}
        data = {name: [numbers[number] for number in own] for name, numbers in shown.items()}

        def advantages(rewards: NDArray[np.float64]) -> Advantages:
            given = {"rewards": rewards.tolist(), "raw_reward": [raw[number] for number in own], **data}
            return self._custom.advantages([masks[number] for number in own], given)

        return advantages

    def loss(self, batch: TrainBatch, step: int) -> LossFunction:
        """The loss of the batch's optimizer step of this number, from 0. A collective where it needs numbers of all ranks' tokens."""
        statistics = Statistics()
        if needs(self._objective).statistics:
            statistics = batch_statistics(self._objective, [one.packed for one in batch.steps[step]], _gathered)
        denominator = batch.denominators[step]
        found = loss_of(self._objective, self._custom, version=batch.version, statistics=statistics, denominator=denominator)
        return cast(LossFunction, found)  # one of the user's own takes logits, and says so


def raw_rewards(deal: Partition) -> list[float]:
    """The batch's rewards in the order of the deal."""
    return [reward for group in deal.batch.groups for reward in group.rewards]


def scored(deal: Partition, store: BlockingStore) -> list[HookSample]:
    """Every sample of a batch with its reward, as hooks have them. Raises PayloadMissing, DeadlineExceeded, StoreRefused."""
    keys, removed = [group.payload.keys for group in deal.batch.groups], deal.removed()
    blobs = store.stream(list(itertools.chain.from_iterable(keys)))
    stored = [one for of_group in keys for one in sample.decode(itertools.islice(blobs, len(of_group)))]
    scores = [Score(reward=reward, removed=number in removed) for number, reward in enumerate(raw_rewards(deal))]
    return [from_stored(one, score) for one, score in zip(stored, scores, strict=True)]


def teacher_gap(batch: TrainBatch, objective: AlgorithmSection) -> PerSample:
    """log π_old − log π_teacher of this rank's samples."""
    old = batch.per_sample("rollout_log_probs" if objective.correction == "rollout" else "proximal_log_probs")
    teacher = batch.per_sample("teacher_log_probs")
    return {number: old[number] - teacher[number] for number in batch.numbers}


def gathered(values: Tensor, rank: int, ranks: int, total: Sum) -> Tensor:
    """The ranks' one-dimensional float64 tensors, of any length, end to end: each adds its own to a table of zeros.

    Args:
        total: the sum of a table over the ranks.
    """
    sizes = np.zeros(ranks)
    sizes[rank] = values.numel()
    ends: list[int] = np.cumsum(total(sizes)).astype(int).tolist()
    table = np.zeros(ends[-1])
    table[ends[rank] - values.numel() : ends[rank]] = values.numpy()
    return torch.from_numpy(total(table))


def _gathered(values: Tensor) -> Tensor:
    rank, ranks = runtime.data_parallel()
    return gathered(values, rank, ranks, runtime.sum_over_data_parallel)
