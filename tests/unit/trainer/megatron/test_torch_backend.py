"""The torch backend beside Megatron's: the same losses, gradients and weights; and families that Megatron has not, beside transformers."""

import copy
import importlib.util
import json
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint as checkpointed

from services.trainer import flops
from services.trainer.fsdp import fused_layers, packed_attention, shard_gathering, weight_loading
from services.trainer.fsdp.packed_attention import Sequences
from services.trainer.packing import separate
from services.trainer.parallel.loss_function import MicroBatchesFailed
from services.trainer.parallel.safetensors_reader import reader_of
from shared.config.trainer_section import TrainerSection
from shared.model.families import planned_architecture, read_architecture
from shared.model.memory_plan import layer_activations, unfused_bytes
from shared.model.parallel_layout import ParallelLayout
from shared.runtime.errors import ConfigError, MyxoError
from tests.support.converting import convert, to_8_bits
from tests.support.tables import not_refused
from tests.unit.trainer.megatron import lora_steps, rank_steps
from tests.unit.trainer.megatron.test_checkpoint import assert_exact
from tests.unit.trainer.megatron.test_conversion import packed_in_four_bits
from tests.unit.trainer.megatron.tiny import VOCAB, make_checkpoint, pack, sequences

TORCH = {"trainer_backend": "torch", "adam_eps": 1e-3}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_experts": 4}
WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16}
DELTA = {
    f"linear_{name}": size for name, size in (("num_key_heads", 2), ("num_value_heads", 4), ("key_head_dim", 16), ("value_head_dim", 16))
}
LINEAR = {**DELTA, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
OTHERS = {  # model_type → what it has besides the sizes
    "cohere": {"logit_scale": 0.25},
    "gemma2": {**WINDOWS, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0},
    "granite": {"logits_scaling": 2.0},
    "gemma3_text": WINDOWS,
    "gpt_oss": {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "olmo2": {},
    "phi3": {"sliding_window": None},
    "qwen2_moe": EXPERTS,
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**LINEAR, **EXPERTS},
}


def same(found, expected):
    for ours, theirs in zip(found["steps"], expected["steps"], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5)
    torch.testing.assert_close(found["log_probs"], expected["log_probs"], atol=1e-5, rtol=0)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, atol=2e-5, rtol=0, msg=name)


MORE = ("qwen3_tied", "deepseek_v3", "qwen2", "llama3_rope", "qwen3_moe_mixed", "glm4", "glm4_moe", "moonlight", "minimax_m2")


@pytest.mark.parametrize("kind", ["qwen3_moe", *(pytest.param(kind, marks=pytest.mark.extra) for kind in MORE)])
def test_it_trains_as_megatron_does(kind, hf, once):
    same(once(rank_steps.train, hf(kind), TORCH, 3), once(rank_steps.train, hf(kind), {"adam_eps": 1e-3}, 3))


def test_biases_of_stacked_experts_do_not_decay(hf, alone):
    config = {"weight_decay": 20.0, "adam_eps": 1e-3}
    same(alone.train(hf("gpt_oss"), {**TORCH, **config}, 2), alone.train(hf("gpt_oss"), config, 2))


@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("qwen3", marks=pytest.mark.extra)])
def test_two_ranks_train_as_one_does(kind, hf, once, two_ranks):
    expected = once(rank_steps.train, hf(kind), TORCH, 3)
    for more in ({"recompute": True}, {"fsdp_reshard_after_forward": False}):
        found, _ = two_ranks.run(rank_steps.train, hf(kind), {**TORCH, **more}, 3)
        same(found, expected)


TENSOR, EXPERT, CONTEXT = ({f"{name}_parallel_size": 2} for name in ("tensor_model", "expert_model", "context"))


@pytest.mark.parametrize(
    "kind, more",
    [
        ("qwen3_moe", TENSOR),
        ("qwen3_moe", EXPERT),
        *(pytest.param("qwen3", more, marks=pytest.mark.extra) for more in (TENSOR, CONTEXT)),
    ],
)
def test_two_ranks_that_share_the_work_train_as_one_does(kind, more, hf, once, two_ranks):
    found, _ = two_ranks.run(rank_steps.train, hf(kind), {**TORCH, "recompute": True, **more}, 3)
    same(found, once(rank_steps.train, hf(kind), TORCH, 3))


@pytest.mark.parametrize("more", [EXPERT, pytest.param(TENSOR, marks=pytest.mark.extra)])
def test_a_rank_whose_experts_nobody_chooses_takes_part(more, alone, two_ranks, tmp_path, monkeypatch):
    """A router's bias sends all tokens to the first two of four experts."""
    monkeypatch.setitem(OTHERS, "ernie4_5_moe", NEW["ernie4_5_moe"])
    checkpoint("ernie4_5_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (bias,) = (tensor for name, tensor in tensors.items() if name.endswith("e_score_correction_bias"))
    bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = alone.train(tmp_path, TORCH, 2)
    for again in (False, True):  # computed again in the backward pass, where ranks must still exchange in one order
        found, _ = two_ranks.run(rank_steps.train, tmp_path, {**TORCH, **more, "recompute": again}, 2)
        same(found, expected)


def test_a_plan_that_leaves_out_partial_gradients_is_refused(hf, two_ranks):
    """Also where the first update has no gradient to compare: a critic's head begins with zeros."""
    found = two_ranks.run(rank_steps.train_without_entry, hf("qwen3"), {**TORCH, **TENSOR}, "layers.*.self_attn.k_norm")
    assert all("tensor_model_parallel_size" in one and "k_norm.weight are partial" in one for one in found), found


@pytest.mark.parametrize("more", [pytest.param(TENSOR, marks=pytest.mark.extra), CONTEXT])
def test_replayed_choices_are_megatrons(more, hf, once, two_ranks):
    expected, own = (once(rank_steps.replayed_steps, hf("qwen3_moe"), config) for config in ({}, TORCH))
    for found in (own, two_ranks.run(rank_steps.replayed_steps, hf("qwen3_moe"), {**TORCH, **more})[0]):
        assert (found["loss"], found["grad_norm"]) == pytest.approx((expected["loss"], expected["grad_norm"]), rel=1e-4)
        for name in ("log_probs", "recorded"):
            for ours, theirs in zip(found[name], expected[name], strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


OWN_WORDS = {
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": [2, 2], "head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "moe_intermediate_size": 24},
}


@pytest.mark.parametrize(
    "kind, experts",
    [pytest.param(*item, marks=() if item[0] == "hunyuan_v1_moe" else pytest.mark.extra) for item in OWN_WORDS.items()],
)
def test_experts_that_families_name_in_their_own_words_are_recorded(kind, experts, alone, tmp_path, monkeypatch):
    monkeypatch.setitem(OTHERS, kind, experts)
    checkpoint(kind, tmp_path)
    model, batch = alone.actor(tmp_path, **TORCH), alone.micro_batch(0)
    [free], [recorded] = model.log_probs_and_routing([batch])
    assert {layer: tuple(chosen.shape) for layer, chosen in recorded.items()} == dict.fromkeys((1, 2), (len(batch.tokens), 2))
    others = {layer: (chosen + 1) % 4 for layer, chosen in recorded.items()}
    same, changed = (model.log_probs([replace(batch, routing=routing)])[0] for routing in (recorded, others))
    assert torch.equal(same, free) and not torch.allclose(changed, free, atol=1e-3)
    alone.actor(tmp_path, **TORCH, use_routing_replay=True)
    if kind == "hunyuan_v1_moe":
        entries = json.loads((tmp_path / "config.json").read_text())
        for given, words in (([2, 1], "moe_topk.*the same number for all layers"), (None, "num_experts_per_tok.*moe_topk")):
            (tmp_path / "config.json").write_text(json.dumps({**entries, "moe_topk": given}))
            with pytest.raises(ConfigError, match=words):
                read_architecture(tmp_path, backend="torch")


@pytest.mark.parametrize(
    "kind, config", [("qwen3", {}), ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None})]
)
def test_choices_that_cannot_be_recorded_are_refused_at_the_start(kind, config, alone, tmp_path, monkeypatch):
    monkeypatch.setitem(OTHERS, kind, config)
    checkpoint(kind, tmp_path)
    alone.actor(tmp_path, **TORCH)
    with pytest.raises(ConfigError, match="use_routing_replay.*choices are not known"):
        alone.actor(tmp_path, **TORCH, use_routing_replay=True)


def test_policy_losses_and_candidates_are_the_same(hf, alone):
    for function, options in ((alone.first_step, ()), (alone.logit_loss, (True,)), (alone.candidate_loss, (False,))):
        ours, theirs = function(hf("qwen3"), TORCH, *options), function(hf("qwen3"), {}, *options)
        ours, theirs = (each if isinstance(each, dict) else {"loss": each.loss, "norm": each.grad_norm} for each in (ours, theirs))
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    (step, found), (other, expected) = (alone.kept_step(hf("qwen3"), config) for config in (TORCH, {}))
    assert (step.loss, step.grad_norm) == pytest.approx((other.loss, other.grad_norm), rel=1e-4)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_critic_is_the_same(hf, once, two_ranks):
    expected, own = (once(rank_steps.reinforce, hf("qwen3"), config) for config in ({}, TORCH))
    for each in (own, two_ranks.run(rank_steps.reinforce, hf("qwen3"), TORCH)[0]):
        for name in ("grpo", "ppo", "critic 0", "critic 1", "critic 2"):
            assert (each[name].loss, each[name].grad_norm) == pytest.approx(
                (expected[name].loss, expected[name].grad_norm), rel=1e-5, abs=1e-7
            )
        torch.testing.assert_close(each["values"], expected["values"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("qwen3", marks=pytest.mark.extra)])
def test_demonstrations_references_and_teachers_are_the_same(kind, hf, alone, two_ranks, tmp_path):
    """A step on demonstrations; then log-probs by the policy before it, as a reference is, and by a teacher of other weights."""
    shutil.copytree(hf(kind), teacher := tmp_path / "teacher")
    other = {name: tensor * 1.05 for name, tensor in load_file(teacher / "model.safetensors").items()}
    save_file(other, teacher / "model.safetensors", metadata={"format": "pt"})
    expected = alone.demonstrated(hf(kind), {"adam_eps": 1e-3}, teacher, tmp_path / "megatron")
    ours = alone.demonstrated(hf(kind), TORCH, teacher, tmp_path / "alone")
    for found in (ours, two_ranks.run(rank_steps.demonstrated, hf(kind), TORCH, teacher, tmp_path / "two")[0]):
        assert (found["loss"], found["grad_norm"]) == pytest.approx((expected["loss"], expected["grad_norm"]), rel=1e-5)
        for name in ("policy", "reference", "teacher"):
            torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=0, msg=name)
    assert all((expected[name] - expected["reference"]).abs().max() > 1e-2 for name in ("policy", "teacher"))


@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.extra)])
def test_a_quantized_teacher_is_what_its_numbers_stand_for(kind, hf, alone, two_ranks, tmp_path):
    """On ranks that read rows of matrices, and of experts in MXFP4, beside a policy that is not quantized."""
    source = tmp_path / "source"
    make_checkpoint(kind, source, **({"intermediate_size": 64} if kind == "gpt_oss" else {}))
    if kind == "gpt_oss":
        shutil.copytree(source, teacher := tmp_path / "teacher")
        tensors, _ = packed_in_four_bits(load_file(source / "model.safetensors"), torch.Generator().manual_seed(1))
        save_file(tensors, teacher / "model.safetensors", metadata={"format": "pt"})
        entries = json.loads((teacher / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
        (teacher / "config.json").write_text(json.dumps(entries))
    else:
        teacher = to_8_bits(source, tmp_path / "teacher", 8)
    shutil.copytree(source, plain := tmp_path / "plain")
    reader = reader_of(teacher)
    numbers = {name: reader.read(name).float().contiguous() for name in reader.names()}
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    expected = alone.log_probs_of(source, TORCH, plain)
    for found in (alone.log_probs_of(source, TORCH, teacher), two_ranks.run(rank_steps.log_probs_of, source, TORCH, teacher)[0]):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_teacher_that_is_read_as_a_whole_does_not_name_what_is_pushed(hf, alone, tmp_path, monkeypatch):
    """Its names may be others than the policy's, whose own is read so too."""
    shutil.copytree(hf("qwen3_moe"), tmp_path, dirs_exist_ok=True)
    model = alone.actor(hf("qwen3_moe"), **TORCH).model
    monkeypatch.setattr(weight_loading, "_all_sources", lambda *_: None)
    for directory, named in ((tmp_path, False), (hf("qwen3_moe"), True)):
        model.load_hf(directory)
        assert hasattr(model.language_model, "_weight_conversions") == named


def test_a_resume_is_exact(hf, two_ranks, tmp_path):
    for outcome in two_ranks.run(rank_steps.resume, hf("qwen3_moe"), TORCH, tmp_path):
        assert_exact(outcome)


@pytest.mark.extra  # a conversion reads in one process what two ranks wrote
@pytest.mark.parametrize("more", [TENSOR, {}, EXPERT])
def test_one_process_goes_on_where_two_ranks_were(more, hf, alone, two_ranks, tmp_path):
    straight, _ = two_ranks.run(rank_steps.save_after, hf("qwen3_moe"), {**TORCH, **more}, tmp_path, 2)[0]
    for ours, theirs in zip(alone.load_and_train(hf("qwen3_moe"), TORCH, tmp_path, 2)[0], straight, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5) and ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    with pytest.raises(ConfigError, match="backend"):
        alone.load_and_train(hf("qwen3_moe"), {}, tmp_path, 1)


@pytest.mark.parametrize("kind, more", [("qwen3_moe", {}), ("qwen3", {"lora_rank": 3})])
def test_a_checkpoint_becomes_one_that_megatron_starts_from(kind, more, hf, two_ranks, tmp_path, capsys):
    expected = two_ranks.run(rank_steps.save_both, hf(kind), {**TORCH, **more}, tmp_path / "checkpoints", tmp_path / "hf")[0]
    assert convert(tmp_path / "checkpoints", tmp_path / "made", "--hf", str(hf(kind))) == 0, capsys.readouterr().err
    saved = {name: tensor for path in (tmp_path / "hf").glob("*.safetensors") for name, tensor in load_file(path).items()}
    made = {name: tensor for path in (tmp_path / "made").glob("*.safetensors") for name, tensor in load_file(path).items()}
    alike(made, saved, 0)
    megatron = rank_steps.actor(tmp_path / "made")
    torch.testing.assert_close(megatron.log_probs([pack(sequences(6, seed=9))])[0], expected, atol=1e-5, rtol=0)
    assert convert(tmp_path / "checkpoints", tmp_path / "again") != 0 and "--hf" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind, more",
    [
        ("qwen3_moe", TENSOR),
        *(pytest.param(*case, marks=pytest.mark.extra) for case in (("qwen3_moe", {}), ("deepseek_v3", {}), ("deepseek_v3", EXPERT))),
    ],
)
def test_what_is_pushed_and_saved_is_what_was_loaded(kind, more, hf, two_ranks, tmp_path):
    loaded, config = load_file(hf(kind) / "model.safetensors"), {**TORCH, **more}
    (exported, pushed), (_, nothing) = two_ranks.run(rank_steps.load_and_export, hf(kind), config)
    two_ranks.run(rank_steps.load_and_save, hf(kind), config, tmp_path / "saved")
    files = [load_file(path) for path in sorted((tmp_path / "saved").glob("*.safetensors"))]
    saved = {name: tensor for file in files for name, tensor in file.items()}
    assert not nothing
    for found in (exported, pushed, saved):
        assert found.keys() == loaded.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in loaded.items())


LORA = {"lora_rank": 3, "lora_alpha": 12}


def alike(found, expected, tolerance=2e-5):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=0, msg=name)


SOME = {"target_modules": ["q_a_proj", "kv_a_proj_with_mqa", "o_proj"]}
EACH = {"target_modules": ["q_proj", "up_proj", "down_proj"]}  # gate's half of the experts' tensor has none


@pytest.mark.parametrize(
    "kind, more",
    [
        ("qwen3", {}),
        *(pytest.param(*case, marks=pytest.mark.extra) for case in (("qwen3_moe", EACH), ("deepseek_v3", SOME), ("qwen3_moe", {}))),
    ],
)
def test_adapters_are_megatrons(kind, more, hf, alone, two_ranks, tmp_path):
    expected, config = lora_steps.train(hf(kind), {**LORA, **more}), {**TORCH, **LORA, **more}
    for found in (lora_steps.train(hf(kind), config), two_ranks.run(lora_steps.train, hf(kind), config)[0]):
        same(found, expected)
        alike(found["first"], expected["first"], 0)
        alike(found["adapters"], expected["adapters"])
        alike(found["base"], expected["base"], 0)
    (manifest, sent), _ = two_ranks.run(lora_steps.pushed, hf(kind), config)
    _, theirs = lora_steps.pushed(hf(kind), {**LORA, **more, "adam_eps": 1e-8})
    assert (manifest.kind, manifest.scale) == ("adapter", 4.0) and sent.keys() == theirs.keys()
    found = two_ranks.run(lora_steps.saved_policies, hf(kind), config, tmp_path)[0]
    for live, saved in zip(found["live"], found["saved"], strict=True):
        assert torch.equal(live, saved)
    torch.testing.assert_close(found["merged"], found["live"][2], atol=1e-5, rtol=0)
    assert torch.equal(*found["own"])


@pytest.mark.extra
@pytest.mark.parametrize("config", [{"fsdp_shard_ranks": 2, "actor_num_gpus_per_node": 4}, {"fsdp_cpu_offload": True}])
def test_copies_of_shards_and_shards_in_host_memory_train_as_one_rank_does(config, hf, alone, four_ranks, tmp_path):
    expected = alone.train(hf("qwen3_moe"), TORCH, 2)
    found, *_ = four_ranks.run(rank_steps.train, hf("qwen3_moe"), {**TORCH, **config}, 2)
    same(found, expected)
    (exported, pushed), *_ = four_ranks.run(rank_steps.load_and_export, hf("qwen3_moe"), {**TORCH, **config})
    alike(exported, loaded := load_file(hf("qwen3_moe") / "model.safetensors"), 0)
    alike(pushed, loaded, 0)
    straight, _ = four_ranks.run(rank_steps.save_after, hf("qwen3_moe"), {**TORCH, **config}, tmp_path, 2)[0]
    for ours, theirs in zip(alone.load_and_train(hf("qwen3_moe"), TORCH, tmp_path, 2)[0], straight, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5) and ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)


def test_pushes_copy_shards_in_host_memory_anew(hf, alone, monkeypatch):
    """What `.to` copied to the device once would be the first push's weights for ever; what lies there is read where it lies."""
    plan = shard_gathering.FsdpGatherPlan(alone.actor(hf("qwen3"), **TORCH).model)
    assert any(map(plan.is_whole, plan.units))
    monkeypatch.setattr(shard_gathering, "device", lambda: torch.device("meta"))
    assert not any(map(plan.is_whole, plan.units))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "glm4"])
def test_fused_layers_compute_the_same(kind, hf, tmp_path):
    reference = (
        checkpoint(kind, tmp_path) if kind in OTHERS else transformers.AutoModelForCausalLM.from_pretrained(hf(kind), dtype=torch.float32)
    )
    model, tokens = copy.deepcopy(reference), torch.arange(30)[None]
    fused = {name.rpartition(".")[2] for name in fused_layers.fuse(model)}
    assert fused == {"qwen3": {"input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm", "mlp"}, "gemma3_text": set()}.get(
        kind, {"input_layernorm", "post_attention_layernorm", "post_mlp_layernorm", "post_self_attn_layernorm", "norm"}
    )
    found, expected = (each(input_ids=tokens, labels=tokens) for each in (model, reference))
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=0)
    for each in (found, expected):
        each.loss.backward()
    for (name, one), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.extra
def test_all_layers_share_what_is_compiled(tmp_path, monkeypatch):
    """Fused ones as well: a graph for each layer would pass the number of graphs behind which PyTorch compiles no more."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    graphs = []
    for layers in (2, 6):
        place = tmp_path / str(layers)
        make_checkpoint("qwen3", place, num_hidden_layers=layers)
        model = transformers.AutoModelForCausalLM.from_pretrained(place)
        assert len(fused_layers.fuse(model)) > 5 * layers
        fused_layers.compile_layers(list(model.model.layers))
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model(input_ids=torch.arange(30)[None], use_cache=False)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0


@pytest.mark.extra
def test_compiled_layers_train_as_others_do(hf, alone):
    same(alone.train(hf("qwen3"), {**TORCH, "fsdp_compile": True}, 2), alone.train(hf("qwen3"), TORCH, 2))


def test_float8_training(hf, alone, monkeypatch):
    """Rounding to 8-bit floats moves losses and gradients a little; where torchao is not installed, it is said."""
    if importlib.util.find_spec("torchao") is None:
        with pytest.raises(ConfigError, match="fsdp_float8 = 'rowwise': none: torchao is not installed"):
            alone.actor(hf("qwen3"), **TORCH, fsdp_float8="rowwise")
        return
    plain = alone.train(hf("qwen3"), TORCH, 2)
    for recipe in ("rowwise", "rowwise_with_gw_hp"):
        rounded = alone.train(hf("qwen3"), {**TORCH, "fsdp_float8": recipe}, 2)
        for ours, theirs in zip(rounded["steps"], plain["steps"], strict=True):
            assert ours.loss == pytest.approx(theirs.loss, rel=0.1) and ours.grad_norm == pytest.approx(theirs.grad_norm, rel=0.2)
        assert 1e-4 < (rounded["log_probs"] - plain["log_probs"]).abs().mean() < 0.3
        assert rounded["weights"].keys() == plain["weights"].keys()


def test_recomputed_layers_keep_no_activations(hf, alone):
    plain, recomputed = (alone.saved_bytes(hf("qwen3"), {**TORCH, **more}) for more in ({}, {"recompute": True}))
    assert recomputed < 0.5 * plain


@pytest.mark.parametrize("kind", ["deepseek_v3", pytest.param("qwen3_moe", marks=pytest.mark.extra)])
def test_a_rank_reads_its_own_rows_alone(kind, hf, two_ranks):
    of_file = sum(tensor.nbytes for tensor in load_file(hf(kind) / "model.safetensors").values())
    first, second = two_ranks.run(rank_steps.bytes_read, hf(kind), TORCH)
    assert max(first, second) < 0.55 * of_file and of_file <= first + second < 1.02 * of_file  # routers' biases are on both


def checkpoint(model_type, directory):
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **OTHERS[model_type])
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("bias", "sinks")):
                parameter.copy_(torch.randn_like(parameter) * 0.1 + ("norm" in name))
    model.save_pretrained(directory)
    model.set_attn_implementation("eager")  # PyTorch's attention leaves Gemma 2's caps out
    return model.eval()


SELDOM = ("cohere", "gemma3_text", "gpt_oss", "granite", "mistral", "olmo2", "phi3", "qwen2_moe", "qwen3_5_text")


@pytest.mark.parametrize("model_type", [pytest.param(kind, marks=pytest.mark.extra if kind in SELDOM else ()) for kind in sorted(OTHERS)])
def test_families_that_megatron_has_not(model_type, alone, tmp_path, monkeypatch):
    monkeypatch.setattr(packed_attention, "SCORES", 600)  # a few rows of four heads at a time
    reference = checkpoint(model_type, tmp_path)
    model = alone.actor(tmp_path, **TORCH)
    seqs = [*sequences(6, longest=40), torch.arange(30)]
    (packed,) = model.log_probs([pack(seqs)])
    for ours, seq in zip(packed.split([len(seq) for seq in seqs]), seqs, strict=True):
        with torch.no_grad():
            theirs = reference(input_ids=seq[None]).logits[0, :-1].log_softmax(-1).gather(1, seq[1:, None]).squeeze(1)
        torch.testing.assert_close(ours[:-1], theirs, atol=2e-5, rtol=0)
    saved = load_file(tmp_path / "model.safetensors")
    exported = alone.exported(model)
    assert exported.keys() == saved.keys() and all(torch.equal(exported[name], tensor) for name, tensor in saved.items())
    first, second = alone.steps(model, 2)
    assert second.loss < first.loss and second.grad_norm > 0


NEW = {  # families at tiny sizes, dense and with experts, of which none has a test elsewhere
    "cohere2": {**WINDOWS, "logit_scale": 0.25},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
    "gpt_neox": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 2.0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "smollm3": {},
    "starcoder2": {"sliding_window": None},
}
APART = {  # families whose layers mix the sequences of a pack, or do not say where these begin
    "bamba": {"mamba_d_head": 8, "mamba_n_heads": 8, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "stablelm": {},
}


@pytest.mark.parametrize("model_type", [pytest.param(kind, marks=() if kind == "smollm3" else pytest.mark.extra) for kind in sorted(NEW)])
def test_a_family_that_nobody_named_trains_as_it_is(model_type, alone, tmp_path, monkeypatch):
    monkeypatch.setitem(OTHERS, model_type, NEW[model_type])
    test_families_that_megatron_has_not(model_type, alone, tmp_path, monkeypatch)
    found = alone.resume(tmp_path, TORCH, tmp_path / "saves")
    straight, again = found["weights"]
    assert found["resumed"] == found["straight"] and all(torch.equal(again[name], tensor) for name, tensor in straight.items())


@pytest.mark.parametrize("model_type", sorted(APART))
def test_a_family_that_cannot_keep_packed_sequences_apart_is_refused(model_type, alone, tmp_path, monkeypatch):
    monkeypatch.setitem(OTHERS, model_type, APART[model_type])
    checkpoint(model_type, tmp_path)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(ConfigError, match="packed"):
            alone.actor(tmp_path, **TORCH, train_dtype=dtype)


def test_kernels_that_round_otherwise_do_not_mix_sequences(alone, tmp_path, monkeypatch):
    """As a GPU's do: of a model with logits as wide as a trained one's, improbable tokens differ by more than a tenth of a nat."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("qwen2", **{**SIZES, "initializer_range": 0.5}))
    model.save_pretrained(tmp_path)
    seen = []

    def rounded(query, key, value, **options):
        found = F.scaled_dot_product_attention(query, key, value, **options)
        seen.append(found.dtype)
        return (found.float() * 1.02).to(found.dtype)

    monkeypatch.setattr(packed_attention, "F", SimpleNamespace(scaled_dot_product_attention=rounded))
    alone.actor(tmp_path, **TORCH, train_dtype="bfloat16")
    assert seen and set(seen) == {torch.bfloat16}
    with pytest.raises(ConfigError, match="between packed and single"):
        alone.actor(tmp_path, **TORCH)


@pytest.mark.parametrize("kind", ["deepseek_v32", pytest.param("glm_moe_dsa", marks=pytest.mark.extra)])
def test_sparse_attention_is_dense_up_to_so_many_keys(kind, hf, alone, tmp_path):
    """Longer sequences are refused, in packs of whatever length; and the indexer, of which nothing learns, stays as it was."""
    shutil.copytree(hf(kind), tmp_path, dirs_exist_ok=True)
    entries = json.loads((tmp_path / "config.json").read_text())
    entries.pop("indexer_rope_interleave", None)
    (tmp_path / "config.json").write_text(json.dumps({**entries, "index_topk": 20}))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="sdpa").eval()
    config = {**TORCH, "weight_decay": 20.0, "use_routing_replay": True}
    model, seqs = alone.actor(tmp_path, **config), [torch.arange(length) for length in (20, 9, 14)]
    (packed,) = model.log_probs([pack(seqs)])
    for ours, seq in zip(packed.split([len(seq) for seq in seqs]), seqs, strict=True):
        theirs = reference(input_ids=seq[None]).logits[0, :-1].log_softmax(-1).gather(1, seq[1:, None]).squeeze(1)
        torch.testing.assert_close(ours[:-1], theirs, atol=2e-5, rtol=0)
    model.train_step([replace(pack(seqs), fields={})], lambda found, *_: (found.sum() * 1e-3, {}))
    held, now = load_file(tmp_path / "model.safetensors"), alone.exported(model)
    assert {name for name, tensor in held.items() if torch.equal(tensor, now[name])} >= {name for name in held if ".indexer." in name}
    with pytest.raises(MyxoError, match=r"Attention chooses 20 of a sequence's 21 keys"):
        model.log_probs([pack([torch.arange(21)])])


def test_arguments_of_attention_that_are_not_known_are_refused():
    """Of a choice of blocks of keys (MiniMax-M3's), or of keys behind those of the tokens (DeepSeek-V4's), nothing is left out."""
    module, starts, tensor = torch.nn.Identity(), Sequences([0, 5], torch.tensor([0, 5], dtype=torch.int32)), torch.ones(1, 2, 5, 8)
    for keys, options, words in (
        (tensor, {"block_indices": torch.zeros(1, 5, 1)}, "does not know block_indices, which Identity"),
        (torch.ones(1, 2, 6, 8), {}, "keys that are no tokens"),
        (tensor, {"is_causal": False}, "has no masks"),
    ):
        with pytest.raises(MyxoError, match=words):
            packed_attention.attend(module, tensor, keys, keys, None, packed_sequences=starts, **options)
    known = {"position_ids": torch.arange(5)[None], "dropout": 0.0, "block_indices": None, "is_causal": None, "use_cache": False}
    packed_attention.attend(module, tensor, tensor, tensor, None, packed_sequences=starts, **known)


@pytest.mark.parametrize("kind, noise", [("phimoe", {"router_jitter_noise": 0.3}), ("starcoder2", {"embedding_dropout": 0.3}), ("opt", {})])
def test_training_computes_what_log_probs_are_of(kind, noise, alone, tmp_path, monkeypatch):
    """The engine knows neither dropout nor routers' noise, which a model of transformers has while it trains."""
    more = {"phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2}, "opt": {"dropout": 0.3, "ffn_dim": 48, "word_embed_proj_dim": 32}}
    monkeypatch.setitem(OTHERS, kind, {"sliding_window": None, **more.get(kind, {"residual_dropout": 0.3}), **noise})
    checkpoint(kind, tmp_path)
    for more in ({}, {"recompute": True}):
        model, batch, seen = alone.actor(tmp_path, **TORCH, **more), alone.micro_batch(0), []
        (expected,) = model.log_probs([batch])
        model.train_step([batch], lambda found, *_, seen=seen: (seen.append(found.detach()) or found.sum() * 0, {}))
        torch.testing.assert_close(seen[0], expected, atol=1e-5, rtol=0)


def test_two_sequences_of_other_lengths_keep_their_angles(alone, tmp_path):
    """Phi's angles depend on whether a sequence is longer than those of the first training; the others' of a pack do not."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_theta": 1e4, "rope_type": "longrope", "original_max_position_embeddings": 20, **factors}
    config = transformers.AutoConfig.for_model("phi3", **SIZES, sliding_window=None, rope_parameters=rope)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(tmp_path)
    seqs = [torch.arange(length) for length in (12, 30, 1, 15)]
    (packed,) = alone.actor(tmp_path, **TORCH).log_probs([pack(seqs)])
    for ours, seq in zip(packed.split([len(seq) for seq in seqs]), seqs, strict=True):
        theirs = model(input_ids=seq[None]).logits[0, :-1].log_softmax(-1).gather(1, seq[1:, None]).squeeze(1)
        torch.testing.assert_close(ours[:-1], theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind, name", [("granitemoe", "input_linear"), ("gpt_oss", "gate_up_proj")])
def test_stacked_experts_are_not_left_out_of_all_linear_layers(kind, name, alone, tmp_path, monkeypatch):
    """Those that a checkpoint has in one tensor, whatever its name is; and a router, of whatever name, is adapted by nobody."""
    monkeypatch.setitem(OTHERS, kind, {**NEW, **OTHERS}[kind])
    checkpoint(kind, tmp_path)
    with pytest.raises(ConfigError, match=f"some of q_proj, k_proj, v_proj, o_proj; experts .* are in one tensor .*{name}"):
        alone.actor(tmp_path, **TORCH, **LORA)


LAYER = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
PLANNED = ("gemma", "gemma2", "gemma3_text", "glm4", "granite", "olmo2", "phi3", "qwen3")


@pytest.mark.parametrize(
    "model_type", [pytest.param(kind, marks=() if kind in ("gemma2", "glm4", "qwen3") else pytest.mark.extra) for kind in PLANNED]
)
def test_a_layer_keeps_what_the_plan_says(model_type, tmp_path, monkeypatch):
    """In bfloat16 with the modules fused that are on a GPU, where each is one kernel, which keeps what it is given."""

    def kernel(function):
        return lambda *given: checkpointed(function, *given, use_reentrant=True)

    def norm(module, given):
        return kernel(lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6))(given, module.weight)

    monkeypatch.setattr(fused_layers, "_rms_norm", norm)
    monkeypatch.setattr(fused_layers, "_gated", kernel(lambda gate, up: F.silu(gate) * up))
    sizes = {**SIZES, **LAYER, **{key: size for key, size in OTHERS.get(model_type, {}).items() if key not in WINDOWS}}
    tokens, held = 512, []
    for layers in (2, 3):
        config = transformers.AutoConfig.for_model(model_type, **{**sizes, "num_hidden_layers": layers, "max_position_embeddings": 1024})
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="packed")
        fused_layers.fuse(model)
        model.bfloat16()
        weights, kept = {one.untyped_storage()._cdata for one in model.parameters()}, {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage()._cdata] = tensor  # which holds it: no other storage comes to lie there
            return tensor

        pack = Sequences([0, tokens], torch.tensor([0, tokens], dtype=torch.int32))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.base_model(input_ids=torch.arange(tokens)[None] % VOCAB, use_cache=False, packed_sequences=pack)
        held.append(sum(tensor.untyped_storage().nbytes() for storage, tensor in kept.items() if storage not in weights))
    config.save_pretrained(tmp_path)
    shape = planned_architecture(tmp_path, read_architecture(tmp_path, backend="torch"), "torch")
    planned = layer_activations(shape, ParallelLayout(), 1, tokens, 2).total + unfused_bytes(shape, ParallelLayout(), tokens, 2)
    assert held[1] - held[0] == pytest.approx(planned, rel=0.08)


def test_a_sequence_whose_loss_fails_is_found(hf, alone):
    model = alone.actor(hf("qwen3"), **TORCH)
    batch = alone.micro_batch(0)

    def fails(log_probs, entropy, batch):
        if (batch.tokens == int(bad.tokens[0])).any() and len(batch.tokens) >= len(bad.tokens):
            raise ValueError("no such reward")
        return -(log_probs * batch.loss_mask).sum(), {}

    bad = max(separate(batch), key=lambda one: len(one.tokens))
    with pytest.raises(MicroBatchesFailed) as error:
        model.train_step([batch], fails)
    failed = []
    for index, one in enumerate(separate(batch)):
        try:
            error.value.attempt(one)
        except ValueError:
            failed.append(index)
    assert [separate(batch)[index].tokens.tolist() for index in failed] == [bad.tokens.tolist()]


def test_what_it_does_not_take_is_refused(hf, alone, tmp_path, monkeypatch):
    cases = [
        ({"pipeline_model_parallel_size": 2}, ["pipeline_model_parallel_size", "FSDP2"]),
        ({"tensor_model_parallel_size": 2, "lora_rank": 4}, ["tensor_model_parallel_size", "lora_rank = 4"]),
        ({"expert_model_parallel_size": 2, "fsdp_shard_ranks": 2}, ["expert_model_parallel_size", "fsdp_shard_ranks = 2"]),
        ({"tensor_model_parallel_size": 2, "fsdp_cpu_offload": True}, ["tensor_model_parallel_size", "fsdp_cpu_offload = True"]),
        ({"megatron": {"moe_grouped_gemm": True}}, ["trainer.megatron"]),
        ({"quantization_aware": True}, ["trainer.quantization_aware = True", "Megatron's"]),
        ({"train_env_vars": {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}}, ["OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "Megatron's"]),
        ({"prefix_sharing": "on"}, ["prefix_sharing", "whole sequences"]),
        ({"recompute_granularity": "selective"}, ["recompute_granularity", "full"]),
        ({"lora_rank": 4, "fsdp_float8": "rowwise"}, ["fsdp_float8", "lora_rank = 4"]),
        ({"use_routing_replay": True, "fsdp_compile": True}, ["fsdp_compile", "replayed routing"]),
    ]
    assert not not_refused(lambda change: list(map(_raised, TrainerSection.model_construct(**{**TORCH, **change}).torch_problems())), cases)
    beside = {"expert_model_parallel_size": 2, "fsdp_cpu_offload": True}  # whose gradients are not summed by ranks
    assert not list(TrainerSection.model_construct(**TORCH, **beside).torch_problems())
    checkpoint("granite", tmp_path)
    monkeypatch.setattr("services.trainer.fsdp.model.logit_transform", lambda _: {})
    with pytest.raises(ConfigError, match="behind the output layer"):
        alone.actor(tmp_path, **TORCH)
    for kind, target, words in (("qwen3_moe", "w_proj", "a linear layer of Qwen3Moe"), ("deepseek_v3", "q_a_proj", "together")):
        with pytest.raises(ConfigError, match=f"target_modules.*{words}"):
            alone.actor(hf(kind), **TORCH, **LORA, target_modules=[target])
    windowed = transformers.AutoConfig.for_model("mistral", **SIZES, sliding_window=11, head_dim=16)
    (tmp_path / "config.json").write_text(windowed.to_json_string())
    with pytest.raises(ConfigError, match="sliding_window.*without windows"):
        alone.actor(tmp_path, **TORCH)
    windowed.sliding_window, windowed.rope_parameters = None, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (tmp_path / "config.json").write_text(windowed.to_json_string())
    with pytest.raises(ConfigError, match="rope_type = 'dynamic'.*engines stretch"):
        alone.actor(tmp_path, **TORCH)
    monkeypatch.setitem(OTHERS, "hrm_text", {"head_dim": 16})
    checkpoint("hrm_text", tmp_path / "parts")
    with pytest.raises(ConfigError, match="in parts: .*gqkv_proj"):
        alone.exported(alone.actor(tmp_path / "parts", **TORCH))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match="hidden_size|num_attention_heads"):
        alone.actor(tmp_path, **TORCH)


def _raised(problem):
    raise problem


def test_experts_of_several_ranks_get_routers_weights_as_those_of_one(hf, alone, two_ranks):
    config = {"train_dtype": "bfloat16"}
    expected = alone.gate_types(hf("deepseek_v3"), config)
    assert expected == {"torch.float32"}
    assert two_ranks.run(rank_steps.gate_types, hf("deepseek_v3"), {**config, "expert_model_parallel_size": 2}) == [expected] * 2


@pytest.mark.parametrize("kind", ["qwen3_next", pytest.param("deepseek_v3", marks=pytest.mark.extra)])
def test_operations_are_counted_by_all_that_is_known_of_a_family(kind, hf, alone):
    model, known = alone.actor(hf(kind), **TORCH), read_architecture(hf(kind))
    assert model.counted_architecture == known != model.architecture
    assert flops.training(known, [4096]) != flops.training(model.architecture, [4096])
