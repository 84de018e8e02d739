"""Terms of the objective and their reducers, by their formulas and on numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.trainer.objective.correction import importance_weight
from services.trainer.objective.loss import SftLoss, ValueLoss
from services.trainer.objective.policy_gradient import kl_estimate, ratio_of
from services.trainer.objective.reduce import MissingField, denominator, rollout_parts, sample_weights, sequence_mean, sequence_sum
from shared.config.algorithm import AlgorithmSection

from . import batches, reference

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


# --- weights of the reducers, against the reducers as they are defined

many = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def masked_values(draw):
    """Samples as (mask, values, rollout): some empty, some all masked, some sharing a rollout."""
    samples = []
    for _ in range(draw(st.integers(1, 8))):
        mask = draw(st.lists(st.integers(0, 1), max_size=6))
        values = draw(st.lists(st.floats(-10, 10), min_size=len(mask), max_size=len(mask)))
        samples.append((mask, values, draw(st.integers(0, 3))))
    return samples


@many
@given(samples=masked_values(), reducer=st.sampled_from(["rollout_mean", "token_mean", "fixed_length"]))
def test_weighted_sum_equals_the_definition(samples, reducer):
    fixed, trained = 5 if reducer == "fixed_length" else None, [sum(m) for m, _, _ in samples]
    weights = sample_weights(trained, rollout_parts(trained, [r for _, _, r in samples]), reducer, fixed)
    weighted = sum(w * m * x for w, (mask, xs, _) in zip(weights, samples, strict=True) for m, x in zip(mask, xs, strict=True))
    sequences = [reference.Sequence(1, m, x, x, x, x, x, 0.0, [0] * len(m), r) for m, x, r in samples]
    expected = reference.reduce(sequences, [x for _, x, _ in samples], reducer, fixed)
    assert weighted == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("reducer", ["rollout_mean", "token_mean", "fixed_length"])
def test_a_batch_of_which_nothing_passes_the_rejection_has_no_weights(reducer):
    assert sample_weights([], [], reducer, 10).tolist() == []
    assert denominator([], [], reducer) == 1


def test_a_rollout_that_two_steps_divide_counts_once_in_both_together():
    """Rollouts of 3, 4, 5 and 4 samples of ten tokens each, cut inside the third; the last trains nothing."""
    rollouts = [number for number, count in enumerate([3, 4, 5, 4, 2]) for _ in range(count)]
    trained = [10] * 16 + [0] * 2
    parts = rollout_parts(trained, rollouts)
    first, second = ((trained[step], parts[step]) for step in (slice(8), slice(8, 18)))
    assert denominator(*first) == pytest.approx(2.2) and denominator(*second) == pytest.approx(2.8)
    weights = [(sample_weights(*step) * denominator(*step)).tolist() for step in (first, second)]
    assert weights[0][-1] == pytest.approx(weights[1][0]) == pytest.approx(1 / 50), "its tokens weigh alike"
    assert sample_weights(*first) @ first[0] == pytest.approx(1.0)
    for step in (first, second):
        assert sample_weights(*step, "fixed_length", 20)[0] == pytest.approx(1 / denominator(*step) / 20)


TOKEN_MEAN = AlgorithmSection(calculate_per_token_loss=True)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1), garbage=st.sampled_from([0.0, math.nan, -math.inf]))
def test_is_the_mean_of_minus_log_p_over_trained_tokens(seed, garbage):
    sequences = batches.draw_sequences(seed, count=4, scale=1.0, proximal=False)
    batch = batches.packed(sequences, batches.weights_of(sequences, TOKEN_MEAN))
    excluded = batch.loss_mask == 0
    current = batches.currents(sequences).detach().masked_fill(excluded, garbage).requires_grad_()
    loss, metrics = SftLoss()(current, batches.entropies(sequences).masked_fill(excluded, garbage), batch)
    loss.backward()
    denominator = max(sum(sum(s.mask) for s in sequences), 1)
    trained = [(x, e) for s in sequences for x, e, m in zip(s.current, s.entropy, s.mask, strict=True) if m]
    assert loss.item() == pytest.approx(-math.fsum(x for x, _ in trained) / denominator, rel=1e-12, abs=1e-15)
    assert metrics["loss"].item() == loss.item()
    assert metrics["entropy_loss"].item() == pytest.approx(math.fsum(e for _, e in trained) / denominator, abs=1e-12)
    torch.testing.assert_close(current.grad, -batch.loss_mask.double() / denominator, rtol=1e-12, atol=0)


def test_needs_weights():
    sequences = batches.draw_sequences(1, count=4, scale=1.0, proximal=False)
    batch = batches.packed(sequences, batches.weights_of(sequences, TOKEN_MEAN))
    del batch.fields["weights"]
    with pytest.raises(MissingField, match="no weights"):
        SftLoss()(batches.currents(sequences), None, batch)


# --- the critic's loss against its formula, token by token, and its gradient by hand


def expected(sequences, old, returns, clip):
    """Loss, share of clipped tokens, and the loss's derivative by each value (lists per sequence)."""
    errors, slopes, clipped = [], [], []
    for s, olds, targets in zip(sequences, old, returns, strict=True):
        rows = []
        for value, before, target in zip(s.current, olds, targets, strict=True):
            bounded = min(max(value, before - clip), before + clip)
            free, held = (value - target) ** 2, (bounded - target) ** 2
            inside = before - clip <= value <= before + clip
            rows.append((held, 2 * (bounded - target) * inside, 1.0) if held > free else (free, 2 * (value - target), 0.0))
        errors.append([row[0] for row in rows])
        slopes.append([row[1] for row in rows])
        clipped.append([row[2] for row in rows])
    mean = [reference.reduce(sequences, values, "rollout_mean", None) for values in (errors, clipped)]
    return *mean, slopes


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    clip=st.sampled_from([0.0, 0.2, 100.0]),
    scale=st.sampled_from([0.1, 3.0, 1e4]),
    garbage=st.sampled_from([0.0, math.nan, -math.inf]),
)
def test_equals_the_formula(seed, clip, scale, garbage):
    sequences = batches.draw_sequences(seed, count=5, scale=scale, proximal=True)  # current: values, rollout: old ones, reference: returns
    old, returns = [s.rollout for s in sequences], [s.reference for s in sequences]
    weights = batches.weights_of(sequences, AlgorithmSection())
    batch = batches.packed(sequences, weights)
    batch = batch.with_fields(values=batches.spread(sequences, old, garbage), returns=batches.spread(sequences, returns, garbage))
    excluded = batch.loss_mask == 0
    values = batches.currents(sequences).detach().masked_fill(excluded, garbage).requires_grad_()
    loss, metrics = ValueLoss(clip)(values, None, batch)
    loss.backward()
    mean, clipped, slopes = expected(sequences, old, returns, clip)
    assert loss.item() == pytest.approx(mean, rel=1e-9, abs=1e-12)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {"loss": mean, "value_loss": mean, "value_clipfrac": clipped}, rel=1e-9, abs=1e-12
    )
    gradient = batches.spread(sequences, slopes).masked_fill(excluded, 0.0) * batch.fields["weights"]
    torch.testing.assert_close(values.grad, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("field", ["values", "returns", "weights"])
def test_a_missing_field_is_named(field):
    sequences = batches.draw_sequences(1, count=3, scale=1.0, proximal=False)
    batch = batches.packed(sequences, batches.weights_of(sequences, AlgorithmSection()))
    zeros = torch.zeros_like(batch.fields["weights"])
    batch = batch.with_fields(values=zeros, returns=zeros)
    ValueLoss()(zeros, None, batch)
    del batch.fields[field]
    with pytest.raises(MissingField, match=f"no {field}"):
        ValueLoss()(zeros, None, batch)
