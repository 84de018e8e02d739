"""A launch script of slime's, shrunk until it trains on a CPU in seconds: the same flags with smaller values, and a model made to fit them.

One transformation for all scripts: sizes, lengths and counts come down to `SMALL`, devices to one CPU, paths to files made here; what
only a GPU has, or needs a network, is left out (`left_out`). What remains is the script's own.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.config import flag_table
from tests.support.tiny_model import PRINTABLE, character_tokenizer

VOCABULARY = len(PRINTABLE) + 4

SMALL: dict[str, float] = {
    **{"num-layers": 2, "hidden-size": 32, "ffn-hidden-size": 48, "num-attention-heads": 4, "num-query-groups": 2, "kv-channels": 16},
    **{"vocab-size": VOCABULARY, "max-position-embeddings": 1024},
    **{"num-experts": 4, "moe-router-topk": 2, "moe-ffn-hidden-size": 24, "moe-shared-expert-intermediate-size": 24},
    **{"moe-router-num-groups": 2, "moe-router-group-topk": 1, "rollout-stop-token-ids": VOCABULARY - 1},
    **{"q-lora-rank": 24, "kv-lora-rank": 16, "qk-head-dim": 12, "qk-pos-emb-head-dim": 8, "v-head-dim": 16},
    **{"actor-num-nodes": 1, "actor-num-gpus-per-node": 1, "rollout-num-gpus": 1, "rollout-num-gpus-per-engine": 1},
    **{"tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1, "context-parallel-size": 1},
    **{"expert-model-parallel-size": 1, "expert-tensor-parallel-size": 1},
    **{"num-rollout": 3, "rollout-batch-size": 2, "over-sampling-batch-size": 2, "n-samples-per-prompt": 4},
    **{"rollout-max-response-len": 8, "rollout-max-context-len": 256, "max-tokens-per-gpu": 512},
    **{"n-samples-per-eval-prompt": 1, "eval-max-response-len": 8, "eval-interval": 2, "save-interval": 2},
    **{"sglang-server-concurrency": 8},
}
"""The most that a number may be, by flag."""

GPU_ONLY = {
    *("attention-backend", "transformer-impl", "moe-permute-fusion", "moe-enable-deepep"),
    *("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
    *("optimizer-cpu-offload", "overlap-cpu-optimizer-d2h-h2d", "use-precision-aware-optimizer"),
    *("fp8-format", "fp8-recipe", "fp8-param-gather", "bf16"),
}
"""Flags of Megatron's whose kernels need a GPU, or several of them, or Transformer Engine."""

KEPT_OF_SGLANG = {"sglang-mem-fraction-static", "sglang-server-concurrency", "sglang-cuda-graph-bs"}
"""Flags of SGLang's that say nothing of kernels, parallel ranks and drafts."""

NETWORKED = ("wandb", "use-wandb")
"""Beginnings of flags that need a network."""

ON_A_CPU = (("train-device", ("cpu",)), ("rollout-device", ("cpu",)), ("train-dtype", ("float32",)))


def shrunk(script: Sequence[str], places: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The flags of the shrunk script, without their dashes, with their values.

    Args:
        script: the words of its command line. places: the values of flags that name files and functions.

    Raises KeyError for a path of which ``places`` says nothing.
    """
    flags = {flag: values for flag, values in _flags(script).items() if not left_out(flag)}
    samples = _steps_per_rollout(flags)
    for flag, values in flags.items():
        if flag == "moe-layer-freq":
            values[:] = [_kinds_of_layers(values[0])]
        elif flag in SMALL:
            values[:] = [_smaller(value, int(SMALL[flag])) for value in values]
        elif flag in places:
            values[:] = places[flag]
        elif any(value.startswith(("/", "./", "examples/")) for value in values):
            raise KeyError(flag)
    if "global-batch-size" in flags:
        flags["global-batch-size"] = [str(_samples(flags) // samples)]
    if flags.get("moe-token-dispatcher-type") == ["flex"]:
        flags["moe-token-dispatcher-type"] = ["alltoall"]
    return {**flags, **{flag: list(values) for flag, values in ON_A_CPU}}


def _flags(script: Sequence[str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    values: list[str] = []
    for word in script:
        if word.startswith("--"):
            values = flags[word.removeprefix("--")] = []  # a later one holds
        else:
            values.append(word)
    return flags


def left_out(flag: str) -> bool:
    """Whether a flag has no meaning on one CPU without a network."""
    return flag in GPU_ONLY or flag.startswith(NETWORKED) or (flag.startswith("sglang-") and flag not in KEPT_OF_SGLANG)


def command_line(flags: Mapping[str, Iterable[str]]) -> list[str]:
    """The words of flags."""
    return [word for flag, values in flags.items() for word in (f"--{flag}", *values)]


def _smaller(value: str, most: int) -> str:
    """A number, at most ``most``; that for a script's own variable, whose value nobody has written down."""
    return str(min(int(value), most)) if value.lstrip("-").isdigit() else str(most)


def _kinds_of_layers(frequency: str) -> str:
    """The first and the last layer of ``moe_layer_freq``: one of each kind, where there are two."""
    given = flag_table.catalogue()["moe_layer_freq"].typed(frequency)
    layers = given if isinstance(given, list) else [1]
    return str([layers[0], layers[-1]]).replace(" ", "")


def _samples(flags: Mapping[str, Sequence[str]]) -> int:
    return int(flags["rollout-batch-size"][0]) * int(flags.get("n-samples-per-prompt", ["1"])[0])


def _steps_per_rollout(flags: Mapping[str, Sequence[str]]) -> int:
    return max(1, _samples(flags) // int(flags["global-batch-size"][0])) if "global-batch-size" in flags else 1


def write_model(directory: Path, flags: Mapping[str, Sequence[str]], seed: int = 0) -> None:
    """Writes a random checkpoint of the family and the shape that a script's flags describe, with a tokenizer of a token a character."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(model_config(flags)).float().save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)


def model_config(flags: Mapping[str, Sequence[str]]) -> Any:
    """The Hugging Face config of the architecture flags."""
    import transformers

    def number(flag: str, default: int = 0) -> int:
        return int(flags[flag][0]) if flag in flags else default

    heads = number("num-attention-heads")
    shape: dict[str, Any] = {
        "vocab_size": number("vocab-size"),
        "hidden_size": number("hidden-size"),
        "intermediate_size": number("ffn-hidden-size"),
        "num_hidden_layers": number("num-layers"),
        "num_attention_heads": heads,
        "max_position_embeddings": int(SMALL["max-position-embeddings"]),
        "rms_norm_eps": float(flags.get("norm-epsilon", ["1e-5"])[0]),
        "rope_parameters": _rope(flags),
        "tie_word_embeddings": "untie-embeddings-and-output-weights" not in flags,
        "initializer_range": 0.1,
        **{"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
    }
    attention = {"num_key_value_heads": number("num-query-groups", heads), "head_dim": number("kv-channels", shape["hidden_size"] // heads)}
    dense = json.loads(flags["moe-layer-freq"][0]).count(0) if "moe-layer-freq" in flags else 0
    experts = {"num_experts_per_tok": number("moe-router-topk"), "moe_intermediate_size": number("moe-ffn-hidden-size")}
    if "multi-latent-attention" in flags or flags.get("moe-router-score-function") == ["sigmoid"]:
        experts |= {
            "n_routed_experts": number("num-experts"),
            "n_shared_experts": number("moe-shared-expert-intermediate-size") // max(1, number("moe-ffn-hidden-size")),
            "first_k_dense_replace": dense,
            "n_group": number("moe-router-num-groups", 1),
            "topk_group": number("moe-router-group-topk", 1),
            "routed_scaling_factor": float(flags.get("moe-router-topk-scaling-factor", ["1"])[0]),
            "norm_topk_prob": True,
        }
        if "multi-latent-attention" not in flags:
            with_norm = "qk-layernorm" in flags
            return transformers.Glm4MoeConfig(
                **shape, **attention, **experts, use_qk_norm=with_norm, attention_bias="add-qkv-bias" in flags
            )
        latent = {
            "q_lora_rank": number("q-lora-rank") or None,
            "kv_lora_rank": number("kv-lora-rank"),
            "qk_nope_head_dim": number("qk-head-dim"),
            "qk_rope_head_dim": number("qk-pos-emb-head-dim"),
            "v_head_dim": number("v-head-dim"),
        }
        own = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}  # not transformers' own entries
        return transformers.DeepseekV3Config(**shape, **experts, **latent, **own)
    if "num-experts" in flags:
        normalized = "moe-router-pre-softmax" not in flags
        plain = list(range(dense))
        return transformers.Qwen3MoeConfig(
            **shape, **attention, **experts, num_experts=number("num-experts"), norm_topk_prob=normalized, mlp_only_layers=plain
        )
    if "post-self-attn-layernorm" in flags:
        return transformers.Glm4Config(**shape, **attention, attention_bias="add-qkv-bias" in flags)
    if "qk-layernorm" in flags:
        return transformers.Qwen3Config(**shape, **attention)
    if "add-qkv-bias" in flags:
        del attention["head_dim"]
        return transformers.Qwen2Config(**shape, **attention)
    return transformers.LlamaConfig(**shape, **attention)


def _rope(flags: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The rotary embedding; YaRN's where a factor above 1 stretches the context."""
    base = {"rope_theta": float(flags.get("rotary-base", ["10000"])[0])}
    factor = float(flags.get("rotary-scaling-factor", ["1"])[0])
    if factor == 1 or "multi-latent-attention" not in flags:
        return {"rope_type": "default", **base}
    scales = {name.replace("-", "_"): float(flags[name][0]) for name in ("mscale", "mscale-all-dim") if name in flags}
    return {"rope_type": "yarn", **base, "factor": factor, "original_max_position_embeddings": 4096, **scales}
