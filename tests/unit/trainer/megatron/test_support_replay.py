"""Log-probs, entropies and gradients over the tokens that a sampler kept, against plain torch on masked logits."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.trainer.megatron import passes
from services.trainer.megatron.packed_sequences import prefixes_of
from services.trainer.packing import pack, separate
from shared.schema.kept_tokens import Kept
from shared.schema.sample import Sample
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.rank_steps import kept_batch, tree
from tests.unit.trainer.megatron.tiny import VOCAB
from tests.unit.trainer.megatron.tiny import pack as pack_all

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
