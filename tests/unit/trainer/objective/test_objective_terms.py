"""Single terms on numbers worked out by hand, and the properties that give each its name."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.trainer.objective.correction import importance_weight
from services.trainer.objective.policy_gradient import kl_estimate, ratio_of
from services.trainer.objective.reduce import sequence_mean, sequence_sum
from shared.config.algorithm import AlgorithmSection

TWO_SEQUENCES = torch.tensor([0, 3, 5], dtype=torch.int32)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_sums_stay_inside_their_sequence():
    values, mask = tensor(1, 2, 3, 10, 20), torch.tensor([True, False, True, True, True])
    torch.testing.assert_close(sequence_sum(values, TWO_SEQUENCES), tensor(6, 6, 6, 30, 30))
    torch.testing.assert_close(sequence_mean(values, mask, TWO_SEQUENCES), tensor(2, 2, 2, 15, 15))
    untrained = sequence_mean(values, torch.zeros(5, dtype=torch.bool), TWO_SEQUENCES)
    assert untrained.tolist() == [0.0] * 5


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


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_importance_weights_carry_no_gradient(level):
    proximal = tensor(-1, -2, -3, -4, -5).requires_grad_()
    mask = torch.ones(5, dtype=torch.bool)
    weighted = importance_weight(proximal + 1.0, mask, TWO_SEQUENCES, AlgorithmSection(tis_level=level))
    assert not weighted.weight.requires_grad
    assert not weighted.ratio.requires_grad


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
