"""Frozen parameters stay, the others train as if alone, in every layout."""

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.megatron.hf_conversion import MegatronGatherPlan
from services.trainer.megatron.hf_weights import parameters
from shared.model.tensor_table import megatron_parameters
from shared.runtime.errors import ConfigError
from tests.support.tables import not_refused, rare, table
from tests.unit.trainer.megatron import lora_steps, rank_steps
from tests.unit.trainer.megatron.test_checkpoint import NO_EMBEDDING, UPPER
from tests.unit.trainer.megatron.test_layouts import EP2, PP2, TP2_SP, WHOLE, assert_steps
from tests.unit.trainer.megatron.test_train_step import reference_steps

LOWER = {"freeze_params_name_list": (r"layers\.1\.", "final_layernorm", "output_layer")}

CASES = {"PP2, nothing trains on the first stage": ("qwen3", UPPER, PP2)}
MORE = {
    "TP2 SP recompute": ("qwen3", NO_EMBEDDING, {**TP2_SP, "recompute": True}),
    "MoE EP2, only experts": ("qwen3_moe", {"only_train_params_name_list": ("experts",)}, EP2),
    "DP2": ("qwen3", UPPER, {}),
    "PP2, nothing trains on the last stage": ("qwen3", LOWER, PP2),
    "PP2, a tied embedding": ("qwen3_tied", NO_EMBEDDING, PP2),
    "DP2 whole optimizer": ("qwen3", UPPER, WHOLE),
    "PP2, nothing trains on the first stage, whole optimizer": ("qwen3", UPPER, {**PP2, **WHOLE}),
    "MoE EP2, routers frozen": ("qwen3_moe", {"freeze_params_name_list": ("router",)}, EP2),
}


@pytest.mark.parametrize("kind", ["qwen2", rare("qwen3")])
def test_steps_equal_plain_pytorch(kind, make_actor, hf, monkeypatch):
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained

    def frozen(*args, **kwargs):
        model = load(*args, **kwargs)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1." in name and "down_proj" not in name)
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", frozen)
    given = {"only_train_params_name_list": (r"layers\.1\.",), "freeze_params_name_list": ("linear_fc2",)}
    actor = make_actor(kind, **given, lr=2e-3, weight_decay=0.1, adam_beta2=0.95, clip_grad=0.8)
    data = [rank_steps.share(actor, seed) for seed in range(2)]
    expected, weights = reference_steps(hf(kind), data, lr=2e-3, clip=0.8, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    assert_steps(rank_steps.steps(actor, 2), expected)
    loaded = load_file(hf(kind) / "model.safetensors")
    for name, tensor in rank_steps.exported(actor).items():
        torch.testing.assert_close(tensor, weights[name], atol=2e-5, rtol=0)
        assert torch.equal(tensor, loaded[name]) == ("layers.1." not in name or "down_proj" in name), name


@pytest.mark.parametrize("case", [*CASES, *map(rare, MORE)])
def test_two_ranks_equal_one_process(case, hf, once, two_ranks):
    kind, given, layout = (CASES | MORE)[case]
    expected = once(lora_steps.train, hf(kind), given, 2)
    ranks = two_ranks.run(lora_steps.train, hf(kind), {**given, **layout}, 2)
    for rank in ranks:
        assert_steps(rank["steps"], expected["steps"])
    loaded = load_file(hf(kind) / "model.safetensors")
    for name, tensor in ranks[0]["weights"].items():
        assert (tensor - expected["weights"][name]).abs().max() < 1e-4, name
        assert torch.equal(tensor, loaded[name]) == torch.equal(expected["weights"][name], loaded[name]), name
    moved = {name for name, tensor in expected["weights"].items() if not torch.equal(tensor, loaded[name])}
    assert moved and moved < set(loaded)


def test_a_checkpoint_of_other_frozen_parameters_is_refused(make_actor, tmp_path):
    make_actor("qwen3", **UPPER).save_checkpoint(tmp_path, 1)
    with pytest.raises(ConfigError, match="freezing.*final_layernorm.*None"):
        make_actor("qwen3").load_checkpoint(tmp_path)
    make_actor("qwen3").load_checkpoint(tmp_path, reset_optimizer_states=True)


def test_the_exporter_knows_what_is_frozen(make_actor):
    frozen = MegatronGatherPlan(make_actor("qwen3", **UPPER).model).frozen
    assert "embedding.word_embeddings.weight" in frozen and "decoder.layers.0.mlp.linear_fc1.weight" in frozen
    assert not any("layers.1." in name or name == "output_layer.weight" for name in frozen)
    assert not MegatronGatherPlan(make_actor("qwen3").model).frozen


def test_names_count_layers_over_the_whole_model(hf, two_ranks):
    """With two stages every stage's own first layer is number 0 to Megatron."""
    given = {"freeze_params_name_list": (r"layers\.0\.",), **PP2}
    weights = two_ranks.run(lora_steps.train, hf("qwen3"), given, 1)[0]["weights"]
    loaded = load_file(hf("qwen3") / "model.safetensors")
    assert all(torch.equal(tensor, loaded[name]) == ("layers.0." in name) for name, tensor in weights.items())


def test_patterns_that_cannot_be_meant_are_refused(make_actor):
    cases = [
        ("qwen3", {"freeze_params_name_list": ("embedding", "no_such_thing")}, ["freeze_params", "no_such_thing", "word_embeddings"]),
        ("qwen3", {"only_train_params_name_list": ("q_proj",)}, ["only_train_params", "q_proj", "Megatron"]),
        ("qwen3_tied", {"freeze_params_name_list": ("output_layer",)}, ["freeze_params", "output_layer"]),
        ("qwen3", {"freeze_params_name_list": (".",)}, ["freeze_params", "all is frozen"]),
        ("qwen2", {"freeze_params_name_list": (r"linear_qkv\.weight",)}, ["freeze_params", "together", "linear_qkv.bias"]),
    ]
    assert not not_refused(lambda kind, config: make_actor(kind, **config), cases)


def test_a_pattern_is_refused_on_every_rank(hf, two_ranks):
    with pytest.raises(Exception, match=r"ConfigError.*no_such_thing"):
        two_ranks.run(lora_steps.train, hf("qwen3"), {"freeze_params_name_list": ("no_such_thing",), **PP2})


@pytest.mark.extra
@table("kind", ["qwen2", "qwen3", "qwen3_tied", "qwen3_moe_mixed", "glm4", "glm4_moe", "deepseek_v3"])
def test_the_names_that_patterns_are_checked_by_are_the_models(kind, make_actor):
    model = make_actor(kind).model
    held = parameters(model.modules, model.config, model.architecture)
    trained = {local.name for local in held if isinstance(local.parameter, torch.nn.Parameter)}
    assert set(megatron_parameters(model.architecture)) == trained
