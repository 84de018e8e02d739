"""Megatron's flags and ``--spec``, checked without torch."""

from pathlib import Path
from typing import Any

import pytest

from shared.config import config_reading, flag_table, flags
from shared.config.config_reading import load, parse
from shared.config.run_config import changes, field_sections
from shared.model import architecture_flags
from shared.model.architecture_flags import is_own_module
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config, values
from tests.support.tables import table

# how scripts launch Megatron and slime: dense, mixture of experts, latent attention, and what they say of training
SCRIPTS = {
    "dense": "--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6 "
    "--rotary-base 1000000 --vocab-size 151936 --kv-channels 128 --qk-layernorm --add-qkv-bias --untie-embeddings-and-output-weights "
    "--max-position-embeddings 40960 --position-embedding-type rope --rotary-percent 1.0",
    "experts": "--num-experts 128 --moe-ffn-hidden-size 768 --moe-router-score-function softmax --moe-token-dispatcher-type alltoall "
    "--moe-router-topk 8 --moe-layer-freq [0]*1+[1]*47 --moe-grouped-gemm --moe-token-drop-policy probs --moe-router-dtype fp32 "
    "--moe-permute-fusion --moe-aux-loss-coeff 0 --moe-router-load-balancing-type seq_aux_loss --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0 --moe-shared-expert-intermediate-size 2048 --moe-router-topk-scaling-factor 2.5",
    "latent": "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
    "--rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --no-rope-fusion",
    "training": "--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 "
    "--attention-backend flash --no-check-for-nan-in-loss-and-grad --optimizer adam --no-gradient-accumulation-fusion "
    "--decoder-last-pipeline-num-layers 12 --no-masked-softmax-fusion --ckpt-format torch_dist",
}


def given(words: str) -> dict[str, Any]:
    return flags.parse(words.split()).get("trainer", {}).get("megatron", {})


@table("script", SCRIPTS)
def test_flags_of_scripts_are_taken_as_they_are(script: str, tmp_path: Path) -> None:
    megatron = given(SCRIPTS[script])
    config = run_config(tmp_path, trainer={"megatron": megatron})
    assert config.trainer.megatron == megatron
    assert len(megatron) == sum(word.startswith("--") for word in SCRIPTS[script].split())


@table(
    ("words", "expected"),
    [
        ("--moe-router-dtype fp64", {"moe_router_dtype": "fp64"}),
        ("--moe-router-dtype=none", {"moe_router_dtype": None}),
        ("--num-layers 28", {"num_layers": 28}),
        ("--rotary-base 1000000", {"rotary_base": 1e6}),
        ("--swiglu", {"swiglu": True}),
        ("--no-rope-fusion", {"apply_rope_fusion": False}),
        ("--apply-rope-fusion", {"apply_rope_fusion": True}),
        ("--no-apply-rope-fusion", {"apply_rope_fusion": False}),
        ("--apply-rope-fusion false --swiglu", {"apply_rope_fusion": False, "swiglu": True}),
        ("--no-check-for-nan-in-loss-and-grad", {"check_for_nan_in_grad": False}),
        ("--accumulate-allreduce-grads-in-fp32", {"grad_reduce_in_fp32": True}),
        ("--disable-bias-linear", {"disable_bias_linear": True}),
        ("--moe-layer-freq ([0]*1+[1]*3)*2", {"moe_layer_freq": [0, 1, 1, 1, 0, 1, 1, 1]}),
        ("--moe-layer-freq 2", {"moe_layer_freq": 2}),
        ("--offload-modules core_attn attn_proj --swiglu", {"offload_modules": ["core_attn", "attn_proj"], "swiglu": True}),
        ("--fp8-format hybrid", {"fp8": "hybrid"}),
    ],
)
def test_a_flag_gets_its_name_and_its_type(words: str, expected: dict[str, Any]) -> None:
    assert given(words) == expected


@table(
    ("words", "message"),
    [
        ("--moe-router-dtyp fp32", r"--moe-router-dtyp = '': unknown flag; did you mean --moe-router-dtype\?"),
        ("--moe-router-dtype fp31", r"--moe-router-dtype = 'fp31': one of fp32, fp64"),
        ("--moe-router-dtype", r"--moe-router-dtype = '': needs a value: text, one of fp32, fp64"),
        ("--num-layers many", "--num-layers = 'many': a whole number"),
        ("--rotary-base nan", "--rotary-base = 'nan': a number"),
        ("--swiglu=perhaps", "--swiglu = 'perhaps': true or false"),
        ("--moe-layer-freq [1]*99999999", r"a list such as \[0\]\*1\+\[1\]\*27"),
        ("--moe-layer-freq [__import__('os')]", r"a list such as \[0\]\*1\+\[1\]\*27"),
        ("--attention-dropout 0.1", "leave it out, or give 0.0: log-probs must be those of the policy"),
        ("--variable-seq-lengths false", "leave it out, or give true: micro-batches are packed"),
        ("--train-iters 100", "--train-iters = '100': use num_rollout"),
        ("--data-path a b", "--data-path = 'a b': use prompt_data"),
        ("--fp16", "there is no fp16 training"),
        ("--decoder-seq-length 4", "use max_tokens_per_gpu"),
        ("--micro-batch-size many", "--micro-batch-size = 'many': a whole number"),
        ("--moe-token-dispatcher-type everywhere", "one of allgather, alltoall, flex"),
        ("--mamba-state-dim 64", "no model family of Myxo has it"),
        ("--no-lr-decay-iters", "unknown flag"),
    ],
)
def test_what_is_unknown_wrong_or_means_nothing_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flags.parse(words.split())


def test_fields_of_the_config_come_before_flags_of_megatron(tmp_path: Path) -> None:
    assert flags.parse(["--lr", "1e-4"]) == {"trainer": {"lr": "1e-4"}}
    with pytest.raises(ConfigError, match=r"trainer.megatron.lr = 0.1: a field of its own: lr, outside of \[trainer.megatron\]"):
        parse(values(tmp_path, trainer={"megatron": {"lr": 0.1}}))


def test_toml_takes_dashes_underscores_and_every_spelling(tmp_path: Path) -> None:
    megatron = {"moe-router-dtype": "fp64", "no_rope_fusion": True, "moe_layer_freq": [0, 1], "rotary-base": 10000}
    config = run_config(tmp_path, trainer={"megatron": megatron})
    expected = {"moe_router_dtype": "fp64", "apply_rope_fusion": False, "moe_layer_freq": [0, 1], "rotary_base": 10000.0}
    assert config.trainer.megatron == expected


@table(
    ("megatron", "message"),
    [
        ({"moe_router_dtyp": "fp32"}, r"moe_router_dtyp = 'fp32': unknown flag of Megatron's; did you mean moe_router_dtype\?"),
        ({"zzz": 1}, "unknown flag of Megatron's; `myxo flags` lists all"),
        ({"num_layers": 1.5}, "trainer.megatron.num_layers = 1.5: a whole number"),
        ({"num_layers": True}, "trainer.megatron.num_layers = True: a whole number"),
        ({"no_rope_fusion": True, "apply_rope_fusion": True}, "apply_rope_fusion = True: another spelling says apply_rope_fusion = false"),
        ({"train-iters": 3}, "trainer.megatron.train-iters = 3: use num_rollout"),
    ],
)
def test_toml_is_refused_by_key(tmp_path: Path, megatron: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(values(tmp_path, trainer={"megatron": megatron}))


def test_flags_that_nothing_reads_are_taken_and_the_start_says_so() -> None:
    given = {"cuda_graph_impl": "local", "enable_cuda_graph": True, "cuda_graph_scope": ["attn"], "use_te_rng_tracker": True}
    plain = flag_table.canonical(given | {"tp_comm_bootstrap_backend": "mpi", "async_tensor_model_parallel_allreduce": False})
    told = dict(flag_table.without_effect(plain))
    assert len(told) == len(plain) == 6 and "a CUDA graph has one shape" in told["--cuda-graph-impl"]
    assert not [*flag_table.missing_engine(plain)]


def test_the_command_line_stands_over_the_file_in_any_spelling(tmp_path: Path) -> None:
    config = run_config(tmp_path, trainer={"megatron": {"no_rope_fusion": True, "swiglu": True}})
    path = tmp_path / "run.toml"
    path.write_text(config_reading.dump(config))
    again = load(path, flags.parse(["--apply-rope-fusion"]))
    assert again.trainer.megatron == {"apply_rope_fusion": True, "swiglu": True}
    assert [line.split(":")[0] for line in changes(config, again)] == ["trainer.megatron"]


def test_no_flag_hides_behind_a_field_and_every_refusal_has_a_reason() -> None:
    own = field_sections()
    for flag in flag_table.catalogue().values():
        if flag.refused or flag.ignored or flag.fixed is not flag_table.UNSET:
            assert flag.reason, flag.name
        else:
            assert flag.groups, flag.name
            assert not own.keys() & {flag.name, *flag.spellings}, flag.name


# --- what ``--spec`` stands for: the family's layers, a user's module, or nothing that is here

SPECS = "megatron.core.models.gpt.gpt_layer_specs"
ENGINE_SPEC = (SPECS, "get_gpt_layer_with_transformer_engine_spec")


@table(
    ("spec", "model_type", "own"),
    [
        ((), "qwen3", False),
        (("slime_plugins.models.glm4", "get_glm_spec"), "glm4", False),
        (("slime_plugins.models.qwen3_next", "get_qwen3_next_spec"), "qwen3_next", False),
        (("slime_plugins.models.qwen3_5", "get_qwen3_5_spec"), "qwen3_5_moe", False),
        ((SPECS, "get_gpt_layer_local_spec"), "qwen3", False),
        (("layers.of.mine", "spec"), "qwen3", True),
    ],
)
def test_a_users_module_is_told_from_what_the_family_has(spec: tuple[str, ...], model_type: str, own: bool) -> None:
    assert is_own_module(spec, model_type, {}) is own


@pytest.mark.parametrize(
    ("spec", "model_type", "words"),
    [
        (("slime_plugins.models.glm4", "get_glm_spec"), "qwen3", "layers are those of its glm4, and qwen3 has its own"),
        (("slime_plugins.models.qwen3_next", "get_qwen3_next_spec"), "qwen3", "layers are those of its qwen3_next"),
        (("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"), "qwen3", "for models that are not here"),
        ((SPECS, "no_such_spec"), "qwen3", "for models that are not here"),
        (ENGINE_SPEC, "qwen3", "Transformer Engine is not installed"),
    ],
)
def test_layers_that_are_not_here_are_refused(spec: tuple[str, ...], model_type: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture_flags, "has_engine", lambda: False)
    with pytest.raises(ConfigError, match=f"trainer.spec.*{words}"):
        is_own_module(spec, model_type, {})


def test_layers_of_transformer_engine_go_with_its_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture_flags, "has_engine", lambda: True)
    assert not is_own_module(ENGINE_SPEC, "qwen3", {"transformer_impl": "transformer_engine"})
    with pytest.raises(ConfigError, match="transformer_engine for trainer.megatron.transformer_impl"):
        is_own_module(ENGINE_SPEC, "qwen3", {})
    with pytest.raises(ConfigError, match="local for trainer.megatron.transformer_impl"):
        is_own_module((SPECS, "get_gpt_layer_local_spec"), "qwen3", {"transformer_impl": "transformer_engine"})
