"""Heads and likelihoods against plain torch: on the whole vocabulary, on kept tokens, and a critic's."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.trainer.megatron import parallel_groups, passes
from services.trainer.megatron.packed_sequences import prefixes_of
from services.trainer.objective.loss import ValueLoss
from services.trainer.packing import pack, separate
from services.trainer.parallel import runtime
from shared.model.parallel_layout import ParallelLayout
from shared.schema.kept_tokens import Kept
from shared.schema.sample import Sample
from tests.support.tables import table
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.rank_steps import kept_batch, tree
from tests.unit.trainer.megatron.tiny import VOCAB, sequences
from tests.unit.trainer.megatron.tiny import pack as pack_all


@pytest.fixture(scope="module")
def world_of_one():
    """The parallel groups of one rank."""
    runtime.start(ParallelLayout(), seed=1, timeout_seconds=60, groups=parallel_groups)
    yield
    runtime.stop()


def reference(logits, labels, vocab, temperature):
    """Gradients included: ``(log_probs, entropy)`` by autograd through log_softmax over the real tokens."""
    distribution = (logits[:, :vocab].float() / temperature).log_softmax(-1)
    return distribution.gather(1, labels[:, None]).squeeze(1), -(distribution.exp() * distribution).sum(1)


def example(rows, vocab, dtype=torch.float32, tokens=37):
    generator = torch.Generator().manual_seed(rows)
    logits = (torch.randn(tokens, rows, generator=generator) * 4).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[:2] = torch.tensor([0, vocab - 1])
    return logits, labels, torch.randn(2, tokens, generator=generator)


@table("temperature", [1.0, 0.6, 1.7])
@table("padding", [0, 5])
@table("chunk", [-1, 10])
def test_one_rank_equals_plain_torch(temperature, padding, chunk, world_of_one):
    vocab = 23
    logits, labels, weights = example(vocab + padding, vocab)
    untouched = logits.detach().clone()
    expected = torch.stack(reference(logits, labels, vocab, temperature))
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
    log_probs, entropy = rank_steps.likelihood_of(logits, labels, vocab, temperature, chunk_size=chunk)
    (gradient,) = torch.autograd.grad((torch.stack([log_probs, entropy]) * weights).sum(), logits)
    torch.testing.assert_close(torch.stack([log_probs, entropy]), expected.detach(), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, atol=2e-6, rtol=1e-5)
    assert torch.equal(logits, untouched)
    assert torch.equal(gradient[:, vocab:], torch.zeros_like(gradient[:, vocab:]))


def test_without_entropy_only_the_log_probs_come(world_of_one):
    logits, labels, weights = example(23, 23)
    expected, _ = reference(logits, labels, 23, 1.0)
    (expected_gradient,) = torch.autograd.grad((expected * weights[0]).sum(), logits)
    log_probs, entropy = rank_steps.likelihood_of(logits, labels, 23, 1.0, need_entropy=False)
    assert entropy is None
    (gradient,) = torch.autograd.grad((log_probs * weights[0]).sum(), logits)
    torch.testing.assert_close(gradient, expected_gradient, atol=2e-6, rtol=1e-5)


def test_entropy_alone_has_its_gradient(world_of_one):
    logits, labels, weights = example(23, 23)
    _, expected = reference(logits, labels, 23, 1.0)
    (expected_gradient,) = torch.autograd.grad((expected * weights[1]).sum(), logits)
    _, entropy = rank_steps.likelihood_of(logits, labels, 23, 1.0)
    (gradient,) = torch.autograd.grad((entropy * weights[1]).sum(), logits)
    torch.testing.assert_close(gradient, expected_gradient, atol=2e-6, rtol=1e-5)


def test_bfloat16_logits_are_worked_on_in_float32(world_of_one):
    logits, labels, weights = example(200, 200, torch.bfloat16)
    expected = torch.stack(reference(logits, labels, 200, 1.0))
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
    log_probs, entropy = rank_steps.likelihood_of(logits, labels, 200, 1.0)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(torch.stack([log_probs, entropy]), expected.detach(), atol=2e-6, rtol=1e-5)
    (gradient,) = torch.autograd.grad((torch.stack([log_probs, entropy]) * weights).sum(), logits)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("chunk", [-1, 5])
def test_several_tokens_a_place_with_the_gradients_of_the_layer(chunk, world_of_one):
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(17, 8, generator=generator), torch.randn(23, 8, generator=generator)
    ids, for_ids = torch.randint(0, 21, (17, 3), generator=generator), torch.randn(17, 3, generator=generator)
    ids[0] = ids[0, 0]  # the same token thrice
    for_entropy = torch.randn(17, generator=generator)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    distribution = ((hidden @ weight.t())[:, :21] / 0.7).log_softmax(-1)
    expected = distribution.gather(1, ids), -(distribution.exp() * distribution).sum(1)
    wanted = torch.autograd.grad((expected[0] * for_ids).sum() + (expected[1] * for_entropy).sum(), [hidden, weight])
    found = rank_steps.head_of(weight, 21, chunk).likelihood(hidden, ids, 0.7, True)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    gradients = torch.autograd.grad((found[0] * for_ids).sum() + (found[1] * for_entropy).sum(), [hidden, weight])
    torch.testing.assert_close(gradients, wanted, atol=5e-6, rtol=1e-5)


def test_the_layers_gradient_goes_to_megatrons_buffer_and_frozen_ones_get_none(world_of_one):
    hidden, weight = torch.randn(9, 4).requires_grad_(), torch.randn(11, 4).requires_grad_()
    labels = torch.arange(9)[:, None]
    log_probs, _ = rank_steps.head_of(weight, 11, 4).likelihood(hidden, labels, 1.0, False)
    wanted, for_hidden = torch.autograd.grad(log_probs.sum(), [weight, hidden])
    weight.main_grad = torch.ones(11, 4)
    rank_steps.head_of(weight, 11, 4).likelihood(hidden, labels, 1.0, False)[0].sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, wanted + 1)
    weight.main_grad.fill_(1)
    rank_steps.head_of(weight.requires_grad_(False), 11, 4).likelihood(hidden, labels, 1.0, False)[0].sum().backward()
    assert (weight.main_grad == 1).all()
    torch.testing.assert_close(hidden.grad, 2 * for_hidden)


def test_no_more_logits_than_a_chunks_exist(world_of_one):
    """In the sizes of the tensors that are made, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sizes(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, tuple | list) else [made]:
                if isinstance(tensor, torch.Tensor):
                    self.most = max(self.most, tensor.untyped_storage().nbytes() // tensor.element_size())
            return made

    hidden, weight = torch.randn(64, 8).requires_grad_(), torch.randn(500, 8).requires_grad_()
    with Sizes() as sizes:
        found = rank_steps.head_of(weight, 500, 16).likelihood(hidden, torch.arange(64)[:, None], 1.0, True)
        (found[0].sum() + found[1].sum()).backward()
    assert sizes.most == 16 * 500


def test_huge_logits_neither_overflow_nor_lose_the_label(world_of_one):
    logits = torch.tensor([[3e4, -3e4, 0.0], [-3e4, -3e4, -3e4]], requires_grad=True)
    log_probs, entropy = rank_steps.likelihood_of(logits, torch.tensor([0, 2]), 3, 1.0)
    torch.testing.assert_close(log_probs, torch.tensor([0.0, -torch.tensor(3.0).log().item()]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, torch.tensor(3.0).log().item()]))
    assert torch.autograd.grad(log_probs.sum() + entropy.sum(), logits)[0].isfinite().all()


@pytest.mark.parametrize("vocab", [24, 23, 12, 11])  # even; padded; the second rank holds padding only; and more of it
def test_two_ranks_equal_plain_torch(vocab, hf, two_ranks):
    rows = 24
    logits, labels, weights = example(rows, vocab)
    expected = torch.stack(reference(logits, labels, vocab, 0.8))
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
    ranks = two_ranks.run(rank_steps.split_likelihood, hf("qwen3"), logits.detach(), labels, weights, vocab, temperature=0.8)
    for values, _ in ranks:
        torch.testing.assert_close(values, expected.detach(), atol=2e-6, rtol=1e-5)
    gradient = torch.cat([part for _, part in ranks], 1)
    torch.testing.assert_close(gradient, expected_gradient, atol=2e-6, rtol=1e-5)


# --- log-probs, entropies and gradients over the tokens that a sampler kept, against plain torch on masked logits

LAYOUTS = (
    pytest.param({"log_probs_chunk_size": 7}, marks=pytest.mark.extra),
    {"tensor_model_parallel_size": 2, "log_probs_chunk_size": 7},
    pytest.param({"tensor_model_parallel_size": 2, "sequence_parallel": True}, marks=pytest.mark.extra),
    {"context_parallel_size": 2},
)


@pytest.mark.parametrize("config", LAYOUTS, ids=str)
def test_a_step_over_kept_tokens_is_that_of_plain_torch(config, alone, hf, two_ranks):
    expected, log_probs = alone.kept_step(hf("qwen3"), {}, plain=True)
    ranks = two_ranks.run(rank_steps.kept_step, hf("qwen3"), config) if len(config) > 1 or "context_parallel_size" in config else [
        alone.kept_step(hf("qwen3"), config)
    ]  # fmt: skip
    for step, found in ranks:
        torch.testing.assert_close(found, log_probs, atol=2e-5, rtol=1e-5)
        assert step.loss == pytest.approx(expected.loss, abs=1e-5)
        assert step.metrics["entropy"] == pytest.approx(expected.metrics["entropy"], rel=1e-5)
        assert step.grad_norm == pytest.approx(expected.grad_norm, abs=1e-4)


def test_sequences_that_begin_alike_share_only_places_of_the_same_kept_tokens(hf):
    model, batch = rank_steps.actor(hf("qwen3")), kept_batch(pack_all(tree(4)))
    whole = prefixes_of(replace(batch, kept=None), 0.0)
    found = prefixes_of(batch, 0.0)
    assert whole is not None and (found is None or found.saved < whole.saved)
    of_token = kept_batch(batch, alike=True)
    assert prefixes_of(of_token, 0.0).saved == whole.saved
    for given in (batch, of_token):
        results = []
        for least in (None, 0.0):
            model.model.least_saved = least
            model.model.zero_gradients()
            [log_probs] = model.log_probs([given])
            loss, metrics = passes.forward_backward(model.model, [given], rank_steps.weighted_loss, 1.0, True)
            results.append((log_probs * given.loss_mask, torch.tensor([loss, metrics["entropy"]])))
        torch.testing.assert_close(*results, atol=2e-4, rtol=1e-5)


def test_a_pack_has_the_kept_tokens_of_trained_ones_and_a_sequence_apart_the_same(hf):
    generator, samples = np.random.default_rng(1), []
    for index, length in enumerate((5, 1, 9)):
        response = generator.integers(0, VOCAB, length, np.int32)
        rows = [[token, *generator.integers(0, VOCAB, generator.integers(0, 6)).tolist()] for token in response.tolist()]
        rows[0] = []  # no engine sampled it
        mask = np.arange(length) % 4 != 2
        zeros = np.zeros(length, np.float32)
        prompt, segments = generator.integers(0, VOCAB, index + 2, np.int32), [(0, length, 0)]
        samples.append(Sample("g", index, prompt, response, zeros, mask.astype(np.uint8), segments, "stop", "", kept=Kept.of(rows)))
    whole = pack(samples, [1.0] * 3)
    for sample, apart in zip(samples, separate(whole), strict=True):
        alone = pack([sample], [1.0])
        np.testing.assert_array_equal(np.concatenate(apart.kept), np.concatenate(alone.kept))
        known = np.where(sample.mask != 0, sample.kept.counts, 0)
        assert apart.kept.counts[len(sample.prompt) - 1 : -1].tolist() == known.tolist() and apart.kept.counts.sum() == known.sum()
    model = rank_steps.actor(hf("qwen3"))
    [together], parts = model.log_probs([whole]), torch.cat(model.log_probs(separate(whole)))
    torch.testing.assert_close(together * whole.loss_mask, parts * whole.loss_mask, atol=2e-5, rtol=1e-5)
    [unrestricted] = model.log_probs([replace(whole, kept=None)])
    assert ((together - unrestricted) * whole.loss_mask).max() > 0.5  # the whole vocabulary is far from the kept tokens


# --- a critic's head, and losses that take logits


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
    (ours,), (theirs,) = critic.values([pack_all([tokens])]), critic.values([pack_all([changed])])
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
