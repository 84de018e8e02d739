"""Rows that are added to the vocabulary are no tokens: log-probs, entropies, gradients, exports and checkpoints are those of the model."""

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.megatron import hf_conversion
from shared.model.parallel_layout import ParallelLayout
from tests.support.tables import table
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.test_layouts import TP2, assert_equal
from tests.unit.trainer.megatron.tiny import VOCAB


def by(multiple):
    return {"make_vocab_size_divisible_by": multiple}


@table(("tensor", "multiple", "rows"), [(1, 1, VOCAB), (2, 1, VOCAB + 1), (1, 64, 128), (2, 16, 96), (4, 128, 512)])
def test_each_rank_has_a_multiple_of_rows(tensor, multiple, rows):
    assert ParallelLayout(tensor=tensor, vocabulary_multiple=multiple).padded_vocabulary(VOCAB) == rows


@pytest.mark.parametrize("kind", ["qwen3_tied", pytest.param("qwen3", marks=pytest.mark.extra)])
def test_steps_and_exports_are_those_of_the_model(kind, alone, hf, once, two_ranks):
    expected = once(rank_steps.reinforce, hf(kind), {})
    assert_equal(expected, [alone.reinforce(hf(kind), by(64))])
    assert_equal(expected, two_ranks.run(rank_steps.reinforce, hf(kind), {**TP2, **by(128)}))  # the second rank has padding alone


def test_logits_have_the_added_rows_and_they_are_zero(make_actor):
    plain, padded = (rank_steps.logits(make_actor("qwen3", **by(multiple)), rank_steps.micro_batch(0)) for multiple in (1, 64))
    assert (plain.size(1), padded.size(1)) == (VOCAB, 128)
    torch.testing.assert_close(padded[:, :VOCAB], plain, atol=1e-5, rtol=0)
    assert not padded[:, VOCAB:].any()


def test_checkpoints_go_from_one_padding_to_another(alone, hf, tmp_path):
    first = rank_steps.actor(hf("qwen3_tied"), adam_eps=1e-3, **by(64))
    rank_steps.steps(first, 2)
    first.save_checkpoint(tmp_path / "run", 2)
    straight, weights = rank_steps.steps(first, 1, first=2), rank_steps.exported(first)
    again = rank_steps.actor(hf("qwen3_tied"), adam_eps=1e-3)
    again.load_checkpoint(tmp_path / "run")
    held = rank_steps.exported(again)
    ((resumed,), (expected,)) = rank_steps.steps(again, 1, first=2), straight
    assert resumed.loss == pytest.approx(expected.loss, abs=1e-5) and resumed.grad_norm == pytest.approx(expected.grad_norm, abs=1e-4)
    assert all((tensor - weights[name]).abs().max() < 1e-4 for name, tensor in rank_steps.exported(again).items())
    hf_conversion.to_hf(tmp_path / "run", tmp_path / "hf", hf("qwen3_tied"), None, lambda *_: None)
    converted = load_file(tmp_path / "hf" / "model.safetensors")
    assert converted["model.embed_tokens.weight"].shape[0] == VOCAB
    assert all(torch.equal(tensor, held[name]) for name, tensor in converted.items())
