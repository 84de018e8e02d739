"""From a batch's references to what the actor trains on: payloads read, advantages, per-token weights, packed micro-batches."""

from __future__ import annotations

import itertools
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
    """What is known of a batch before training: means over samples, ages in weight versions."""

    reward: float
    response_tokens: int
    tokens: int
    truncated: float
    staleness_mean: float
    staleness_max: int
    zero_std_groups: float


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
    rewards: list[float] = []
    for group in batch.groups:
        samples = sample.decode(store.read(group.payload.keys))
        if len(samples) != len(group.rewards):
            raise BadMessage(f"group {group.group} of step {batch.step}: {len(samples)} samples in the store, {len(group.rewards)} rewards")
        raw += samples
        rewards += group.rewards
    advantages: list[float | NDArray[np.floating]] = list(reward_advantages(objective, rewards, [one.group for one in raw]))
    if objective.normalize_advantages:
        advantages = list(whiten_samples(advantages, [one.mask for one in raw]))
    train = [
        TrainSample(
            prompt_tokens=one.prompt,
            response_tokens=one.response,
            loss_mask=one.mask,
            rollout_log_probs=one.log_probs,
            versions=one.versions(),
            advantage=advantage,
            group=one.group,
            rollout_id=one.index,
        )
        for one, advantage in zip(raw, advantages, strict=True)
    ]
    return TrainBatch(batch.step, batch.version, _deal(train, optimizer_steps), _figures(batch, raw, rewards))


def micro_batches(
    samples: list[TrainSample], objective: ObjectiveConfig, *, dp_rank: int, dp_size: int, max_tokens: int, vocab_size: int
) -> list[PackedBatch]:
    """This rank's micro-batches of one optimizer step, each token weighted so that sums over micro-batches and ranks are means."""
    rollouts = [(one.group, one.rollout_id) for one in samples]
    weights = sample_weights([one.trained_tokens for one in samples], rollouts, objective.reducer, objective.fixed_length)
    return rank_micro_batches(samples, weights, dp_rank=dp_rank, dp_size=dp_size, max_tokens=max_tokens, vocab_size=vocab_size)


def _deal(samples: list[TrainSample], parts: int) -> list[list[TrainSample]]:
    """Consecutive parts whose sizes differ by one sample at most; every sample is in one."""
    edges = [len(samples) * part // parts for part in range(parts + 1)]
    return [samples[start:end] for start, end in itertools.pairwise(edges)]


def _figures(batch: Batch, raw: list[sample.Sample], rewards: list[float]) -> BatchFigures:
    ages = [batch.version - meta.oldest for group in batch.groups for meta in group.samples]
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
    )
