"""Weights of the reducers, against the reducers as they are defined."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.trainer.objective.reduce import denominator, sample_weights

from . import reference

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
    fixed = 5 if reducer == "fixed_length" else None
    weights = sample_weights([sum(m) for m, _, _ in samples], [r for _, _, r in samples], reducer, fixed)
    weighted = sum(w * m * x for w, (mask, xs, _) in zip(weights, samples, strict=True) for m, x in zip(mask, xs, strict=True))
    sequences = [reference.Sequence(1, m, x, x, x, x, x, 0.0, [0] * len(m), r) for m, x, r in samples]
    expected = reference.reduce(sequences, [x for _, x, _ in samples], reducer, fixed)
    assert weighted == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_by_hand():
    # rollout a: 2 + 2 tokens in two samples; b: 1 token; c: none, and still one of three
    tokens, rollouts = [2, 2, 1, 0], ["a", "a", "b", "c"]
    np.testing.assert_allclose(sample_weights(tokens, rollouts), [1 / 12, 1 / 12, 1 / 3, 1 / 3])
    np.testing.assert_allclose(sample_weights(tokens, rollouts, "token_mean"), [1 / 5] * 4)  # c counts no token
    np.testing.assert_allclose(sample_weights(tokens, rollouts, "fixed_length", 10), [1 / 30] * 4)


def test_a_removed_sample_counts_no_token_in_token_mean_and_its_rollout_still_counts_as_one():
    tokens = [20, 24, 0]  # the third one removed
    assert sample_weights(tokens, range(3), "token_mean").tolist() == [1 / 44] * 3
    assert np.dot(sample_weights(tokens, range(3), "token_mean"), tokens) == 1.0  # the mean over trained tokens of 1
    assert sample_weights(tokens, range(3)).tolist() == [1 / 60, 1 / 72, 1 / 3]
    assert sample_weights([20, 24, 0], [0, 1, 1]).tolist() == [1 / 40, 1 / 48, 1 / 48]  # removed of a rollout that fans out
    assert sample_weights([0, 0], range(2), "token_mean").tolist() == [1.0, 1.0]


@many
@given(tokens=st.lists(st.integers(0, 100), min_size=1, max_size=20).filter(any))
def test_the_token_mean_of_a_constant_is_the_constant_whatever_is_removed(tokens):
    assert np.dot(sample_weights(tokens, range(len(tokens)), "token_mean"), tokens) == pytest.approx(1.0, rel=1e-12)


@many
@given(tokens=st.lists(st.integers(1, 100), min_size=1, max_size=20))
def test_the_mean_of_a_constant_is_the_constant(tokens):
    for reducer in ("rollout_mean", "token_mean"):
        weights = sample_weights(tokens, range(len(tokens)), reducer)
        assert np.dot(weights, tokens) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("reducer", ["rollout_mean", "token_mean", "fixed_length"])
def test_a_batch_of_which_nothing_passes_the_rejection_has_no_weights(reducer):
    assert sample_weights([], [], reducer, 10).tolist() == []
    assert denominator([], [], reducer) == 1
