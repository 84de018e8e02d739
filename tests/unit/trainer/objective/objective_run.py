"""A whole objective on drawn batches: rewards to the loss and its gradients, as the trainer puts them together."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from services.trainer.loss_inputs import old_log_probs
from services.trainer.objective.advantage import Needs, distilled, less_kl, needs, token_advantages, whitened
from services.trainer.objective.correction import Statistics, batch_statistics
from services.trainer.objective.custom_objective import CustomFunctions
from services.trainer.objective.loss import ValueLoss, loss_of
from services.trainer.objective.policy_gradient import REWARD_KL, kl_estimate
from services.trainer.objective.reduce import passing, rollout_parts, sample_weights
from services.trainer.packing import PackedBatch, pack
from shared.config.algorithm import AlgorithmSection
from shared.rewards.reward_advantage import reward_advantages
from tests.support.train_samples import train_sample


@dataclass
class Drawn:
    """A batch of N samples: of each its reward, group, rollout, mask, and lists of float64 [R] by name."""

    rewards: list[float]
    groups: list[int]
    rollouts: list[tuple[int, int]]
    masks: list[np.ndarray]
    values: dict[str, list[np.ndarray]]

    @cached_property
    def packed(self) -> PackedBatch:
        """The samples end to end, with the fields that no objective changes."""
        rows = enumerate(zip(self.masks, self.values["rollout"], strict=True))
        samples = [
            train_sample(
                [1], range(len(mask)), 0, mask=mask.astype(np.uint8), log_probs=row.astype(np.float32), index=n, rollout=n, group="g"
            )
            for n, (mask, row) in rows
        ]
        fields = {"proximal_log_probs": "proximal", "rollout_log_probs": "rollout", "values": "old_values", "ref_log_probs": "reference"}
        return pack(samples, [0.0] * len(samples)).with_fields(**{name: _spread(self.values[own]) for name, own in fields.items()})


NAMES = ("current", "proximal", "rollout", "reference", "teacher", "old_values", "new_values", "entropy")


def drawn(seed: int, nats: float = 0.3, fan_out: bool = False) -> Drawn:
    """Three groups of four rollouts; responses of 1 to 6 tokens, of which at least one is trained. ``nats``: between the policies."""
    generator = np.random.default_rng(seed)
    rollouts = [(group, rollout) for group in range(3) for rollout in range(4) for _ in range(1 + (fan_out and rollout == 1))]
    lengths = generator.integers(1, 7, len(rollouts))
    masks = [generator.integers(0, 2, length) for length in lengths]
    for mask in masks:
        mask[generator.integers(0, len(mask))] = 1
    bases = [-np.abs(generator.normal(0, 2, length)) - 2 for length in lengths]
    values = {name: [base + generator.normal(0, nats, base.size) for base in bases] for name in NAMES}
    values["rollout"] = [row.astype(np.float32).astype(np.float64) for row in values["rollout"]]
    for name in ("old_values", "new_values"):
        values[name] = [generator.normal(0, 0.5, length) for length in lengths]
    rewards = generator.integers(-2, 3, len(rollouts)) / 2
    return Drawn(rewards.tolist(), [group for group, _ in rollouts], rollouts, masks, values)


@dataclass
class Outcome:
    """loss, metrics: of the policy. gradients: by each sample's current log-probs, [R]. critic: loss and gradients of the critic's."""

    loss: float
    metrics: dict[str, float]
    gradients: list[np.ndarray]
    advantages: list[np.ndarray]
    critic: tuple[float, list[np.ndarray]] | None


def outcome(config: AlgorithmSection, batch: Drawn) -> Outcome:
    masks = [torch.as_tensor(mask != 0) for mask in batch.masks]
    advantages, returns = _advantages(config, batch, masks)
    passes = passing(config, batch.rewards)
    kept = [index for index in range(len(masks)) if passes[index]]
    trained = [int(masks[index].sum()) for index in kept]
    of_kept = sample_weights(
        trained, rollout_parts(trained, [batch.rollouts[index] for index in kept]), config.reducer, config.loss_divisor
    )
    weights = np.zeros(len(masks))
    weights[kept] = of_kept
    packed = _packed(needs(config), batch, weights, advantages, returns)
    statistics = batch_statistics(config, [packed]) if needs(config).statistics else Statistics()
    current = _spread(batch.values["current"]).requires_grad_()
    entropy = _spread(batch.values["entropy"]) if config.entropy_coef else None
    loss, metrics = loss_of(config, CustomFunctions(), 0, statistics, 1.0)(current, entropy, packed)
    loss.backward()
    return Outcome(
        loss.item(),
        {name: value.item() for name, value in metrics.items()},
        _rows(current.grad, batch),
        [item.numpy() for item in advantages],
        _critic(config, batch, packed) if config.has_critic else None,
    )


def _advantages(config: AlgorithmSection, batch: Drawn, masks: list[Tensor]) -> tuple[list[Tensor], list[Tensor] | None]:
    def of(name: str) -> list[Tensor]:
        return [torch.as_tensor(row) for row in batch.values[name]]

    old = of("rollout" if old_log_probs(config) == "rollout_log_probs" else "proximal")
    pairs = zip(old, of("reference"), strict=True)
    kl = [kl_estimate(a, b, config.kl_loss_type or REWARD_KL) for a, b in pairs] if needs(config).kl else None
    rewards = batch.rewards
    if kl is not None and config.advantage_estimator == "rloo":
        rewards = less_kl(config, rewards, range(len(masks)), kl, masks, lambda table: table)
    shaped = reward_advantages(config, rewards, batch.groups, batch.rollouts)
    found = token_advantages(config, shaped, masks, kl=kl, values=of("old_values") if needs(config).values else None)
    advantages = found.advantages
    if needs(config).teacher_gap:
        advantages = distilled(config, advantages, old, of("teacher"), masks)
    return whitened(advantages, masks, lambda table: table) if config.normalize_advantages else advantages, found.returns


def _packed(wanted: Needs, batch: Drawn, weights: np.ndarray, advantages: list[Tensor], returns: list[Tensor] | None) -> PackedBatch:
    own = {
        "weights": _spread([weight * mask for weight, mask in zip(weights, batch.masks, strict=True)]),
        "advantages": _spread(advantages),
    }
    if returns is not None:
        own["returns"] = _spread(returns)
    found = batch.packed.with_fields(**own)
    return found if wanted.reference else replace(found, fields={name: x for name, x in found.fields.items() if name != "ref_log_probs"})


def _critic(config: AlgorithmSection, batch: Drawn, packed: PackedBatch) -> tuple[float, list[np.ndarray]]:
    values = _spread(batch.values["new_values"]).requires_grad_()
    loss, _ = ValueLoss(config.value_clip)(values, None, packed)
    loss.backward()
    return loss.item(), _rows(values.grad, batch)


def _spread(rows: list) -> Tensor:
    """Rows of response tokens in their places behind prompts of one token: [T]."""
    return torch.cat([torch.cat([torch.as_tensor(row, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]) for row in rows])


def _rows(values: Tensor, batch: Drawn) -> list[np.ndarray]:
    pieces = values.split([len(mask) + 1 for mask in batch.masks])
    return [piece[:-1].numpy() for piece in pieces]
