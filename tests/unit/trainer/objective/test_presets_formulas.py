"""Each preset is its published formula: loss and gradients, in float64, against the formula written out sample by sample.

Every preset has a function of its own below. It takes the drawn batch and the policy's log-probs as leaves and gives the paper's loss
(``docs/algorithms.md`` says where that is); autograd gives its gradient. Nothing here is the trainer's but the config.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.config.algorithm import AlgorithmSection
from shared.config.config_reading import parse
from shared.config.presets import PRESETS
from tests.support.run_config import values
from tests.support.tables import table

from .objective_run import Drawn, drawn, outcome

LONGEST = 12


class Policies:
    """The log-probs of each sample's trained tokens under each policy, and what the formulas are made of."""

    def __init__(self, batch: Drawn, current: list[Tensor]) -> None:
        self.batch, self.count = batch, len(batch.rewards)
        kept = [torch.as_tensor(mask != 0) for mask in batch.masks]
        self.current = [row[mask] for row, mask in zip(current, kept, strict=True)]
        self.of = {name: [torch.as_tensor(row)[mask] for row, mask in zip(rows, kept, strict=True)] for name, rows in batch.values.items()}
        self.rewards = torch.tensor(batch.rewards, dtype=torch.float64)

    def members(self, index: int) -> list[int]:
        return [other for other in range(self.count) if self.batch.groups[other] == self.batch.groups[index]]

    def centred(self, index: int) -> Tensor:
        return self.rewards[index] - self.rewards[self.members(index)].mean()

    def grpo(self, index: int) -> Tensor:
        of_group = self.rewards[self.members(index)]
        if (of_group == of_group[0]).all():
            return torch.zeros((), dtype=torch.float64)
        return self.centred(index) / (of_group.std() + 1e-6)

    def ratio(self, index: int, old: str = "proximal") -> Tensor:
        return torch.exp(self.current[index] - self.of[old][index])

    def weight(self, index: int) -> Tensor:
        return torch.exp(self.of["proximal"][index] - self.of["rollout"][index])

    def k1(self, index: int, old: str = "proximal") -> Tensor:
        return self.of[old][index] - self.of["reference"][index]


def ppo_term(ratio: Tensor, advantage: Tensor | float, low: float = 0.2, high: float = 0.2) -> Tensor:
    """What PPO maximises, for each token."""
    return torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)


def mean_of_means(of_samples: list[Tensor]) -> Tensor:
    return torch.stack([row.mean() for row in of_samples]).mean()


def mean_of_tokens(of_samples: list[Tensor]) -> Tensor:
    return torch.cat(of_samples).mean()


def whiten(of_samples: list[Tensor]) -> list[Tensor]:
    all_tokens = torch.cat(of_samples)
    return [(row - all_tokens.mean()) / torch.sqrt(all_tokens.var() + 1e-8) for row in of_samples]


def grpo(p: Policies) -> Tensor:
    surrogate = mean_of_means([ppo_term(p.ratio(i), p.grpo(i)) for i in range(p.count)])
    gap = [p.of["reference"][i] - p.current[i] for i in range(p.count)]
    return -surrogate + 0.04 * mean_of_means([torch.exp(x) - x - 1 for x in gap])


def dr_grpo(p: Policies) -> Tensor:
    return -torch.stack([ppo_term(p.ratio(i), p.centred(i)).sum() / LONGEST for i in range(p.count)]).mean()


def dapo(p: Policies) -> Tensor:
    return -mean_of_tokens([ppo_term(p.ratio(i), p.grpo(i), 0.2, 0.28) for i in range(p.count)])


def gspo(p: Policies) -> Tensor:
    ratios = [torch.exp((p.current[i] - p.of["proximal"][i]).mean()) for i in range(p.count)]
    return -torch.stack([ppo_term(ratio, p.grpo(i), 3e-4, 4e-4) for i, ratio in enumerate(ratios)]).mean()


def cispo(p: Policies) -> Tensor:
    weights = [torch.clamp(p.ratio(i), 0.0, 5.0).detach() for i in range(p.count)]
    return -mean_of_tokens([weights[i] * p.grpo(i) * p.current[i] for i in range(p.count)])


def rloo(p: Policies) -> Tensor:
    """REINFORCE of whole responses: on the policy that drew, where the clip of the ratio 1 is none."""
    rewards = [p.rewards[i] - 0.05 * p.k1(i).sum() for i in range(p.count)]
    losses = []
    for i in range(p.count):
        others = [rewards[j] for j in p.members(i) if j != i]
        losses.append(-(rewards[i] - torch.stack(others).mean()) * p.current[i].sum())
    return torch.stack(losses).mean()


def gae(p: Policies) -> tuple[list[Tensor], list[Tensor]]:
    advantages, returns = [], []
    for i in range(p.count):
        reward, value = -0.05 * p.k1(i), p.of["old_values"][i]
        reward[-1] += p.rewards[i]
        found = torch.zeros(len(value), dtype=torch.float64)
        for t in range(len(value)):
            for later in range(t, len(value)):
                following = value[later + 1] if later + 1 < len(value) else 0.0
                found[t] += (1.0 * 0.95) ** (later - t) * (reward[later] + 1.0 * following - value[later])
        advantages.append(found)
        returns.append(found + value)
    return advantages, returns


def ppo(p: Policies) -> Tensor:
    advantages = whiten(gae(p)[0])
    return -mean_of_means([ppo_term(p.ratio(i), advantages[i]) for i in range(p.count)])


def reinforce_plus_plus(p: Policies) -> Tensor:
    to_come = []
    for i in range(p.count):
        penalty = 0.01 * p.k1(i)
        to_come.append(torch.stack([p.rewards[i] - penalty[t:].sum() for t in range(len(penalty))]))
    advantages = whiten(to_come)
    return -mean_of_means([ppo_term(p.ratio(i), advantages[i]) for i in range(p.count)])


def reinforce_plus_plus_baseline(p: Policies) -> Tensor:
    advantages = whiten([p.centred(i) - 0.01 * p.k1(i) for i in range(p.count)])
    return -mean_of_means([ppo_term(p.ratio(i), advantages[i]) for i in range(p.count)])


def dual_clip(p: Policies) -> Tensor:
    terms = []
    for i in range(p.count):
        term, advantage = ppo_term(p.ratio(i), p.grpo(i)), p.grpo(i)
        terms.append(torch.maximum(term, 3.0 * advantage) if advantage < 0 else term)
    return -mean_of_means(terms)


def weighed(p: Policies, weight_of: Callable[[int], Tensor]) -> Tensor:
    """PPO around the proximal policy, each token weighted for the policy that drew it."""
    return -mean_of_means([weight_of(i) * ppo_term(p.ratio(i), p.grpo(i)) for i in range(p.count)])


def decoupled(p: Policies) -> Tensor:
    return weighed(p, lambda i: torch.clamp(p.weight(i), max=2.0))


def icepop(p: Policies) -> Tensor:
    return weighed(p, lambda i: torch.where((p.weight(i) >= 0.5) & (p.weight(i) <= 5.0), p.weight(i), torch.zeros(())))


def mis(p: Policies) -> Tensor:
    def weight(i: int) -> Tensor:
        log_weight = p.of["proximal"][i] - p.of["rollout"][i]
        accepted = 0.99 <= math.exp(log_weight.mean()) <= 1.001 and p.weight(i).min() >= 1e-4
        return torch.clamp(torch.exp(log_weight.sum()), 0.0, 2.0) * float(accepted)

    return weighed(p, weight)


def opsm(p: Policies) -> Tensor:
    terms, kl = [], []
    for i in range(p.count):
        distance = (p.of["rollout"][i] - p.current[i]).mean()
        kept = 0.0 if p.grpo(i) < 0 and distance > 1e-4 else 1.0
        terms.append(kept * ppo_term(p.ratio(i, "rollout"), p.grpo(i)))
        x = p.of["reference"][i] - p.current[i]
        kl.append(p.ratio(i, "rollout") * (torch.exp(x) - x - 1))
    return -mean_of_means(terms) + 0.001 * mean_of_means(kl)


def m2po(p: Policies) -> Tensor:
    """Token by token the largest second moment goes, until the mean of the others is at most 0.04."""
    start = [p.of["proximal"][i] - p.of["rollout"][i] for i in range(p.count)]
    counted = sorted(float(x**2) for i in range(p.count) for x in start[i] if x * p.grpo(i) > 0)
    gone = []
    while counted and sum(counted) / len(counted) > 0.04:
        gone.append(counted.pop())
    limit = (gone[-1] + counted[-1]) / 2 if gone and counted else math.inf
    terms = []
    for i in range(p.count):
        now = (p.current[i] - p.of["rollout"][i]).detach()
        kept = ~((now * p.grpo(i) > 0) & (now.square() > limit))
        terms.append(kept * p.ratio(i, "rollout") * p.grpo(i))
    return -mean_of_tokens(terms)


def rollout_logprobs(p: Policies) -> Tensor:
    return -mean_of_means([ppo_term(p.ratio(i, "rollout"), p.grpo(i)) for i in range(p.count)])


def opd(p: Policies) -> Tensor:
    gap = [p.of["proximal"][i] - p.of["teacher"][i] for i in range(p.count)]
    return -mean_of_means([ppo_term(p.ratio(i), p.grpo(i) - gap[i]) for i in range(p.count)])


def rejection_sampling(p: Policies) -> Tensor:
    return -mean_of_means([p.current[i] for i in range(p.count) if p.rewards[i] > 0])


FORMULAS: dict[str, Callable[[Policies], Tensor]] = (
    {
        found.__name__: found
        for found in (grpo, dr_grpo, dapo, gspo, cispo, rloo, ppo, reinforce_plus_plus, reinforce_plus_plus_baseline, dual_clip, decoupled)
    }
    | {found.__name__: found for found in (icepop, mis, opsm, m2po, rollout_logprobs, opd, rejection_sampling)}
    | {"tis": decoupled}
)


def objective(tmp_path: Path, preset: str) -> AlgorithmSection:
    given = values(tmp_path, algorithm={"preset": preset}, rollout={"rollout_max_response_len": LONGEST})
    return parse(given).algorithm


def batch_of(preset: str, seed: int) -> Drawn:
    """Policies far enough from one another for every clip, mask and rejection to act; of MIS's, near enough for some to stay."""
    batch = drawn(seed, nats=0.02 if preset in ("mis", "gspo") else 0.4)
    if preset == "rloo":  # one step, on the policy that drew
        batch.values["current"] = [row.copy() for row in batch.values["proximal"]]
    return batch


@table("preset", PRESETS)
def test_a_preset_is_its_formula(tmp_path: Path, preset: str) -> None:
    config = objective(tmp_path, preset)
    for seed in range(4):
        batch = batch_of(preset, seed)
        current = [torch.tensor(row, requires_grad=True) for row in batch.values["current"]]
        wanted = FORMULAS[preset](Policies(batch, current))
        wanted.backward()
        found = outcome(config, batch)
        assert any(np.abs(row).max() > 0 for row in found.gradients)
        if preset != "rloo":  # whose surrogate has the gradient, and another value
            assert found.loss == pytest.approx(wanted.item(), rel=1e-9, abs=1e-12)
        for row, leaf in zip(found.gradients, current, strict=True):
            np.testing.assert_allclose(row, np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_ppos_critic_learns_its_formula(tmp_path: Path) -> None:
    for seed in range(4):
        batch = drawn(seed)
        values_of = [torch.tensor(row, requires_grad=True) for row in batch.values["new_values"]]
        p = Policies(batch, [torch.as_tensor(row) for row in batch.values["current"]])
        losses = []
        for i, (leaf, returns) in enumerate(zip(values_of, gae(p)[1], strict=True)):
            value, old = leaf[torch.as_tensor(batch.masks[i] != 0)], p.of["old_values"][i]
            near = old + torch.clamp(value - old, -0.2, 0.2)
            losses.append(torch.maximum((value - returns) ** 2, (near - returns) ** 2))
        wanted = mean_of_means(losses)
        wanted.backward()
        found = outcome(objective(tmp_path, "ppo"), batch)
        assert found.critic is not None
        assert found.critic[0] == pytest.approx(wanted.item(), rel=1e-9)
        for row, leaf in zip(found.critic[1], values_of, strict=True):
            np.testing.assert_allclose(row, leaf.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_every_formula_is_another() -> None:
    """No two presets are one under two names, but for TIS, which is decoupled PPO with another published bound."""
    seen: dict[tuple[float, ...], str] = {}
    batch = drawn(0, nats=0.4)
    for name, formula in FORMULAS.items():
        current = [torch.tensor(row, requires_grad=True) for row in batch.values["current"]]
        formula(Policies(batch, current)).backward()
        gradient = tuple(np.concatenate([np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy() for leaf in current]).round(12))
        assert seen.setdefault(gradient, name) in (name, "decoupled")
