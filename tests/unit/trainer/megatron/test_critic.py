"""A critic's head, and losses that take logits."""

import pytest
import torch

from services.trainer.objective.loss import ValueLoss
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.tiny import pack, sequences


@pytest.fixture
def critic(make_actor):
    return make_actor("qwen3_tied", role="critic", lr=0.01)


def test_values_are_zero_at_first_and_learn_their_returns(critic):
    batches = rank_steps.rl_batches(critic, 0, per_token=True)
    before = critic.values(batches)
    assert [value.shape for value in before] == [batch.tokens.shape for batch in batches]
    assert all(value.dtype == torch.float32 and not value.any() for value in before)
    losses = [critic.train_step(batches, ValueLoss(value_clip=10.0)).loss for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]


def test_a_value_depends_on_no_later_token(critic):
    batches = rank_steps.rl_batches(critic, 0, per_token=True)
    for _ in range(2):
        critic.train_step(batches, ValueLoss())
    tokens = sequences(1, seed=5)[0]
    changed = tokens.clone()
    changed[-1] = (changed[-1] + 1) % 67
    (ours,), (theirs,) = critic.values([pack([tokens])]), critic.values([pack([changed])])
    assert torch.equal(ours[:-1], theirs[:-1]) and ours[-1] != theirs[-1]


@pytest.mark.parametrize("config", [{"tensor_model_parallel_size": 2}, pytest.param({"context_parallel_size": 2}, marks=pytest.mark.extra)])
def test_a_loss_may_take_the_logits(config, alone, hf, two_ranks):
    expected = alone.logit_loss(hf("qwen3"), {}, from_logits=False)
    for step in (alone.logit_loss(hf("qwen3"), {}, from_logits=True), *two_ranks.run(rank_steps.logit_loss, hf("qwen3"), config, True)):
        assert step.loss == pytest.approx(expected.loss, abs=1e-5)
        assert step.grad_norm == pytest.approx(expected.grad_norm, abs=1e-4)


@pytest.mark.parametrize("config", [pytest.param({"tensor_model_parallel_size": 2}, marks=pytest.mark.extra), {"context_parallel_size": 2}])
def test_a_loss_may_have_the_log_probs_of_candidates(config, alone, hf, two_ranks):
    expected = alone.candidate_loss(hf("qwen3"), {}, from_logits=True)
    ranks = two_ranks.run(rank_steps.candidate_loss, hf("qwen3"), config, False)
    for step in (alone.candidate_loss(hf("qwen3"), {}, from_logits=False), *ranks):
        assert step.loss == pytest.approx(expected.loss, abs=1e-5)
        assert step.metrics["mean"] == pytest.approx(expected.metrics["mean"], abs=1e-5)
        assert step.grad_norm == pytest.approx(expected.grad_norm, abs=1e-4)
