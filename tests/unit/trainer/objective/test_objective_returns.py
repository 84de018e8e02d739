"""Token rewards, GAE, discounts, distillation and whitening, against the recurrences written out."""

import dataclasses
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.trainer.objective.advantage import Advantages, Needs, discounted_sum, distilled, less_kl, needs, token_advantages, whitened
from shared.config.algorithm import AlgorithmSection
from shared.rewards.reward_advantage import reward_advantages

many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ESTIMATORS = ("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "ppo")


def tensors(arrays):
    return None if arrays is None else [torch.as_tensor(np.asarray(array, dtype=np.float64)) for array in arrays]


def advantages_of(config, rewards, groups, rollouts, masks, *, kl=None, values=None, teacher_gap=None, own=None):
    """From the batch's rewards to this rank's advantages, as arrays."""
    own = list(range(len(rewards))) if own is None else own
    trained = [torch.as_tensor(np.asarray(mask) != 0) for mask in masks]
    of_own, wanted = reward_advantages(config, rewards, groups, rollouts)[own], needs(config)
    found = token_advantages(
        config, of_own, trained, kl=tensors(kl) if wanted.kl else None, values=tensors(values) if wanted.values else None
    )
    advantages = found.advantages
    if wanted.teacher_gap:
        advantages = distilled(config, advantages, tensors(teacher_gap), [torch.zeros(mask.shape) for mask in trained], trained)
    returns = None if found.returns is None else [item.numpy() for item in found.returns]
    return Advantages([item.numpy() for item in advantages], returns)


def expected_of_one(config, reward, mask, kl, values, gap):
    """Advantages and returns of one sample, backwards token by token; lists over all R positions."""
    trained = [t for t, m in enumerate(mask) if m]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    later_advantage = later_value = later_return = 0.0
    for t in reversed(trained):
        token_reward = -config.kl_coef * kl[t] + (reward if t == trained[-1] else 0.0)
        if config.advantage_estimator == "ppo":
            delta = token_reward + config.gamma * later_value - values[t]
            later_advantage = delta + config.gamma * config.lambd * later_advantage
            later_value = values[t]
            advantages[t], returns[t] = later_advantage, later_advantage + values[t]
        elif config.advantage_estimator == "reinforce_plus_plus":
            later_return = token_reward + config.gamma * later_return
            advantages[t] = later_return
        elif config.advantage_estimator == "reinforce_plus_plus_baseline":
            advantages[t] = reward - config.kl_coef * kl[t]
        else:
            advantages[t] = reward
        if config.use_opd:
            advantages[t] -= config.opd_kl_coef * gap[t]
    return advantages, returns


def expected_rewards(config, rewards, groups, rollouts):
    """Compared within the group: (r - mean) / std, each rollout's samples with a share of its vote; rloo: r - the mean of the others."""
    if config.advantage_estimator in ("ppo", "reinforce_plus_plus") or config.disable_rewards_normalization:
        return rewards
    found = []
    for reward, group, own in zip(rewards, groups, rollouts, strict=True):
        of_rollout = {}
        for r, g, rollout in zip(rewards, groups, rollouts, strict=True):
            if g == group:
                of_rollout.setdefault(rollout, []).append(r)
        votes = {rollout: statistics.mean(rs) for rollout, rs in of_rollout.items()}
        if len(votes) == 1 or len({r for rs in of_rollout.values() for r in rs}) == 1:
            found.append(0.0)
        elif config.advantage_estimator == "rloo":
            found.append(reward - statistics.mean(vote for rollout, vote in votes.items() if rollout != own))
        else:
            by_std = not config.disable_grpo_std_normalization and config.advantage_estimator != "reinforce_plus_plus_baseline"
            mean = statistics.mean(votes.values())
            variance = sum(statistics.mean((r - mean) ** 2 for r in rs) for rs in of_rollout.values()) / (len(votes) - 1)
            found.append((reward - mean) / (math.sqrt(variance) + 1e-6 if by_std else 1.0))
    return found


@st.composite
def token_batches(draw):
    """Config, rewards, groups, rollouts, and lists over the tokens of each sample. Rewards are quarters: means of them are exact."""
    estimator = draw(st.sampled_from(ESTIMATORS))
    fields = {"kl_coef": [0.0, 0.1]} if estimator not in ("grpo", "gspo", "cispo", "rloo") else {}  # rloo's KL is part of its rewards
    fields |= (
        {"gamma": [1.0, 0.9, 0.0]} if estimator in ("ppo", "reinforce_plus_plus") else {"disable_rewards_normalization": [True, False]}
    )
    fields |= {"lambd": [1.0, 0.95, 0.0]} if estimator == "ppo" else {}
    fields |= {"disable_grpo_std_normalization": [True, False]} if estimator in ("grpo", "gspo", "cispo") else {}
    values = {name: draw(st.sampled_from(choices)) for name, choices in fields.items()}
    if values.get("disable_rewards_normalization"):
        values.pop("disable_grpo_std_normalization", None)
    distils = draw(st.sampled_from([{}, {"use_opd": True, "opd_type": "sglang", "opd_kl_coef": 0.5}]))
    config = AlgorithmSection(advantage_estimator=estimator, **values, **distils)
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, 7))
    rollouts = generator.integers(0, count, count)  # some fan out
    groups = [f"g{rollout % 2}" for rollout in rollouts]
    lengths = [int(n) for n in generator.integers(0, 7, count)]
    lengths[0] *= draw(st.sampled_from([1, 40]))  # over several blocks of the discounted sum
    masks = [generator.integers(0, 2, n).astype(np.uint8) for n in lengths]
    floats = [[generator.normal(size=n) * draw(st.sampled_from([1.0, 100.0])) for n in lengths] for _ in range(3)]
    return config, (generator.integers(-8, 9, count) / 4).tolist(), groups, rollouts.tolist(), masks, *floats


@many
@given(batch=token_batches(), part=st.randoms(use_true_random=False))
def test_every_estimator_equals_its_recurrence_on_any_part_of_the_batch(batch, part):
    config, rewards, groups, rollouts, masks, kl, values, gap = batch
    own = sorted(part.sample(range(len(masks)), part.randint(0, len(masks))))
    poisoned = [[np.where(m != 0, row, np.nan) for row, m in zip(rows, masks, strict=True)] for rows in (kl, values, gap)]
    lists = [[rows[i] for i in own] for rows in poisoned]  # what the mask excludes is not looked at
    found = advantages_of(
        config, rewards, groups, rollouts, [masks[i] for i in own], kl=lists[0], values=lists[1], teacher_gap=lists[2], own=own
    )
    of_sample = expected_rewards(config, rewards, groups, rollouts)
    assert (found.returns is None) == (config.advantage_estimator != "ppo")
    assert len(found.advantages) == len(own)
    for number, i in enumerate(own):
        advantages, returns = expected_of_one(config, of_sample[i], masks[i], kl[i], values[i], gap[i])
        np.testing.assert_allclose(found.advantages[number], advantages, rtol=1e-9, atol=1e-8)
        if found.returns is not None:
            np.testing.assert_allclose(found.returns[number], returns, rtol=1e-9, atol=1e-8)


@many
@given(size=st.sampled_from([0, 1, 2, 63, 64, 65, 200]), factor=st.sampled_from([0.0, 0.5, 0.99, 1.0]), seed=st.integers(0, 2**32 - 1))
def test_a_discounted_sum_over_many_blocks_equals_the_recurrence(size, factor, seed):
    values, expected, behind = np.random.default_rng(seed).normal(size=size), [], 0.0
    for value in values[::-1]:
        behind = value + factor * behind
        expected.append(behind)
    np.testing.assert_allclose(discounted_sum(torch.as_tensor(values), factor).numpy(), expected[::-1], rtol=1e-12, atol=1e-12)


def test_gae_by_hand():
    # the masked token in the middle takes no time; deltas 0.9*2-1 = 0.8 and 3-2 = 1; A = 0.8 + 0.9*0.5*1
    config = AlgorithmSection(advantage_estimator="ppo", gamma=0.9, lambd=0.5)
    found = advantages_of(config, [3.0], ["g"], None, [np.array([1, 0, 1, 0])], values=[np.array([1.0, 9.0, 2.0, 9.0])])
    np.testing.assert_allclose(found.advantages[0], [1.25, 0, 1, 0])
    np.testing.assert_allclose(found.returns[0], [2.25, 0, 3, 0])


def test_without_discount_the_advantage_is_what_is_still_to_come_less_the_value():
    config = AlgorithmSection(advantage_estimator="ppo", kl_coef=0.5)
    kl, values = np.array([1.0, 2.0, 4.0]), np.array([0.5, -1.0, 7.0])
    found = advantages_of(config, [10.0], ["g"], None, [np.ones(3)], kl=[kl], values=[values])
    np.testing.assert_allclose(found.advantages[0], [6.5 - 0.5, 7.0 + 1.0, 8.0 - 7.0])
    np.testing.assert_allclose(found.returns[0], [6.5, 7.0, 8.0])


@pytest.mark.parametrize("ranks", [[[0, 1, 2, 3]], [[0, 3], [2, 1]]])
def test_the_kl_of_rloo_is_part_of_the_reward_that_is_compared(ranks):
    config = AlgorithmSection(advantage_estimator="rloo", kl_coef=0.5)
    masks = [torch.tensor([True, True, False]), torch.tensor([True]), torch.tensor([True, False]), torch.tensor([False])]
    kl = [torch.tensor([1.0, 2.0, math.nan]), torch.tensor([4.0]), torch.tensor([-1.0, math.inf]), torch.tensor([9.0])]
    rewards, groups = [1.0, 2.0, 3.0, 4.0], ["g", "g", "g", "h"]
    sent = []
    for own in ranks:  # what each rank sends, first
        less_kl(config, rewards, own, [kl[i] for i in own], [masks[i] for i in own], lambda table: (sent.append(table), table)[1])
    for own in ranks:
        found = less_kl(config, rewards, own, [kl[i] for i in own], [masks[i] for i in own], lambda _: sum(sent))
        assert found.tolist() == [1.0 - 1.5, 2.0 - 2.0, 3.0 + 0.5, 4.0]
    of_sample = reward_advantages(config, found, groups)
    assert of_sample.tolist() == [-0.5 - 1.75, 0.0 - 1.5, 3.5 + 0.25, 0.0]
    advantages = token_advantages(config, of_sample, masks, kl=kl).advantages
    assert [item.tolist() for item in advantages] == [[-2.25, -2.25, 0.0], [-1.5], [3.75, 0.0], [0.0]]  # and not taken off once more


def test_rewards_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="zip"):
        advantages_of(AlgorithmSection(), [0.0, 1.0], ["g", "g"], ["r", "s"], [[1, 1]])


def test_distillation_is_taken_off_whatever_made_the_advantages():
    config = AlgorithmSection(use_opd=True, opd_type="megatron", opd_teacher_load="teacher", opd_kl_coef=2.0)
    mask, gap = torch.tensor([True, False, True]), torch.tensor([0.5, math.nan, 1.0])
    (found,) = distilled(config, [torch.tensor([3.0, 0.0, 3.0], dtype=torch.float64)], [gap + 1], [torch.ones(3)], [mask])
    assert found.tolist() == [2.0, 0.0, 1.0]


def test_what_an_objective_needs():
    nothing = Needs(proximal=False, reference=False, kl=False, values=False, teacher_gap=False, statistics=False)
    assert needs(AlgorithmSection()) == nothing
    assert needs(AlgorithmSection(loss_type="sft_loss"), 4) == nothing
    for steps, changes, wanted in [
        (2, {}, {"proximal"}),
        (1, {"kl_loss_coef": 0.1}, {"reference"}),
        (1, {"use_kl_loss": True}, {"reference"}),
        (1, {"advantage_estimator": "ppo"}, {"values"}),
        (1, {"advantage_estimator": "ppo", "kl_coef": 0.1}, {"values", "kl", "reference", "proximal"}),
        (1, {"advantage_estimator": "ppo", "kl_coef": 0.1, "off_policy": "rollout"}, {"values", "kl", "reference"}),
        (1, {"use_opd": True, "opd_type": "sglang"}, {"teacher_gap", "proximal"}),
        (1, {"use_m2po": True}, {"statistics", "proximal"}),
        (1, {"tis_batch_normalize": True}, {"statistics", "proximal"}),
    ]:
        assert needs(AlgorithmSection(**changes), steps) == dataclasses.replace(nothing, **dict.fromkeys(wanted, True))


@many
@given(seed=st.integers(0, 2**32 - 1), cut=st.integers(0, 8), scale=st.sampled_from([1e-3, 1.0, 1e4]))
def test_ranks_that_hold_parts_whiten_as_one_does(seed, cut, scale):
    generator = np.random.default_rng(seed)
    values = [torch.as_tensor(generator.normal(3.0, scale, int(n))) for n in generator.integers(0, 6, 8)]
    masks = [torch.as_tensor(generator.integers(0, 2, v.numel()) != 0) for v in values]
    whole = whitened(values, masks, lambda own: own)
    parts, sums = [slice(0, cut), slice(cut, 8)], []

    for call in range(2):  # what both ranks send in one call is known once both have made it
        sent = []
        for part in parts:
            made = iter(sums)
            mine = []

            def total(own, made=made, mine=mine):
                mine.append(own)
                return next(made, own)

            whitened(values[part], masks[part], total)
            sent.append(mine[call])
        sums.append(sent[0] + sent[1])
    by_parts = []
    for part in parts:
        made = iter(sums)
        by_parts += whitened(values[part], masks[part], lambda _, made=made: next(made))
    np.testing.assert_allclose(torch.cat(by_parts).numpy(), torch.cat(whole).numpy(), rtol=1e-7, atol=1e-7)
