"""Reading config.json and safetensors, and refusing what would be almost the right model."""

import dataclasses
import json

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file

from services.trainer.megatron import spec
from services.trainer.megatron.gpt_model import transformer_config
from services.trainer.megatron.hf_weights import Recipe, recipe
from shared.model.architecture import LinearScaling, Rope
from shared.model.families import read_architecture
from shared.model.parallel_layout import ParallelLayout
from shared.model.tensor_table import hf_tensors
from shared.runtime.errors import ConfigError
from tests.support.tables import not_refused, table
from tests.unit.trainer.megatron.rank_steps import actor
from tests.unit.trainer.megatron.tiny import KINDS


@pytest.fixture
def copy_of(hf, tmp_path):
    """``copy_of(kind, **changes)``: a copy of a checkpoint whose config.json is changed; None removes an entry."""

    def make(kind="qwen3", **changes):
        target = tmp_path / "copy"
        target.mkdir(exist_ok=True)
        config = json.loads((hf(kind) / "config.json").read_text()) | changes
        (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        (target / "model.safetensors").write_bytes((hf(kind) / "model.safetensors").read_bytes())
        return target

    return make


def test_names_and_shapes_are_those_of_the_saved_checkpoint(hf):
    for kind in KINDS:
        saved = {name: tuple(t.shape) for name, t in load_file(hf(kind) / "model.safetensors").items()}
        assert hf_tensors(read_architecture(hf(kind))) == saved, kind


def test_inverse_frequencies_equal_hugging_face_ones(hf):
    import transformers

    from services.trainer.megatron.gpt_model import inverse_frequencies

    for kind in ("llama", "llama3_rope"):
        model = transformers.AutoModelForCausalLM.from_pretrained(hf(kind))
        architecture = read_architecture(hf(kind))
        ours = inverse_frequencies(architecture.rope, architecture.head_dim)
        torch.testing.assert_close(ours, model.model.rotary_emb.inv_freq, atol=0, rtol=1e-7)
    assert read_architecture(hf("llama3_rope")).rope.scaling.factor == 4.0


def test_older_configs_with_rope_theta_outside(copy_of):
    old = read_architecture(copy_of("qwen3", rope_parameters=None, rope_theta=1e6))
    assert old.rope.theta == 1e6
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}  # fmt: skip
    assert read_architecture(copy_of("llama", rope_parameters=None, rope_theta=5e5, rope_scaling=scaled)).rope.scaling.factor == 8.0


def test_head_dim_and_key_value_heads_have_defaults(copy_of):
    architecture = read_architecture(copy_of("llama", head_dim=None, num_key_value_heads=None))
    assert (architecture.head_dim, architecture.num_key_value_heads) == (8, 4)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}


def test_a_config_that_cannot_be_reproduced_is_refused(copy_of):
    cases = [
        ("qwen3", {"model_type": "gpt2"}, ["model_type", "gpt2", "qwen3_moe"]),
        ("qwen3", {"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ("qwen3", {"attention_bias": True}, ["attention_bias"]),
        ("qwen3", {"use_sliding_window": True}, ["use_sliding_window"]),
        ("qwen3", {"hidden_size": None}, ["hidden_size", "positive integer"]),
        ("qwen3", {"num_hidden_layers": "two"}, ["num_hidden_layers", "two"]),
        ("qwen3", {"vocab_size": 0}, ["vocab_size"]),
        ("qwen3", {"rms_norm_eps": None}, ["rms_norm_eps"]),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, ["rope_type", "yarn", "llama3"]),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3"}}, ["factor"]),
        ("deepseek_v3", {"rope_interleave": False}, ["rope_interleave"]),
        ("deepseek_v3", {"attention_bias": True}, ["attention_bias"]),
        ("deepseek_v3", {"kv_lora_rank": None}, ["kv_lora_rank"]),
        ("deepseek_v3", {"norm_topk_prob": False}, ["norm_topk_prob"]),
        ("deepseek_v3", {"scoring_func": "softmax"}, ["scoring_func", "sigmoid"]),
        ("deepseek_v3", {"moe_layer_freq": 2}, ["moe_layer_freq"]),
        ("deepseek_v3", {"num_experts_per_tok": 1}, ["num_experts_per_tok", "at least 2"]),
        ("deepseek_v3", {"n_group": 3}, ["n_group", "8 experts"]),
        ("deepseek_v3", {"topk_group": 1}, ["topk_group", "2"]),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "myxo convert"]),
        ("deepseek_v3", {"rope_parameters": {**YARN, "attention_factor": 1.2}}, ["attention_factor"]),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale_all_dim": 1.0}}, ["mscale_all_dim"]),
        ("deepseek_v3", {"rope_parameters": {**YARN, "rope_type": "llama3"}}, ["rope_type", "yarn"]),
        *(
            ("deepseek_v3", {name: None}, [name, "required"])
            for name in ("n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace", "n_shared_experts")
        ),
        *(
            ("glm4_moe", {name: None}, [name, "required"])
            for name in ("routed_scaling_factor", "first_k_dense_replace", "n_shared_experts")
        ),
        *(("minimax_m2", {name: None}, [name, "stated"]) for name in ("use_qk_norm", "use_routing_bias", "scoring_func", "qk_norm_type")),
        ("minimax_m2", {"rotary_dim": None}, ["rotary_dim", "16", "0.5"]),
        ("minimax_m2", {"rotary_dim": 4}, ["rotary_dim", "4", "0.5"]),
        ("minimax_m2", {"shared_intermediate_size": 8}, ["shared_intermediate_size"]),
        ("minimax_m2", {"num_experts_per_tok": 1}, ["num_experts_per_tok", "at least 2"]),
        *(("deepseek_v32", {name: None}, [name, "required"]) for name in ("index_topk", "index_n_heads", "index_head_dim", "q_lora_rank")),
        ("deepseek_v32", {"index_head_dim": 4}, ["index_head_dim", "at least 8"]),
        ("deepseek_v32", {"index_kpool": 4}, ["index_kpool"]),
        ("deepseek_v32", {"index_k_norm_type": "rms"}, ["index_k_norm_type"]),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full", "full"]}, ["indexer_types", "first of them 'full'"]),
        ("glm_moe_dsa", {"indexer_types": ["full", "full", "other", "full"]}, ["indexer_types", "other"]),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "FS"}, ["index_topk_pattern", "4 layers"]),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, ["mlp_layer_types", "first 2 layers"]),
        ("glm4", {"rope_parameters": YARN}, ["rope_type", "llama3"]),
        ("mistral", {"sliding_window": 128}, ["sliding_window", "engines serve mistral without windows"]),
        ("gemma3_text", {"hidden_activation": "gelu"}, ["hidden_activation", "gelu_pytorch_tanh"]),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "soft caps"]),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "soft caps"]),
        ("gemma3_text", {"use_bidirectional_attention": True}, ["use_bidirectional_attention", "causal"]),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, ["rope_type", "linear"]),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, ["rope_type", "default"]),
        ("gemma3_text", {"sliding_window": None}, ["sliding_window", "positive integer"]),
        ("gpt_oss", {"swiglu_limit": None}, ["swiglu_limit", "stated"]),
        ("gpt_oss", {"swiglu_limit": 8.0}, ["swiglu_limit", "7.0"]),
        ("gpt_oss", {"attention_bias": False}, ["attention_bias"]),
        ("gpt_oss", {"sliding_window": None}, ["sliding_window", "positive integer"]),
        ("gpt_oss", {"layer_types": ["full_attention"]}, ["layer_types", "2 layers"]),
        ("gpt_oss", {"rope_parameters": {**YARN, "attention_factor": 1.2}}, ["attention_factor"]),
        ("gpt_oss", {"rope_parameters": {**YARN, "rope_type": "llama3"}}, ["rope_type", "yarn"]),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, ["quantization_config", "myxo convert"]),
        ("qwen3_next", {"full_attention_interval": None}, ["full_attention_interval", "layer_types", "4 where it is missing"]),
        ("qwen3_next", {"linear_num_value_heads": 3}, ["linear_num_value_heads", "a multiple of linear_num_key_heads, 2"]),
        ("qwen3_next", {"output_gate_type": "sigmoid"}, ["output_gate_type", "silu"]),
        ("qwen3_next", {"linear_key_head_dim": None}, ["linear_key_head_dim", "required"]),
        ("glm4_moe", {"first_k_dense_replace": -1}, ["first_k_dense_replace"]),
    ]
    assert not not_refused(lambda kind, change: read_architecture(copy_of(kind, **change)), cases)


def test_kimi_k2_is_deepseek_v3_by_another_name(copy_of, hf):
    other = read_architecture(copy_of("deepseek_v3", model_type="kimi_k2"))
    assert dataclasses.replace(other, model_type="deepseek_v3") == read_architecture(hf("deepseek_v3"))


def test_mimo_is_qwen2_by_another_name(copy_of, hf):
    other = read_architecture(copy_of("qwen2", model_type="mimo", attention_bias=True, num_nextn_predict_layers=1))
    assert dataclasses.replace(other, model_type="qwen2", draft_layers=0) == read_architecture(hf("qwen2"))


def test_windows_alternate_where_no_layer_types_are_stated(copy_of, hf):
    stated = read_architecture(hf("gpt_oss"))
    assert stated.windows == (7, 0) == read_architecture(copy_of("gpt_oss", layer_types=None)).windows
    assert [stated.window(layer) for layer in range(2)] == [7, 0] and read_architecture(hf("qwen3")).window(1) == 0


def test_gemma_is_read_as_it_was_first_published(copy_of):
    """Rotary embeddings beside one another, the windows as a pattern, and defaults of its own in the place of what is not stated."""
    old = {"rope_parameters": None, "rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    given = copy_of("gemma3_text", **old, layer_types=None, sliding_window_pattern=2, tie_word_embeddings=None)
    read = read_architecture(given)
    assert (read.rope, read.window_rope) == (Rope(2e6, scaling=LinearScaling(8.0)), Rope(3e4))
    assert (read.windows, read.tied_embeddings) == ((7, 0), True)
    plain = read_architecture(copy_of("gemma3_text", rope_parameters=None, query_pre_attn_scalar=None))
    assert (plain.rope, plain.window_rope, plain.softmax_scale) == (Rope(1e6), Rope(1e4), 1 / 16)


def test_layers_of_transformer_engine_are_refused_where_they_lack_something(hf, monkeypatch):
    monkeypatch.setattr(spec, "HAVE_TE", True)
    for kind in ("glm4", "deepseek_v3", "minimax_m2", "gpt_oss"):
        architecture = read_architecture(hf(kind))
        config = transformer_config(architecture, ParallelLayout(), torch.float32, {})
        with pytest.raises(ConfigError, match=f"transformer_impl.*local; {kind} has layers"):
            spec.check_engine(architecture, config)


def test_older_glm_configs_rotate_half_of_each_head(copy_of):
    assert read_architecture(copy_of("glm4", rope_parameters=None, rope_theta=5e3)).rope == Rope(5e3, 0.5, interleaved=True)
    assert read_architecture(copy_of("glm4_moe", rope_parameters=None, partial_rotary_factor=0.25)).rope.fraction == 0.25


def test_draft_layers_are_passed_over_and_exported_as_they_are(copy_of, make_actor, tmp_path):
    directory = copy_of("glm4_moe", num_nextn_predict_layers=1)
    loaded = actor(directory)
    loaded.save_hf(tmp_path / "without")
    assert json.loads((tmp_path / "without" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    rewrite(directory, lambda t: t.update({"model.layers.2.eh_proj.weight": torch.zeros(32, 64)}))
    with structlog.testing.capture_logs() as logs:
        loaded = actor(directory)
    assert [(line["event"], line["layers"], line["tensors"]) for line in logs] == [("draft_layers_not_loaded", 1, 1)]
    loaded.save_hf(tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model-draft-00001.safetensors")) == {"model.layers.2.eh_proj.weight"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_missing_paths_are_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        actor(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json"):
        actor(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON"):
        actor(tmp_path)


def test_a_checkpoint_without_weights_is_refused(copy_of, make_actor):
    directory = copy_of()
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        actor(directory)
    (directory / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ConfigError, match="readable safetensors"):
        actor(directory)


def rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_missing_tensors_are_named_and_counted(copy_of, make_actor):
    directory = copy_of()
    rewrite(directory, lambda t: [t.pop(name) for name in list(t) if ".layers.1." in name and "norm" not in name])
    with pytest.raises(ConfigError) as error:
        actor(directory)
    assert "model.layers.1.self_attn.q_proj.weight" in str(error.value)
    assert "and 2 more" in str(error.value)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(copy_of, make_actor):
    directory = copy_of()
    rewrite(directory, lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(7, 32)}))
    with pytest.raises(ConfigError) as error:
        actor(directory)
    for part in ("model.layers.0.mlp.up_proj.weight", "(7, 32)", "(48, 32)"):
        assert part in str(error.value)


def test_tensors_that_the_config_does_not_know_are_refused(copy_of, make_actor):
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.input_layernorm\.weight"):
        actor(copy_of(num_hidden_layers=1))


def test_a_tied_model_may_bring_its_output_layer_along(copy_of, make_actor):
    directory = copy_of("qwen3_tied")
    rewrite(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in [name for bucket in actor(directory).export(10**6) for name, _ in bucket]


def test_both_implementations_names_mean_the_same_tensors(hf):
    architecture = read_architecture(hf("qwen3_moe"))
    for local, transformer_engine in (
        ("decoder.layers.1.input_layernorm.weight", "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"),
        ("decoder.layers.1.pre_mlp_layernorm.weight", "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"),
        ("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight", "decoder.layers.0.mlp.experts.linear_fc1.weight3"),
        ("decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight", "decoder.layers.0.mlp.experts.linear_fc2.weight2"),
    ):
        assert recipe(local, architecture) == recipe(transformer_engine, architecture)
        assert set(recipe(local, architecture).names) <= set(hf_tensors(architecture))


def test_an_unknown_parameter_is_a_gap_in_the_table(hf):
    with pytest.raises(KeyError, match=r"self_attention\.new"):
        recipe("decoder.layers.0.self_attention.new.weight", read_architecture(hf("qwen3")))


@table(("layout", "size"), [("plain", 2), ("qkv", 2), ("glu", 2), ("glu", 4), ("vocabulary", 4)])
def test_fusing_and_splitting_are_undone(layout, size, hf):
    architecture = read_architecture(hf("qwen3"))
    shapes = {"plain": [(8, 3)], "qkv": [(64, 3), (32, 3), (32, 3)], "glu": [(8, 3), (8, 3)], "vocabulary": [(67, 3)]}
    tensors = [torch.randn(shape) for shape in shapes[layout]]
    how = Recipe(tuple((f"t{i}", tuple(tensor.shape)) for i, tensor in enumerate(tensors)), layout)
    full = how.fuse(tensors, architecture, rows=68 if layout == "vocabulary" else 0)
    shards = [how.shard(full, 0, rank, size) for rank in range(size)]
    assert len({shard.shape for shard in shards}) == 1
    for tensor, back in zip(tensors, how.parts(how.unshard(shards, 0), architecture), strict=True):
        assert torch.equal(tensor, back.reshape(tensor.shape))
