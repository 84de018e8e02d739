"""From a batch's references to what the actor trains on: payloads read, advantages, per-token weights, packed micro-batches."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.trainer.objective import ObjectiveConfig, reward_advantages, sample_weights, whiten_samples
from services.trainer.packing import PackedBatch, TrainSample, rank_micro_batches
from shared import sample
from shared.errors import BadMessage
from shared.messages import Batch
from shared.store import BlockingStore


@dataclass(frozen=True)
class BatchFigures:
    """What is known of a batch before training: means over samples, ages of trained samples in weight versions.

    masked_tokens: that leave the loss for their age, of samples that no filter removed.
    """

    reward: float
    response_tokens: int
    tokens: int
    truncated: float
    staleness_mean: float
    staleness_max: int
    zero_std_groups: float
    masked_tokens: int
    removed_samples: int


@dataclass(frozen=True)
class TrainBatch:
    """One training step's samples, split into its optimizer steps, in the same order on every rank."""

    step: int
    version: int
    optimizer_steps: list[list[TrainSample]]
    figures: BatchFigures


def read(batch: Batch, store: BlockingStore, objective: ObjectiveConfig, optimizer_steps: int) -> TrainBatch:
    """Reads the payloads and computes advantages.

    Advantages are the whole group's, also where its samples fall into two optimizer steps. Raises PayloadMissing, DeadlineExceeded,
    BadMessage (payload and reference differ).
    """
    raw: list[sample.Sample] = []
    removed: list[bool] = []
    rewards: list[float] = []
    blobs = store.stream([key for group in batch.groups for key in group.payload.keys])
    for group in batch.groups:
        samples = sample.decode(itertools.islice(blobs, len(group.payload.keys)))
        if len(samples) != len(group.rewards):
            raise BadMessage(f"group {group.group} of step {batch.step}: {len(samples)} samples in the store, {len(group.rewards)} rewards")
        raw += samples
        removed += [position in group.removed for position in range(len(samples))]
        rewards += group.rewards
    masks = [_loss_mask(one, batch.mask_below, gone) for one, gone in zip(raw, removed, strict=True)]
    advantages: list[float | NDArray[np.floating]] = list(reward_advantages(objective, rewards, [one.group for one in raw]))
    if objective.normalize_advantages:
        advantages = list(whiten_samples(advantages, masks))
    train = [
        TrainSample(
            prompt_tokens=one.prompt,
            response_tokens=one.response,
            loss_mask=mask,
            rollout_log_probs=one.log_probs,
            versions=one.versions(),
            advantage=advantage,
            group=one.group,
            rollout_id=one.rollout,
        )
        for one, mask, advantage in zip(raw, masks, advantages, strict=True)
    ]
    figures = _figures(batch, raw, rewards, masks, removed)
    return TrainBatch(batch.step, batch.version, _deal(train, optimizer_steps), figures)


def micro_batches(
    samples: list[TrainSample], objective: ObjectiveConfig, *, dp_rank: int, dp_size: int, max_tokens: int, vocab_size: int
) -> list[PackedBatch]:
    """This rank's micro-batches of one optimizer step, each token weighted so that sums over micro-batches and ranks are means."""
    rollouts = [(one.group, one.rollout_id) for one in samples]
    weights = sample_weights([one.trained_tokens for one in samples], rollouts, objective.reducer, objective.fixed_length)
    return rank_micro_batches(samples, weights, dp_rank=dp_rank, dp_size=dp_size, max_tokens=max_tokens, vocab_size=vocab_size)


def _loss_mask(one: sample.Sample, mask_below: int, removed: bool) -> NDArray[np.uint8]:
    """uint8 [R]: the sample's own mask without tokens of versions below ``mask_below``; all 0 for a removed sample."""
    if removed:
        return np.zeros_like(one.mask)
    return one.mask & (one.versions() >= mask_below) if mask_below else one.mask


def _deal(samples: list[TrainSample], parts: int) -> list[list[TrainSample]]:
    """Consecutive parts that every sample is in one of; their numbers of trained samples differ by one at most.

    A part of which nothing is trained is no optimizer step: where a batch has fewer trained samples than ``parts``, there are fewer.
    """
    trained = [one.trained_tokens > 0 for one in samples]
    behind = list(itertools.accumulate(trained))  # trained samples up to and with each
    total = behind[-1]
    cuts = [bisect_left(behind, total * part // parts) + 1 for part in range(1, parts) if total * part // parts]
    dealt = [samples[start:end] for start, end in itertools.pairwise([0, *cuts, len(samples)])]
    return [part for part in dealt if any(one.trained_tokens for one in part)] or [samples]


def _figures(
    batch: Batch, raw: list[sample.Sample], rewards: list[float], masks: list[NDArray[np.uint8]], removed: list[bool]
) -> BatchFigures:
    oldest = [int(one.versions()[mask.astype(bool)].min()) for one, mask in zip(raw, masks, strict=True) if mask.any()]
    ages = [batch.version - version for version in oldest] or [0]
    masked = sum(int(one.mask.sum()) - int(mask.sum()) for one, mask, gone in zip(raw, masks, removed, strict=True) if not gone)
    equal = [len(set(group.rewards)) == 1 for group in batch.groups]
    responses = sum(len(one.response) for one in raw)
    return BatchFigures(
        reward=float(np.mean(rewards)),
        response_tokens=responses,
        tokens=responses + sum(len(one.prompt) for one in raw),
        truncated=float(np.mean([one.finish == "length" for one in raw])),
        staleness_mean=float(np.mean(ages)),
        staleness_max=max(ages),
        zero_std_groups=float(np.mean(equal)),
        masked_tokens=masked,
        removed_samples=sum(removed),
    )
