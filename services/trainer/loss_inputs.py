"""The inputs of the loss on one rank: rewards, advantages and importance-weight statistics, or the results of the user's functions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import structlog
import torch
from torch import Tensor

from services.trainer.batch_metrics import Sum
from services.trainer.batches import TEACHER, TrainBatch, baselines_of, rollouts_of
from services.trainer.objective.advantage import Advantages, discounted_sum, distilled, less_kl, needs, token_advantages, whitened
from services.trainer.objective.correction import Statistics, batch_statistics
from services.trainer.objective.custom_objective import ADVANTAGE, REWARDS, CustomFunctions
from services.trainer.objective.distillation import DistillationLoss
from services.trainer.objective.loss import ActorLoss, PolicyLoss, loss_of
from services.trainer.packing import NO_VERSION
from services.trainer.parallel import runtime
from services.trainer.parallel.loss_function import LossFunction
from services.trainer.partition import Partition
from shared.config.algorithm import AlgorithmSection
from shared.hooks import HookSample
from shared.hooks.sample_conversion import from_stored
from shared.rewards.reward_advantage import Rewards, reward_advantages, turn_advantages
from shared.schema import sample
from shared.schema.sample import Score
from shared.store.payload_store import BlockingStore

log = structlog.get_logger()

# Name of an advantage function's input → the field that it is taken from, where the batch has it
SHOWN = {"log_probs": "proximal_log_probs", **{name: name for name in ("rollout_log_probs", "ref_log_probs", "kl", TEACHER)}}


class LossInputs:
    """Makes the inputs of one rank's losses.

    Args:
        custom: the user's own functions. total: the sum of a table over the data-parallel ranks, a collective.
    """

    def __init__(
        self, objective: AlgorithmSection, custom: CustomFunctions, store: BlockingStore, total: Sum = runtime.sum_over_data_parallel
    ) -> None:
        self._objective, self._custom, self._store, self._total = objective, custom, store, total
        self._warned = False

    def with_advantages(self, batch: TrainBatch) -> TrainBatch:
        """Returns the batch with fields ``advantages`` and, where a critic learns from it, ``returns``. Whitening is a collective.

        It reads the fields ``kl``, ``values``, ``teacher_log_probs`` and those of the old policy, where the objective needs them.

        Raises:
            HookFailed; BadSample: an advantage that is not finite.
        """
        batch = self._post_processed(batch)
        objective, trained = self._objective, batch.masks()
        masks = [trained[index] for index in batch.indices]
        found = self._advantages(batch, masks)
        advantages = found.advantages
        if needs(objective).teacher_gap:
            old, teacher = _in_order(batch, old_log_probs(objective)), _in_order(batch, TEACHER)
            advantages = distilled(objective, advantages, old, teacher, masks)
            gaps = [torch.where(mask, (a - b).double(), 0.0) for a, b, mask in zip(old, teacher, masks, strict=True)]
            batch = batch.with_values("opd_reverse_kl", gaps)
        if objective.normalize_advantages:
            advantages = whitened(advantages, masks, self._total)
        batch = batch.with_values("advantages", advantages)
        return batch if found.returns is None else batch.with_values("returns", found.returns)

    def loss(self, batch: TrainBatch, interval: int, step: int) -> LossFunction:
        """Returns the loss of the batch's optimizer step ``step``, from 0. A collective where it needs statistics of all ranks' tokens.

        ``interval``: the training steps from one version to the next; behind the first of them the weights are of no version.
        """
        statistics = Statistics()
        if needs(self._objective).statistics:
            packed = [item.packed for item in batch.steps[step]]
            statistics = batch_statistics(self._objective, packed, lambda own: gathered(own, *runtime.data_parallel(), self._total))
        version = NO_VERSION if batch.step % interval else batch.version
        found: ActorLoss | DistillationLoss = loss_of(self._objective, self._custom, version, statistics, batch.denominators[step])
        if self._objective.opd_top_k and isinstance(found, PolicyLoss):
            found = DistillationLoss(found)
        return cast(LossFunction, found)  # some take more than log-probs, and have an attribute for that

    def _advantages(self, batch: TrainBatch, masks: Sequence[Tensor]) -> Advantages:
        partition, own, wanted = batch.partition, batch.indices, needs(self._objective)
        groups = baselines_of(partition, batch.sample_stats)
        kl = _in_order(batch, "kl") if wanted.kl else None
        rewards: Rewards = partition.rewards if batch.rewards is None else batch.rewards
        if kl is not None and self._objective.advantage_estimator == "rloo":
            rewards = less_kl(self._objective, rewards, own, kl, masks, self._total)
        of_sample = reward_advantages(self._objective, rewards, groups, rollouts_of(partition, batch.sample_stats))[own]
        if ADVANTAGE in self._custom:
            shown = {name: _in_order(batch, field) for name, field in SHOWN.items() if field in batch.packed[0].fields}
            raw = [(partition.rewards if batch.raw is None else batch.raw)[index] for index in own]
            return self._custom.advantages(masks, {"rewards": of_sample.tolist(), "raw_reward": raw, **shown})
        values = _in_order(batch, "values") if wanted.values else None
        found = token_advantages(self._objective, of_sample, masks, kl=kl, values=values)
        self._add_turns(batch, found.advantages, masks)
        return found

    def _add_turns(self, batch: TrainBatch, advantages: list[Tensor], masks: Sequence[Tensor]) -> None:
        """Adds ``turn_advantage_coef`` times each turn's advantage to those of its trained tokens. A collective, where it is not 0."""
        samples = [pair for item in batch.micro_batches for pair in zip(item.indices, item.samples, strict=True)]
        turns = {index: one.turn_rewards for index, one in sorted(samples, key=lambda pair: pair[0])}
        if not self._objective.turn_advantage_coef:
            if not self._warned and any(reward for given in turns.values() for *_, reward in given):
                self._warned = True
                log.warning("turn_rewards_unused", reason="turns have rewards, and algorithm.turn_advantage_coef is 0: they train nothing")
            return
        counts = np.zeros(len(batch.partition.items))
        counts[list(turns)] = [len(given) for given in turns.values()]
        counts = self._total(counts)
        returns = np.zeros((len(counts), int(counts.max())))
        for index, given in turns.items():
            rewards = torch.tensor([reward for *_, reward in given], dtype=torch.float64)
            returns[index, : len(given)] = discounted_sum(rewards, self._objective.turn_gamma).numpy()
        groups, rollouts = baselines_of(batch.partition, batch.sample_stats), rollouts_of(batch.partition, batch.sample_stats)
        found = turn_advantages(self._objective, self._total(returns), counts.astype(int).tolist(), groups, rollouts)
        for (index, given), advantage, mask in zip(turns.items(), advantages, masks, strict=True):
            for turn, (start, end, _) in enumerate(given):
                advantage[start:end] += mask[start:end] * (self._objective.turn_advantage_coef * float(found[index, turn]))

    def _post_processed(self, batch: TrainBatch) -> TrainBatch:
        partition = batch.partition
        if batch.rewards is not None or REWARDS not in self._custom:
            return batch
        with runtime.together(f"the rewards of step {partition.batch.step}"):
            raw, rewards = self._custom.post_processed(scored(partition, self._store, self._custom.args.reward_key))
        return replace(batch, raw=raw, rewards=rewards)


def _in_order(batch: TrainBatch, field: str) -> list[Tensor]:
    """Returns a field of each of this rank's samples, [R], by ascending index."""
    return [values for _, values in sorted(batch.per_sample(field).items())]


def old_log_probs(objective: AlgorithmSection) -> str:
    """Returns the field with the log-probs that the loss clips around and that KL and the teacher's gap are measured from."""
    return "rollout_log_probs" if objective.correction == "rollout" else "proximal_log_probs"


def scored(partition: Partition, store: BlockingStore, reward_key: str | None = None) -> list[HookSample]:
    """Returns every sample of a batch with its reward, as hooks have them, or its named ones. Raises as `BlockingStore.stream` does.

    Args:
        reward_key: the name of the reward that counts.
    """
    removed, payloads = partition.removed(), [group.payload for group in partition.batch.groups]
    stored = [item for blobs in store.stream(payloads) for item in sample.decode(blobs)]
    given = zip(partition.rewards, partition.parts, strict=True)
    scores = [Score(reward=reward, parts=parts, removed=index in removed) for index, (reward, parts) in enumerate(given)]
    return [from_stored(item, score, reward_key) for item, score in zip(stored, scores, strict=True)]


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
