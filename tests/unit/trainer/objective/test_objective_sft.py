import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.trainer.objective.loss import SftLoss
from services.trainer.objective.reduce import MissingField
from shared.config.algorithm import AlgorithmSection

from . import batches

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
