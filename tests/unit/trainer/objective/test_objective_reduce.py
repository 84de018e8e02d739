"""Weights of the reducers, against the reducers as they are defined."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.trainer.objective.reduce import denominator, rollout_parts, sample_weights

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
