"""The critic's loss against its formula, token by token, and its gradient by hand."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.trainer.objective.loss import ValueLoss
from services.trainer.objective.reduce import MissingField
from shared.config.algorithm import AlgorithmSection

from . import batches, reference


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
