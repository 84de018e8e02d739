"""Gated delta net: the rule token by token, sequences of a pack apart, and what goes with it or is refused."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from services.trainer.megatron.hf_conversion import to_hf, to_torch_dist
from services.trainer.megatron.linear_attention import CHUNK, ChunkedSequences, plain_rule
from services.trainer.megatron.packed_sequences import model_input
from shared.config.engine_limits import context_length, cpu_token_capacity, text_entries
from shared.model.families import read_architecture
from shared.model.parallel_layout import ParallelLayout, division_problems
from shared.runtime.errors import ConfigError
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.tiny import pack

LENGTHS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 3, 2 * CHUNK + 17]


def token_by_token(query, key, value, decay, strength):
    """The rule as its paper writes it, for one sequence; float64."""
    state, outputs = value.new_zeros(value.size(1), key.size(2), value.size(2)), []
    for q, k, v, g, beta in zip(query, key, value, decay, strength, strict=True):
        state = state * g.exp()[:, None, None]
        held = torch.einsum("hk,hkv->hv", k, state)
        state = state + torch.einsum("hk,hv->hkv", k, beta[:, None] * (v - held))
        outputs.append(torch.einsum("hk,hkv->hv", q, state) * query.size(-1) ** -0.5)
    return torch.stack(outputs)


def test_the_rule_is_that_of_its_paper_in_every_sequence_of_a_pack():
    torch.manual_seed(0)
    total, heads, width = sum(LENGTHS), 3, 8
    query, key = (torch.nn.functional.normalize(torch.randn(total, heads, width), dim=-1) for _ in range(2))
    given = query, key, torch.randn(total, heads, 5), -torch.rand(total, heads) * 0.3, torch.rand(total, heads)
    given = [tensor.requires_grad_() for tensor in given]
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    found = plain_rule(*given, ChunkedSequences.of(starts))
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    expected = torch.cat([token_by_token(*parts) for parts in zip(*[tensor.split(LENGTHS) for tensor in wide], strict=True)])
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    weights = torch.randn_like(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for own, other in zip(given, wide, strict=True):
        torch.testing.assert_close(own.grad.double(), other.grad, atol=2e-5, rtol=1e-4)


def test_a_layer_computes_sequences_of_a_pack_as_it_computes_each_alone(make_actor):
    """Outputs and all gradients, through convolution and recurrence."""
    actor = make_actor("qwen3_next")
    layer = actor.model.modules[0].decoder.layers[0].self_attention
    seqs = [torch.zeros(length, dtype=torch.int64) for length in LENGTHS]
    hidden = [torch.randn(length, 1, 32) for length in LENGTHS]
    weights = [torch.randn(length, 1, 32) for length in LENGTHS]

    def run(groups):
        for parameter in layer.parameters():
            parameter.grad = parameter.main_grad = None
        outputs, gradients = [], []
        for group in groups:
            given = torch.cat([hidden[index] for index in group]).requires_grad_()
            packed = model_input(pack([seqs[index] for index in group]), ParallelLayout(), True, torch.device("cpu")).sequences
            output, _ = layer(given, None, packed_seq_params=packed)
            named = dict(layer.named_parameters())
            loss = (output * torch.cat([weights[index] for index in group])).sum()
            of_input, *rest = torch.autograd.grad(loss, [given, *named.values()])
            outputs.append(output.detach())
            gradients.append((of_input, rest))
        summed = [torch.stack(each).sum(0) for each in zip(*[rest for _, rest in gradients], strict=True)]
        return torch.cat(outputs), torch.cat([of_input for of_input, _ in gradients]), summed

    together, apart = run([range(len(LENGTHS))]), run([[index] for index in range(len(LENGTHS))])
    for own, other in zip([*together[:2], *together[2]], [*apart[:2], *apart[2]], strict=True):
        torch.testing.assert_close(own, other, atol=1e-6 * max(1.0, float(other.abs().max())), rtol=0)


def test_recomputed_layers_train_the_same(hf):
    plain, again = (
        [(step.loss, step.grad_norm) for step in rank_steps.steps(rank_steps.actor(hf("qwen3_next"), **config), 2)]
        for config in ({}, {"recompute": True})
    )
    for one, other in zip(plain, again, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_what_does_not_go_with_it_is_refused_by_name(hf, make_actor):
    (problem,) = division_problems(read_architecture(hf("qwen3_next")), ParallelLayout(context=4))
    assert "trainer.context_parallel_size" in str(problem) and "a divisor of 2, the key heads of linear attention" in str(problem)
    (problem, *_) = division_problems(read_architecture(hf("qwen3_next")), ParallelLayout(tensor=4, sequence_parallel=True))
    assert "2 linear attention's key heads" in str(problem)
    with pytest.raises(ConfigError, match=r"trainer\.prefix_sharing.*linear attention"):
        make_actor("qwen3_next", prefix_sharing="on")
    assert make_actor("qwen3_next").model.least_saved is None


@pytest.mark.parametrize("kind", ["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.extra)])
def test_what_sees_is_exported_as_it_was(kind, hf, tmp_path):
    """Also by a conversion, which keeps it beside the checkpoint; the export is whole to transformers."""
    rank_steps.actor(hf(kind)).save_hf(tmp_path / "out")
    to_torch_dist(hf(kind), tmp_path / "dist", None, lambda *_: None)
    to_hf(tmp_path / "dist", tmp_path / "back", None, None, lambda *_: None)
    vision = load_file(hf(kind) / "model-vision.safetensors")
    text = load_file(hf(kind) / "model.safetensors")
    for directory in (tmp_path / "out", tmp_path / "back"):
        index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
        assert index.keys() == {*vision, *text}
        held = {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
        assert all(torch.equal(held[name], tensor) for name, tensor in {**vision, **text}.items())
        _, report = transformers.AutoModelForImageTextToText.from_pretrained(directory, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]


def test_the_nested_config_of_an_export_names_its_dtype_and_no_draft_layers(hf, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(hf("qwen3_5"), source)
    given = json.loads((source / "config.json").read_text())
    given["text_config"] |= {"dtype": "float32", "mtp_num_hidden_layers": 1}
    (source / "config.json").write_text(json.dumps(given))
    rank_steps.actor(source, train_dtype="bfloat16").save_hf(tmp_path / "out")
    changed = {"dtype": "bfloat16", "text_config": {**given["text_config"], "dtype": "bfloat16", "mtp_num_hidden_layers": 0}}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**given, **changed}


def test_the_limits_of_an_engine_are_those_of_the_text(hf):
    nested, text = (json.loads((hf(kind) / "config.json").read_text()) for kind in ("qwen3_5", "qwen3_5_text"))
    for limit in (context_length, cpu_token_capacity):
        assert limit(nested) == limit(text)
    tied = text_entries({**nested, "tie_word_embeddings": True})
    assert tied["tie_word_embeddings"] and tied["model_type"] == "qwen3_5" and tied["hidden_size"] == 32


def test_draft_layers_are_passed_over_and_every_entry_of_the_config_is_exported(hf, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    given = json.loads((hf("qwen3_next") / "config.json").read_text()) | {"an_entry_that_nobody_knows": 3}
    (source / "config.json").write_text(json.dumps(given))
    tensors = load_file(hf("qwen3_next") / "model.safetensors")
    save_file(
        {**tensors, "mtp.fc.weight": torch.zeros(32, 64), "mtp.layers.0.input_layernorm.weight": torch.zeros(32)},
        source / "model.safetensors",
    )
    rank_steps.actor(source).save_hf(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == given
