"""Rewards to advantages, against the standard library's statistics."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from services.trainer.objective.advantage import whitened
from shared.config.algorithm import AlgorithmSection
from shared.rewards.reward_advantage import group_relative, reward_advantages
from tests.support.tables import table

many = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
rewards_of_groups = st.lists(st.tuples(st.floats(-100, 100, allow_subnormal=False), st.sampled_from("abcd")), min_size=1, max_size=20)


def expected_advantages(rewards, groups, normalize_std):
    expected = []
    for reward, group in zip(rewards, groups, strict=True):
        of_group = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(set(of_group)) == 1:
            expected.append(0.0)
            continue
        spread = statistics.stdev(of_group) + 1e-6 if normalize_std else 1.0
        expected.append((reward - statistics.mean(of_group)) / spread)
    return expected


@many
@given(batch=rewards_of_groups, normalize_std=st.booleans())
def test_group_relative_equals_the_formula(batch, normalize_std):
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    advantages = group_relative(rewards, groups, normalize_std=normalize_std)
    assert advantages.dtype == np.float64
    # a spread near 1e-6 divides rounding of 1e-14 (rewards up to 100) by it
    expected = expected_advantages(rewards, groups, normalize_std)
    np.testing.assert_allclose(advantages, expected, rtol=1e-7, atol=1e-7)


@many
@given(batch=rewards_of_groups, order=st.randoms(use_true_random=False))
def test_order_of_the_batch_does_not_matter(batch, order):
    places = list(range(len(batch)))
    order.shuffle(places)
    straight = group_relative([r for r, _ in batch], [g for _, g in batch])
    shuffled = group_relative([batch[i][0] for i in places], [batch[i][1] for i in places])
    np.testing.assert_allclose(shuffled, straight[places], rtol=1e-7, atol=1e-7)


@many
@given(reward=st.floats(-1e6, 1e6), count=st.integers(1, 20))
def test_equal_rewards_give_exactly_zero(reward, count):
    assert group_relative([reward] * count, ["g"] * count).tolist() == [0.0] * count


def test_equal_rewards_whose_mean_differs_in_the_last_bit():
    assert np.mean([0.1] * 3) != 0.1
    assert group_relative([0.1] * 3, ["g"] * 3).tolist() == [0.0] * 3


def test_a_group_of_one_gives_exactly_zero():
    assert group_relative([5.0, 1.0, 0.0], ["one", "two", "two"])[0] == 0.0


def test_std_is_unbiased():
    np.testing.assert_allclose(group_relative([0, 1], ["g", "g"]), [-0.5 / (math.sqrt(0.5) + 1e-6), 0.5 / (math.sqrt(0.5) + 1e-6)])


@many
@given(batch=rewards_of_groups, fans=st.lists(st.integers(1, 4), min_size=20, max_size=20))
def test_a_rollout_has_one_vote_however_many_samples_it_fans_out_into(batch, fans):
    by_rollout = group_relative([r for r, _ in batch], [g for _, g in batch])
    rollouts = [i for i in range(len(batch)) for _ in range(fans[i])]
    by_sample = group_relative([batch[i][0] for i in rollouts], [batch[i][1] for i in rollouts], rollouts)
    np.testing.assert_allclose(by_sample, by_rollout[rollouts], rtol=1e-7, atol=1e-7)


def weighed_advantages(rewards, groups, rollouts, normalize_std):
    """The formula with one vote a rollout, split evenly over its samples: mean and deviation of the same weighted samples."""
    expected = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [(r, q) for r, g, q in zip(rewards, groups, rollouts, strict=True) if g == group]
        sizes = {q: sum(other == q for _, other in members) for _, q in members}
        if len(sizes) == 1 or len({r for r, _ in members}) == 1:
            expected.append(0.0)
            continue
        mean = math.fsum(r / sizes[q] for r, q in members) / len(sizes)
        variance = math.fsum((r - mean) ** 2 / sizes[q] for r, q in members) / (len(sizes) - 1)
        expected.append((reward - mean) / (math.sqrt(variance) + 1e-6 if normalize_std else 1.0))
    return expected


@many
@given(
    batch=st.lists(
        st.tuples(st.floats(-100, 100, allow_subnormal=False).map(lambda r: round(r, 3)), st.sampled_from("ab"), st.integers(0, 3)),
        min_size=1,
        max_size=16,
    ),
    normalize_std=st.booleans(),
)
def test_mean_and_deviation_are_of_one_population(batch, normalize_std):
    rewards, groups, rollouts = [r for r, _, _ in batch], [g for _, g, _ in batch], [(g, q) for _, g, q in batch]
    found = group_relative(rewards, groups, rollouts, normalize_std=normalize_std)
    np.testing.assert_allclose(found, weighed_advantages(rewards, groups, rollouts, normalize_std), rtol=1e-7, atol=1e-7)
    for group in set(groups):  # the rollouts' votes cancel, and no advantage is out of proportion
        of_group = [index for index, other in enumerate(groups) if other == group]
        sizes = {q: sum(rollouts[i] == q for i in of_group) for q in rollouts}
        assert abs(sum(found[i] / sizes[rollouts[i]] for i in of_group)) < 1e-6 * max(1.0, abs(found).max())
        if normalize_std:
            assert abs(found[of_group]).max() <= len(of_group)


def test_samples_of_rollouts_with_nearly_equal_means_are_divided_by_their_own_deviation():
    found = group_relative([0.9, 0.1, 0.8, 0.201], ["g"] * 4, [0, 0, 1, 1])
    deviation = math.sqrt((0.39975**2 + 0.40025**2 + 0.29975**2 + 0.29925**2) / 2)
    np.testing.assert_allclose(found, np.array([0.39975, -0.40025, 0.29975, -0.29925]) / (deviation + 1e-6), rtol=1e-9)


def test_the_vote_of_a_rollout_is_the_mean_of_its_samples():
    # votes 1 (of 0 and 2), 3: mean 2
    assert group_relative([0.0, 2.0, 3.0], ["g"] * 3, ["a", "a", "b"], normalize_std=False).tolist() == [-2.0, 0.0, 1.0]
    assert group_relative([0.0, 2.0], ["g"] * 2, ["a", "a"]).tolist() == [0.0, 0.0]  # a rollout is not compared with itself


def test_unlike_lengths_are_refused():
    with pytest.raises(ValueError, match="zip"):
        group_relative([0.0, 1.0], ["g"])
    with pytest.raises(ValueError, match="zip"):
        group_relative([0.0, 1.0], ["g", "g"], ["r"])


@table("estimator", ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"])
@table("normalize_std", [True, False])
def test_the_estimator_chooses_the_normalisation(estimator, normalize_std):
    rewards, groups = [0.0, 1.0, 3.0], ["g"] * 3
    of_grpo = not normalize_std and estimator != "reinforce_plus_plus_baseline"
    config = AlgorithmSection(advantage_estimator=estimator, disable_grpo_std_normalization=of_grpo)
    by_std = normalize_std and estimator != "reinforce_plus_plus_baseline"
    expected = expected_advantages(rewards, groups, by_std)
    np.testing.assert_allclose(reward_advantages(config, rewards, groups), expected, rtol=1e-12)


def test_rewards_may_stay_raw():
    config = AlgorithmSection(disable_rewards_normalization=True)
    assert reward_advantages(config, [0.5, 2.0], ["g", "g"]).tolist() == [0.5, 2.0]


def whiten(values, mask):
    x, trained = torch.tensor(values, dtype=torch.float64), torch.tensor(mask, dtype=torch.bool)
    return whitened([x], [trained], lambda own: own)[0].numpy()


@many
@given(values=st.lists(st.tuples(st.floats(-50, 50, allow_subnormal=False), st.booleans()), max_size=30))
def test_whitening_equals_the_formula(values):
    kept = [v for v, m in values if m]
    variance = statistics.variance(kept) if len(kept) > 1 else 0.0
    mean = statistics.mean(kept) if kept else 0.0
    expected = [(v - mean) / math.sqrt(variance + 1e-8) if m else 0.0 for v, m in values]
    np.testing.assert_allclose(whiten([v for v, _ in values], [m for _, m in values]), expected, rtol=1e-9, atol=1e-9)


@many
@given(values=st.lists(st.floats(-50, 50), min_size=2, max_size=30))
def test_whitened_values_have_mean_0_and_variance_1(values):
    assume(statistics.stdev(values) > 1e-2)
    whitened = whiten(values, [True] * len(values))
    assert abs(whitened.mean()) < 1e-9
    assert whitened.var(ddof=1) == pytest.approx(1.0, abs=1e-3)


def test_whitening_does_not_see_what_is_masked():
    mask = [True, False, True, True, False]
    np.testing.assert_array_equal(whiten([1.0, 0, 2, 4, 0], mask), whiten([1.0, math.nan, 2, 4, math.inf], mask))


def test_whitening_weighs_samples_by_their_trained_tokens():
    masks = [torch.tensor([True, True, False]), torch.zeros(0, dtype=torch.bool), torch.tensor([True])]
    values = [torch.full((3,), 2.0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64)]
    found = whitened(values, masks, lambda own: own)
    flat = whiten([2.0, 2.0, 2.0, -1.0], [True, True, False, True])
    np.testing.assert_array_equal(torch.cat(found).numpy(), flat)
    assert flat[2] == 0.0
    assert whitened([], [], lambda own: own) == []
