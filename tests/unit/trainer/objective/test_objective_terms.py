"""Single terms on numbers worked out by hand, and the properties that give each its name."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.trainer.objective.correction import importance_weight, off_policy_sequence_mask
from services.trainer.objective.policy_gradient import clipped_surrogate, clipped_weight, kl_estimate, ratio_of
from services.trainer.objective.reduce import sequence_mean, sequence_sum
from shared.config.algorithm import AlgorithmSection

TWO_SEQUENCES = torch.tensor([0, 3, 5], dtype=torch.int32)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def d_of(*ratios: float) -> torch.Tensor:
    return -torch.log(tensor(*ratios))


def test_clip_bounds_only_the_profitable_side():
    # clipped where the ratio left the bounds in the advantage's direction, free where it has to come back
    ratios, advantages = (1.5, 1.5, 0.5, 0.5, 1.1, 1.0), tensor(1, -1, 1, -1, 2, 0)
    terms = clipped_surrogate(d_of(*ratios), advantages, 0.8, 1.28)
    torch.testing.assert_close(terms.loss, tensor(-1.28, 1.5, -0.5, 0.8, -2.2, 0.0))
    assert terms.clipped.tolist() == [True, False, False, True, False, False]


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    terms = clipped_surrogate(d_of(10.0, 10.0, 2.0), tensor(-1, 1, -1), 0.8, 1.2, dual_clip=3.0)
    torch.testing.assert_close(terms.loss, tensor(3.0, -1.2, 2.0))


def test_a_clipped_token_has_no_gradient_in_ppo_and_one_in_cispo():
    log_probs, old, advantages = tensor(-1.0, -1.0), tensor(-3.0, -1.05), tensor(1.0, 1.0)
    by_ppo, by_cispo = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    clipped_surrogate(old - by_ppo, advantages, 0.8, 1.2).loss.sum().backward()
    terms = clipped_weight(old - by_cispo, by_cispo, advantages, 0.8, 1.2)
    terms.loss.sum().backward()
    torch.testing.assert_close(by_ppo.grad, tensor(0.0, -math.exp(0.05)))
    torch.testing.assert_close(by_cispo.grad, tensor(-1.2, -math.exp(0.05)))
    assert terms.clipped.tolist() == [True, False]


def test_ratio_is_bounded_and_its_gradient_ends_there():
    x = tensor(-1e4, -20.5, 0.0, 20.5, 1e4).requires_grad_()
    ratio = ratio_of(x)
    ratio.sum().backward()
    torch.testing.assert_close(ratio.detach(), torch.exp(tensor(-20, -20, 0, 20, 20)))
    assert x.grad.tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_sums_stay_inside_their_sequence():
    values, mask = tensor(1, 2, 3, 10, 20), torch.tensor([True, False, True, True, True])
    torch.testing.assert_close(sequence_sum(values, TWO_SEQUENCES), tensor(6, 6, 6, 30, 30))
    torch.testing.assert_close(sequence_mean(values, mask, TWO_SEQUENCES), tensor(2, 2, 2, 15, 15))
    untrained = sequence_mean(values, torch.zeros(5, dtype=torch.bool), TWO_SEQUENCES)
    assert untrained.tolist() == [0.0] * 5


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5), seed=st.integers(0, 2**32 - 1))
def test_sequence_mean_has_the_gradient_of_finite_differences(lengths, seed):
    torch.manual_seed(seed)
    values = torch.randn(sum(lengths), dtype=torch.float64, requires_grad=True)
    mask = torch.rand(sum(lengths)) < 0.6
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    shape = torch.randn(sum(lengths), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: sequence_mean(x, mask, bounds) * shape, [values])


def test_tis_clamps_and_icepop_pops():
    log_ratio = torch.log(tensor(0.1, 0.9, 3.0, 0.5, 1.0))
    mask = torch.ones(5, dtype=torch.bool)
    tis, icepop = (
        importance_weight(log_ratio, mask, TWO_SEQUENCES, AlgorithmSection(tis_mode=mode, tis_clip_low=0.5)) for mode in ("clip", "mask")
    )
    torch.testing.assert_close(tis.weight, tensor(0.5, 0.9, 2.0, 0.5, 1.0))
    torch.testing.assert_close(icepop.weight, tensor(0.0, 0.9, 0.0, 0.5, 1.0))
    torch.testing.assert_close(tis.ratio, tensor(0.1, 0.9, 3.0, 0.5, 1.0))
    assert tis.changed.tolist() == icepop.changed.tolist() == [True, False, True, False, False]


def test_importance_levels():
    log_ratio, mask = torch.log(tensor(2.0, 7.0, 4.0, 3.0, 3.0)), torch.tensor([True, False, True, True, True])
    of = {
        level: importance_weight(log_ratio, mask, TWO_SEQUENCES, AlgorithmSection(tis_level=level, tis_clip=100.0)).weight
        for level in ("token", "sequence", "geometric")
    }
    torch.testing.assert_close(of["token"], tensor(2, 7, 4, 3, 3))
    torch.testing.assert_close(of["sequence"], tensor(8, 8, 8, 9, 9))
    torch.testing.assert_close(of["geometric"], tensor(8, 8, 8, 9, 9).sqrt())


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_importance_weights_carry_no_gradient(level):
    proximal = tensor(-1, -2, -3, -4, -5).requires_grad_()
    mask = torch.ones(5, dtype=torch.bool)
    weighted = importance_weight(proximal + 1.0, mask, TWO_SEQUENCES, AlgorithmSection(tis_level=level))
    assert not weighted.weight.requires_grad
    assert not weighted.ratio.requires_grad


def test_opsm_drops_only_far_sequences_of_negative_advantage():
    log_probs, mask = tensor(-1.0, -9.0, -1.4, -1.0, -1.0), torch.tensor([True, False, True, True, True])
    old = torch.full((5,), -1.0, dtype=torch.float64)  # mean distances: 0.2 (the -9 is not trained), 0
    for advantage, delta, stays in [(-1.0, 0.1, False), (-1.0, 0.3, True), (1.0, 0.1, True), (0.0, 0.1, True)]:
        advantages = torch.full((5,), advantage, dtype=torch.float64)
        kept = off_policy_sequence_mask(old - log_probs, advantages, mask, TWO_SEQUENCES, delta)
        assert kept.tolist() == [stays] * 3 + [True] * 2


def test_kl_estimates():
    x = 0.5
    log_probs, reference = tensor(-1.0), tensor(-1.0 - x)
    k3 = math.exp(-x) - 1 + x
    for kind, expected in [("k1", x), ("k2", x * x / 2), ("k3", k3), ("low_var_kl", k3)]:
        assert kl_estimate(log_probs, reference, kind).item() == pytest.approx(expected, rel=1e-12)
        unbiased = kl_estimate(log_probs, reference, kind, ratio=tensor(1.5)).item()
        assert unbiased == pytest.approx(1.5 * expected, rel=1e-12)
    far = kl_estimate(tensor(-9.0), tensor(-1.0), "k3").item()
    assert far == pytest.approx(math.exp(8) - 9, rel=1e-12)
    assert kl_estimate(tensor(-9.0), tensor(-1.0), "low_var_kl").item() == 10.0
    assert kl_estimate(tensor(-9.0), tensor(-1.0), "low_var_kl", ratio=tensor(1e-3)).item() == pytest.approx(1e-3 * far)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(x=st.floats(-60, 60))
def test_k2_and_k3_are_never_negative(x):
    for kind in ("k2", "k3", "low_var_kl"):
        assert kl_estimate(tensor(x), tensor(0.0), kind).item() >= -2e-16 * abs(x)


def test_k3_of_close_policies_keeps_its_digits_in_float32():
    x = torch.tensor([1e-3, 1e-4, -1e-4], dtype=torch.float32)
    torch.testing.assert_close(kl_estimate(x, torch.zeros(3), "k3"), x**2 / 2, rtol=2e-3, atol=0)


def test_k1_and_k3_estimate_the_kl_of_known_distributions():
    """Against the closed form, over the whole support: sums weighted by the policy, not samples."""
    policy, reference = torch.log_softmax(tensor(0.3, -1, 2, 0.1), 0), torch.log_softmax(tensor(0, 0.5, 1, -1), 0)
    exact = (policy.exp() * (policy - reference)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((policy.exp() * kl_estimate(policy, reference, kind)).sum(), exact)
    old = torch.log_softmax(tensor(1, 1, 0, 0), 0)  # sampled from another policy, the ratio makes up for it
    for kind in ("k1", "k3"):
        off_policy = (old.exp() * kl_estimate(policy, reference, kind, ratio_of(policy - old))).sum()
        torch.testing.assert_close(off_policy, exact)
