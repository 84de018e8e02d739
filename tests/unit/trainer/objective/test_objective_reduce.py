"""Weights of the reducers, against the reducers as they are defined."""

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


@pytest.mark.parametrize("reducer", ["rollout_mean", "token_mean", "fixed_length"])
def test_a_batch_of_which_nothing_passes_the_rejection_has_no_weights(reducer):
    assert sample_weights([], [], reducer, 10).tolist() == []
    assert denominator([], [], reducer) == 1
