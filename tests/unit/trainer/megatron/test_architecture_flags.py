"""A model's shape in Megatron's flags: there and back, compared with a checkpoint, and the ready configs of published sizes."""

import dataclasses
import tomllib
from math import prod
from pathlib import Path

import pytest

from docs.flag_tables import ARCHITECTURE
from shared.config.config_reading import load
from shared.model.architecture_flags import check, flags_of
from shared.model.families import read_architecture
from shared.model.tensor_table import hf_tensors
from shared.runtime.errors import ConfigError
from tests.support.architecture_reader import architecture_of
from tests.support.tables import not_refused

CONFIGS = Path(__file__).parents[4] / "configs" / "models"
KINDS = ["qwen3", "qwen3_tied", "qwen2", "llama", "qwen3_moe", "qwen3_moe_mixed", "glm4", "glm4_moe", "glm4_moe_air"]
KINDS += ["deepseek_v3", "moonlight", "gpt_oss", "qwen3_next", "qwen3_5"]
KINDS += ["deepseek_v32"]

PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "glm-4-9b": 9_400_279_040,
    "glm-4-32b": 32_566_081_536,
    "glm-4.7-flash": 29_943_393_920,
    "deepseek-v3": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448,
    "gemma-3-1b": 999_885_952,
    "mistral-7b": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
"""As published, tied embeddings once."""

WITH_DRAFT_LAYER = {"glm-4.5-air": 110_468_824_832, "glm-4.5": 358_337_791_296}
"""As published, with the layer that guesses a further token."""

WITHOUT_EMBEDDINGS = {"moonlight-16b-a3b": 15.29e9, "minimax-m2": 227.5e9}
"""As published, to four digits."""

AS_TRANSFORMERS_HAS_IT = {
    "qwen3-next-80b-a3b": ("Qwen3Next", {}),
    "qwen3.5-0.8b": (
        "Qwen3_5",
        {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2}
        | {"linear_num_value_heads": 16, "tie_word_embeddings": True},
    ),
    "qwen3.5-4b": ("Qwen3_5", {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True}),
    "qwen3.5-9b": ("Qwen3_5", {}),
    "qwen3.5-27b": (
        "Qwen3_5",
        {"num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24, "linear_num_value_heads": 48},
    ),
    "qwen3.5-35b-a3b": ("Qwen3_5Moe", {}),
}
"""The defaults of transformers' configs are those of one published model; the entries in which others differ."""

BY_SHAPE = {"deepseek-v3.2": 671_877_944_064, "glm-5": 743_911_218_432, "glm-5.2": 743_911_218_432}
"""Worked out from the published sizes, an indexer in each layer: flags do not say which layers of GLM-5.2 share one."""

SHAPED_AS = {"deepseek-v3.1": "deepseek-v3", "glm-4.6": "glm-4.5", "glm-4.7": "glm-4.5"}
"""Later models whose published config.json has the same shape: the contexts differ at most."""

ALL = (*PARAMETERS, *WITH_DRAFT_LAYER, *WITHOUT_EMBEDDINGS, *AS_TRANSFORMERS_HAS_IT, *BY_SHAPE, *SHAPED_AS)


def config(name):
    return tomllib.loads((CONFIGS / f"{name}.toml").read_text())["trainer"]


def shape(name):
    return architecture_of({key: value for key, value in config(name)["megatron"].items() if key in ARCHITECTURE})


def parameters(architecture, prefix=""):
    return sum(prod(size) for name, size in hf_tensors(architecture).items() if name.startswith(prefix))


def test_there_is_a_config_of_every_size():
    assert {path.stem for path in CONFIGS.glob("*.toml")} == {*ALL}


def test_a_config_has_the_published_number_of_parameters():
    counts = PARAMETERS | BY_SHAPE
    assert {name: parameters(shape(name)) for name in counts} == counts
    for name, count in counts.items():
        assert f"{count:,} parameters" in (CONFIGS / f"{name}.toml").read_text()


@pytest.mark.parametrize("name", WITH_DRAFT_LAYER)
def test_with_a_draft_layer_it_has_them_too(name):
    a = shape(name)
    one_more = parameters(a, f"model.layers.{a.num_layers - 1}.")
    # its own embedding and output layer, three norms, and a projection of a hidden state beside an embedding
    rest = 2 * a.vocab_size * a.hidden_size + 3 * a.hidden_size + 2 * a.hidden_size**2
    assert parameters(a) + one_more + rest == WITH_DRAFT_LAYER[name]


@pytest.mark.parametrize("name", SHAPED_AS)
def test_a_later_model_has_the_shape_and_the_layout_of_the_one_before(name):
    assert config(name) == config(SHAPED_AS[name])
    assert f"{parameters(shape(name)):,} parameters" in (CONFIGS / f"{name}.toml").read_text()


@pytest.mark.parametrize("name", WITHOUT_EMBEDDINGS)
def test_without_embeddings_it_has_them_too(name):
    a = shape(name)
    assert parameters(a) - 2 * a.vocab_size * a.hidden_size == pytest.approx(WITHOUT_EMBEDDINGS[name], rel=5e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extra if name.startswith("qwen3.5") else ()) for name in AS_TRANSFORMERS_HAS_IT]
)
def test_it_has_the_parameters_that_transformers_has(name):
    import torch
    import transformers

    kind, changes = AS_TRANSFORMERS_HAS_IT[name]
    config = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config(**changes))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert parameters(shape(name)) == count and f"{count:,} parameters" in (CONFIGS / f"{name}.toml").read_text()


def test_a_configs_layout_divides_its_model():
    from services.trainer.megatron.megatron_backend import resolve
    from shared.config.trainer_section import TrainerSection
    from shared.model.parallel_layout import ParallelLayout, division_problems

    for name in ALL:
        given = config(name)
        assert 1 <= given.pop("actor_num_gpus_per_node") <= 8
        flags = resolve(given.pop("megatron"))
        assert not list(division_problems(shape(name), ParallelLayout.of(TrainerSection(**given)), flags.transformer)), name
        check(flags.architecture, shape(name))


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-14b", "glm-4-9b"])
def test_a_run_takes_a_config_as_its_base(name, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        f'base = "{CONFIGS / name}.toml"\n[run]\nname = "test"\n[model]\nhf_checkpoint = "model"\n'
        '[data]\nprompt_data = "p.jsonl"\n[rollout]\nnum_rollout = 1\nrollout_batch_size = 8\nn_samples_per_prompt = 2\n'
    )
    trainer = load(path).trainer
    assert trainer.megatron["num_layers"] == config(name)["megatron"]["num_layers"]
    assert trainer.tensor_model_parallel_size == config(name).get("tensor_model_parallel_size", 1)


def test_there_and_back(hf):
    for kind in KINDS:
        architecture = read_architecture(hf(kind))
        flags = flags_of(architecture)
        assert flags.keys() <= ARCHITECTURE.keys()
        assert architecture_of(flags) == dataclasses.replace(architecture, draft_layers=0), kind  # the checkpoint alone has them
        check(flags, architecture)


def test_kimi_k2_comes_back_as_deepseek_v3(hf):
    kimi = dataclasses.replace(read_architecture(hf("deepseek_v3")), model_type="kimi_k2", draft_layers=1)
    assert architecture_of(flags_of(kimi)) == read_architecture(hf("deepseek_v3"))


def test_flags_of_another_shape_are_refused(hf):
    cases = [
        ("qwen3", {"num_layers": 24}, ["trainer.megatron.num_layers", "24", "2, as the checkpoint has"]),
        ("qwen3", {"untie_embeddings_and_output_weights": False}, ["untie_embeddings_and_output_weights", "True"]),
        ("qwen3", {"num_experts": 8}, ["num_experts", "8", "not given"]),
        ("qwen3", {"multi_latent_attention": True}, ["multi_latent_attention", "False"]),
        ("qwen3_moe_mixed", {"moe_layer_freq": 1}, ["moe_layer_freq", "[0, 1]"]),
        ("deepseek_v3", {"mscale": 1.0}, ["mscale", "0.7"]),
        ("glm4", {"post_mlp_layernorm": False}, ["post_mlp_layernorm", "True"]),
        ("gpt_oss", {"swiglu": True}, ["swiglu", "False"]),
        ("gpt_oss", {"window_size": [128, 0]}, ["window_size", "[7, 0]"]),
        ("gpt_oss", {"window_attn_skip_freq": 3}, ["window_attn_skip_freq", "[1, 0]"]),
        ("qwen3", {"window_size": [128, 0]}, ["window_size", "not given"]),
        ("qwen3", {"softmax_type": "learnable"}, ["softmax_type", "vanilla"]),
    ]
    assert not not_refused(lambda kind, flags: check(flags, read_architecture(hf(kind))), cases)


def test_flags_that_say_nothing_are_accepted(hf):
    check({"num_experts": None, "mscale": 1.0, "moe_router_topk": 2}, read_architecture(hf("qwen3")))
    check({"moe_router_pre_softmax": True}, read_architecture(hf("deepseek_v3")))
    check({"moe_layer_freq": 1}, read_architecture(hf("qwen3_moe")))
    check({"window_attn_skip_freq": 2, "glu_linear_offset": 1.0}, read_architecture(hf("gpt_oss")))


def test_flags_of_no_known_shape_are_refused():
    flags = {key: value for key, value in config("llama-3.2-1b")["megatron"].items() if key in ARCHITECTURE}
    cases = [
        ({"hidden_size": None}, ["hidden_size"]),
        ({"normalization": "LayerNorm"}, ["normalization", "RMSNorm"]),
        ({"lr": 1e-6}, ["lr", "architecture flag"]),
        ({"post_mlp_layernorm": True}, ["post_mlp_layernorm"]),
        ({"qk_layernorm": True, "add_qkv_bias": True}, ["llama", "deepseek_v3"]),
    ]
    assert not not_refused(lambda change: architecture_of(flags | change), cases)


def test_what_scripts_say_without_effect_is_accepted(hf):
    """Published scripts of Moonlight stretch by 1, those of Kimi-K2 give key channels that latent attention does not have."""
    flags = {"multi_latent_attention": True, "kv_channels": 64, "rotary_scaling_factor": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    check(flags, read_architecture(hf("moonlight")))
    with pytest.raises(ConfigError, match="rotary_scaling_factor = 40"):
        check({**flags, "rotary_scaling_factor": 40}, read_architecture(hf("moonlight")))
    with pytest.raises(ConfigError, match="rotary_scaling_factor"):
        check(flags, read_architecture(hf("deepseek_v3")))
    with pytest.raises(ConfigError, match="kv_channels"):
        check({"kv_channels": 64}, read_architecture(hf("qwen3")))
