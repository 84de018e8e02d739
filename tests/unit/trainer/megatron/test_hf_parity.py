"""Log-probs against the Hugging Face implementation of the same checkpoint."""

import pytest
import torch
from torch import Tensor

from services.trainer.megatron import passes
from services.trainer.megatron.hf_weights import parameters
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.tiny import KINDS, VOCAB, pack, sequences


@pytest.fixture
def reference(hf):
    import transformers

    def log_probs(kind: str, seqs: list[Tensor], temperature: float = 1.0) -> list[Tensor]:
        model = transformers.AutoModelForCausalLM.from_pretrained(hf(kind)).float().eval()
        with torch.no_grad():
            logits = [model(input_ids=s[None]).logits[0, :-1] / temperature for s in seqs]
        return [x.log_softmax(-1).gather(1, s[1:, None]).squeeze(1) for x, s in zip(logits, seqs, strict=True)]

    return log_probs


def per_sequence(packed: Tensor, seqs: list[Tensor]) -> list[Tensor]:
    return [part[:-1] for part in packed.split([len(s) for s in seqs])]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_log_probs_equal_hugging_face_ones(kind, make_actor, reference):
    seqs = [*sequences(12, longest=60), torch.tensor([5, 6]), torch.arange(64)]
    (packed,) = make_actor(kind).log_probs([pack(seqs)])
    assert packed.dtype == torch.float32
    assert torch.allclose(packed.exp() <= 1, torch.tensor(True))
    for ours, theirs in zip(per_sequence(packed, seqs), reference(kind, seqs), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma3_text"])
def test_gradients_equal_hugging_face_ones(kind, hf, make_actor):
    """Those of sinks, biases and stacked experts among them, tensor by tensor."""
    import transformers

    model, theirs = make_actor(kind).model, transformers.AutoModelForCausalLM.from_pretrained(hf(kind)).float()
    batch = pack(sequences(6, longest=60))
    passes.forward_backward(model, [batch], rank_steps.weighted_loss, 1.0, True)
    lengths = batch.cu_seqlens.diff().tolist()
    rows = torch.cat([theirs(input_ids=tokens[None]).logits[0].log_softmax(-1) for tokens in batch.tokens.split(lengths)])
    loss, _ = rank_steps.weighted_loss(rows.gather(1, batch.labels[:, None]).squeeze(1), -(rows.exp() * rows).sum(1), batch)
    loss.backward()
    expected, seen = dict(theirs.named_parameters()), set()
    for local in parameters(model.modules, model.config, model.architecture):
        parts = local.recipe.parts(local.parameter.main_grad, model.architecture)
        for name, ours in zip(local.recipe.names, parts, strict=True):
            gradient = expected[name].grad if local.recipe.expert is None else expected[name].grad[local.recipe.expert]
            assert (ours.reshape(gradient.shape) - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name
            seen.add(name)
    assert seen == expected.keys()


MORE_KINDS = [pytest.param(kind, marks=pytest.mark.extra) for kind in ("llama3_rope", "qwen2", "qwen3", "glm4", "moonlight")]


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe", "deepseek_v3", *MORE_KINDS])
def test_packed_logits_equal_hugging_face_ones(kind, hf, make_actor):
    import transformers

    seqs = sequences(5)
    packed = rank_steps.logits(make_actor(kind), pack(seqs))
    model = transformers.AutoModelForCausalLM.from_pretrained(hf(kind)).float().eval()
    with torch.no_grad():
        for ours, seq in zip(packed.split([len(s) for s in seqs]), seqs, strict=True):
            torch.testing.assert_close(ours, model(input_ids=seq[None]).logits[0], atol=1e-5, rtol=0)


def test_a_sequence_scores_the_same_alone_as_in_a_pack(make_actor):
    actor = make_actor("qwen3")
    seqs = sequences(9)
    (packed,) = actor.log_probs([pack(seqs)])
    alone = actor.log_probs([pack([s]) for s in seqs])
    for ours, single in zip(per_sequence(packed, seqs), alone, strict=True):
        torch.testing.assert_close(ours, single[:-1], atol=1e-5, rtol=0)


def test_temperature_divides_the_logits(make_actor, reference):
    seqs = sequences(4)
    (packed,) = make_actor("qwen3", temperature=0.6).log_probs([pack(seqs)])
    for ours, theirs in zip(per_sequence(packed, seqs), reference("qwen3", seqs, 0.6), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_bfloat16_is_close(make_actor, reference):
    seqs = sequences(6)
    (packed,) = make_actor("qwen3", train_dtype="bfloat16").log_probs([pack(seqs)])
    ours = torch.cat(per_sequence(packed, seqs))
    theirs = torch.cat(reference("qwen3", seqs))
    assert (ours - theirs).abs().mean() < 0.05
    assert (ours - theirs).abs().max() > 0  # it did not run in float32


def test_log_probs_do_not_see_later_sequences_or_tokens(make_actor):
    actor = make_actor("llama")
    first, second = torch.arange(1, 9), torch.arange(10, 22)
    changed = torch.cat([second[:6], (second[6:] + 7) % VOCAB])
    (before,) = actor.log_probs([pack([first, second])])
    (after,) = actor.log_probs([pack([first, changed])])
    torch.testing.assert_close(before[: len(first) + 5], after[: len(first) + 5], atol=1e-6, rtol=0)
    assert not torch.allclose(before[len(first) + 6 : -1], after[len(first) + 6 : -1])
