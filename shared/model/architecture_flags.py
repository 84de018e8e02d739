"""An architecture in the names of Megatron's command line.

A model's shape comes from its Hugging Face checkpoint. Flags that describe a shape are compared with it (`differences`), so that a script
written for another size is refused; where no checkpoint is at hand, they are the shape (`described_shape`). Two names are common
beside Megatron's: ``post_self_attn_layernorm`` and ``post_mlp_layernorm``, the norms after each block.

``--spec MODULE NAME`` stands for the layers of the model's family, or those of a user's own module. A model's layers follow from its
family (docs/models.md): Megatron's own specs and slime's for single models say nothing more, or need what is not here; any other module is
imported by the trainer (`services.trainer.megatron.spec`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shared.config import flag_table
from shared.config.flag_table import has_engine
from shared.model.architecture import (
    Architecture,
    Experts,
    GroupedYarn,
    Indexer,
    LatentAttention,
    LinearAttention,
    Llama3Scaling,
    Rope,
    YarnScaling,
)
from shared.runtime.errors import ConfigError

LINEAR = ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads")


def flags_of(architecture: Architecture) -> dict[str, Any]:
    """Returns every architecture flag that applies, in Megatron's names with underscores; switches are all there, true or false."""
    a = architecture
    grouped = a.latent is None and a.num_key_value_heads != a.num_attention_heads
    flags: dict[str, Any] = {
        "position_embedding_type": "yarn" if isinstance(a.rope.scaling, GroupedYarn) else "rope",
        "use_rotary_position_embeddings": True,
        "rotary_base": a.rope.theta,
        "rotary_percent": a.rope.fraction,
        "rotary_interleaved": a.rope.interleaved,
        "use_rope_scaling": isinstance(a.rope.scaling, Llama3Scaling),
    }
    if isinstance(a.rope.scaling, Llama3Scaling):
        flags["rope_scaling_factor"] = a.rope.scaling.factor
    if isinstance(s := a.rope.scaling, GroupedYarn):
        flags |= {"rotary_scaling_factor": s.factor, "original_max_position_embeddings": s.original_max_positions}
        flags |= {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow}
    return {
        "num_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "ffn_hidden_size": a.ffn_hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "group_query_attention": grouped,
        **({"num_query_groups": a.num_key_value_heads} if a.latent is None else {}),
        "kv_channels": a.head_dim if a.latent is None else a.latent.qk_head_dim,
        "normalization": "RMSNorm",
        "norm_epsilon": a.norm_eps,
        "apply_layernorm_1p": a.zero_centered_norms,
        "qk_layernorm": a.qk_norm or a.joint_qk_norm or a.latent is not None,
        "post_self_attn_layernorm": a.post_norms,
        "post_mlp_layernorm": a.post_norms,
        "add_qkv_bias": a.qkv_bias,
        "attention_output_gate": a.output_gate,
        "disable_bias_linear": not a.biases,
        **_activation_flags(a.experts, a.gelu),
        "softmax_type": "learnable" if a.sinks else "vanilla",
        **({"window_size": [max(a.windows), 0], "window_attn_skip_freq": [int(w > 0) for w in a.windows]} if any(a.windows) else {}),
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_positions,
        "untie_embeddings_and_output_weights": not a.tied_embeddings,
        **flags,
        **_latent_flags(a.latent, a.rope),
        **_linear_flags(a),
        **_indexer_flags(a.indexer),
        **_expert_flags(a),
    }


def _activation_flags(experts: Experts | None, gelu: bool) -> dict[str, Any]:
    if experts is None or experts.swiglu_limit is None:
        return {"swiglu": not gelu, "quick_geglu": False}
    clamped = {"glu_linear_offset": 1.0, "activation_func_clamp_value": experts.swiglu_limit}
    return {"swiglu": False, "quick_geglu": True, **clamped}


def _latent_flags(latent: LatentAttention | None, rope: Rope) -> dict[str, Any]:
    if latent is None:
        return {"multi_latent_attention": False}
    scaling = asdict(rope.scaling) if isinstance(rope.scaling, YarnScaling) else {}
    return {"multi_latent_attention": True, **asdict(latent), "rope_type": "yarn" if scaling else "rope", **scaling}


def _linear_flags(a: Architecture) -> dict[str, Any]:
    if a.linear is None:
        return {}
    sizes = {name: getattr(a.linear, name) for name in LINEAR}
    pattern = [int(a.is_linear_layer(layer)) for layer in range(a.num_layers)]
    return {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": pattern, **sizes}


def _indexer_flags(indexer: Indexer | None) -> dict[str, Any]:
    if indexer is None:
        return {}
    sizes = {"n_heads": indexer.heads, "head_dim": indexer.head_dim, "topk": indexer.top_k}
    return {"experimental_attention_variant": "dsa", **{f"dsa_indexer_{name}": size for name, size in sizes.items()}}


def _expert_flags(a: Architecture) -> dict[str, Any]:
    experts = a.experts
    if experts is None:
        return {}
    flags: dict[str, Any] = {
        "num_experts": experts.count,
        "moe_layer_freq": [int(a.is_moe_layer(layer)) for layer in range(a.num_layers)],
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_router_topk": experts.per_token,
        "moe_router_score_function": experts.score,
        "moe_router_enable_expert_bias": experts.score == "sigmoid",
        "moe_shared_expert_gate": experts.shared_gate,
    }
    if experts.shared_ffn_hidden_size:
        flags["moe_shared_expert_intermediate_size"] = experts.shared_ffn_hidden_size
    if experts.score == "softmax":
        # softmax over the chosen experts' logits is softmax over all, rescaled; without rescaling it comes first
        flags["moe_router_pre_softmax"] = not experts.normalize
    else:
        flags |= {
            "moe_router_num_groups": experts.groups,
            "moe_router_group_topk": experts.groups_per_token,
            "moe_router_topk_scaling_factor": experts.scaling,
        }
    return flags


def check(given: Mapping[str, Any], architecture: Architecture) -> None:
    """Compares architecture flags with the checkpoint. Raises the first ConfigError of `differences`."""
    for difference in differences(given, architecture):
        raise difference


def differences(given: Mapping[str, Any], architecture: Architecture) -> Iterator[ConfigError]:
    """Yields an error for each architecture flag that differs from the checkpoint: the flag and both values.

    A flag of a feature that the model does not have is accepted at Megatron's default, which has no effect.
    """
    own = flags_of(architecture)
    if architecture.experts is not None and architecture.experts.score == "sigmoid":
        own["moe_router_pre_softmax"] = given.get("moe_router_pre_softmax")  # means nothing to a sigmoid router
    own |= {name: given[name] for name in _without_effect(given, architecture) if name in given}
    for name, value in given.items():
        if name in own:
            wanted = own[name]
            value = layer_pattern(name, value, architecture.num_layers) if name in _PATTERNS else value
            if value != wanted:
                yield ConfigError(f"trainer.megatron.{name}", given[name], f"{wanted!r}, as the checkpoint has")
        elif value is not None and value != default_of(name):
            yield ConfigError(f"trainer.megatron.{name}", value, f"not given; the checkpoint's {architecture.model_type} has none")


def _without_effect(given: Mapping[str, Any], architecture: Architecture) -> tuple[str, ...]:
    """Returns the flags of latent attention that mean nothing to this model, whatever their value: scripts set them all the same.

    Heads are as wide as their parts say, no projection has a bias, and a context that YaRN stretches by 1 stays as it is.
    """
    if architecture.latent is None:
        return ()
    unscaled = architecture.rope.scaling is None and given.get("rotary_scaling_factor") == 1
    return ("kv_channels", "add_qkv_bias", *(("rotary_scaling_factor", "mscale", "mscale_all_dim") if unscaled else ()))


def default_of(name: str) -> Any:
    """Returns Megatron's own default of an architecture flag; None for any other name."""
    flag = flag_table.catalogue().get(name)
    return flag.default if flag is not None and "architecture" in flag.groups else None


# Flags that say which layers have something: n stands for every n-th layer from the first, or for all but every n-th
_PATTERNS: dict[str, Callable[[int, int], bool]] = {
    "moe_layer_freq": lambda layer, n: layer % n == 0,
    "window_attn_skip_freq": lambda layer, n: (layer + 1) % n != 0,
    "linear_attention_freq": lambda layer, n: (layer + 1) % n != 0,
}


def layer_pattern(name: str, frequency: int | Sequence[int], layers: int) -> list[int]:
    """Returns a flag of `_PATTERNS` as a list, 1 for a layer with experts, a window, or linear attention."""
    if isinstance(frequency, int):
        return [int(_PATTERNS[name](layer, frequency)) for layer in range(layers)]
    return list(frequency)


LEAST = ("num_layers", "hidden_size", "num_attention_heads")  # The flags without which there is no shape

DIVISORS = (
    ("num_attention_heads", "num_query_groups"),
    ("num_experts", "moe_router_num_groups"),
    ("linear_num_value_heads", "linear_num_key_heads"),
)
"""Flags of which the second divides the first."""

BOUNDS = (
    ("num_experts", "moe_router_topk"),
    ("moe_router_num_groups", "moe_router_group_topk"),
    ("num_attention_heads", "num_query_groups"),
)
"""Flags of which the second is at most the first."""


def described_shape(given: Mapping[str, Any]) -> Architecture | None:
    """Returns the shape that architecture flags describe, Megatron's defaults in the place of what they leave out.

    None where they leave out the least that there is to a shape, or contradict one another.
    """
    if any(not given.get(name) for name in LEAST) or next(contradictions(given), None) is not None:
        return None
    heads, hidden = given["num_attention_heads"], given["hidden_size"]
    latent = _latent(given)
    return Architecture(
        model_type="model",
        num_layers=given["num_layers"],
        hidden_size=hidden,
        ffn_hidden_size=given.get("ffn_hidden_size") or 4 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads if latent else given.get("num_query_groups") or heads,
        head_dim=latent.qk_head_dim + latent.qk_pos_emb_head_dim if latent else given.get("kv_channels") or hidden // heads,
        vocab_size=given.get("vocab_size") or 1,
        max_positions=given.get("max_position_embeddings") or 1,
        norm_eps=given.get("norm_epsilon") or 1e-5,
        tied_embeddings=not given.get("untie_embeddings_and_output_weights"),
        rope=Rope(given.get("rotary_base") or 10_000.0),
        experts=_experts(given),
        latent=latent,
        linear=_linear(given),
        indexer=_indexer(given),
        qk_norm=bool(given.get("qk_layernorm")) and latent is None,
        qkv_bias=bool(given.get("add_qkv_bias")),
        biases=given.get("disable_bias_linear") is False,
        stacked_experts=given.get("disable_bias_linear") is False,  # experts with biases are held so, gpt-oss' alone
        sinks=given.get("softmax_type") == "learnable",
        output_gate=bool(given.get("attention_output_gate")),
        post_norms=bool(given.get("post_self_attn_layernorm")),
    )


def contradictions(given: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yields the flags that no model can have together."""
    for whole, part in DIVISORS:
        if given.get(whole) and given.get(part) and given[whole] % given[part]:
            yield _error(part, given, f"a divisor of {whole}, {given[whole]}")
    for most, name in BOUNDS:
        if given.get(most) and given.get(name) and given[name] > given[most]:
            yield _error(name, given, f"at most {most}, {given[most]}")
    yield from _width_problems(given)
    layers = given.get("num_layers")
    for name in ("moe_layer_freq", "linear_attention_freq"):
        if isinstance(frequency := given.get(name), list) and layers and len(frequency) != layers:
            yield _error(name, given, f"an entry for each of the {layers} layers of num_layers; it has {len(frequency)}")


def _width_problems(given: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yields a width that heads do not divide, where nothing else says how wide they are."""
    heads, hidden = given.get("num_attention_heads"), given.get("hidden_size")
    if heads and hidden and hidden % heads and not given.get("kv_channels") and not given.get("multi_latent_attention"):
        yield _error("hidden_size", given, f"a multiple of num_attention_heads, {heads}, or kv_channels beside it")


def _error(name: str, given: Mapping[str, Any], expected: str) -> ConfigError:
    return ConfigError(f"trainer.megatron.{name}", given[name], expected)


def _latent(given: Mapping[str, Any]) -> LatentAttention | None:
    """Returns latent attention with the defaults of Megatron's MLATransformerConfig."""
    if not given.get("multi_latent_attention"):
        return None
    return LatentAttention(
        given.get("q_lora_rank"),
        given.get("kv_lora_rank") or 32,
        given.get("qk_head_dim") or 128,
        given.get("qk_pos_emb_head_dim") or 64,
        given.get("v_head_dim") or 128,
    )


def _linear(given: Mapping[str, Any]) -> LinearAttention | None:
    """Returns linear attention with the defaults of Megatron's TransformerConfig."""
    if not (frequency := given.get("linear_attention_freq")):
        return None
    pattern = layer_pattern("linear_attention_freq", frequency, given["num_layers"])
    return LinearAttention(
        **{name: given.get(name) or default_of(name) for name in LINEAR},
        layers=tuple(layer for layer, linear in enumerate(pattern) if linear),
    )


def _indexer(given: Mapping[str, Any]) -> Indexer | None:
    if given.get("experimental_attention_variant") != "dsa" or not given.get("q_lora_rank"):
        return None
    heads, width, top_k = (given.get(f"dsa_indexer_{name}") for name in ("n_heads", "head_dim", "topk"))
    return Indexer(heads or 64, width or 128, top_k or 2048)


def _experts(given: Mapping[str, Any]) -> Experts | None:
    if not given.get("num_experts"):
        return None
    layers = layer_pattern("moe_layer_freq", given.get("moe_layer_freq") or 1, given["num_layers"])
    return Experts(
        count=given["num_experts"],
        per_token=given.get("moe_router_topk") or 2,
        ffn_hidden_size=given.get("moe_ffn_hidden_size") or given.get("ffn_hidden_size") or 4 * given["hidden_size"],
        normalize=True,
        dense_layers=tuple(layer for layer, sparse in enumerate(layers) if not sparse),
        score=given.get("moe_router_score_function") or "softmax",
        shared_ffn_hidden_size=given.get("moe_shared_expert_intermediate_size") or 0,
        swiglu_limit=given.get("activation_func_clamp_value"),
        shared_gate=bool(given.get("moe_shared_expert_gate")),
    )


FIELD = "trainer.spec"

_SLIME = "slime_plugins."
_OF_SLIME = {
    "slime_plugins.models.glm4": "glm4",
    "slime_plugins.models.glm5.glm5": "glm_moe_dsa",
    "slime_plugins.models.minimax_m2": "minimax_m2",
    "slime_plugins.models.qwen3_next": "qwen3_next",
    "slime_plugins.models.qwen3_5": "qwen3_5",
}  # slime's modules of layers → the family here that has the same

_MEGATRON = "megatron.core."
_OF_MEGATRON = "megatron.core.models.gpt.gpt_layer_specs"
_LOCAL = frozenset({"get_gpt_layer_local_spec", "get_gpt_layer_local_submodules"})
_OF_ENGINE = frozenset(
    {"get_gpt_layer_with_transformer_engine_spec", "get_gpt_layer_with_transformer_engine_submodules", "get_gpt_decoder_block_spec"}
)


def is_own_module(spec: Sequence[str], model_type: str, given: Mapping[str, Any]) -> bool:
    """Returns whether a module of the user's has the layers; otherwise they are those of the model's family.

    Args:
        spec: module and name, or nothing. model_type: Hugging Face's name of the family. given: Megatron's flags as the config has them.

    Raises ConfigError: layers that are not here, or that need what is not installed or not asked for.
    """
    if not spec:
        return False
    module, name = spec
    value = f"{module} {name}"
    if module.startswith(_SLIME):
        if (family := _OF_SLIME.get(module)) != model_type and not (family == "qwen3_5" and model_type.startswith(family)):
            wanted = f"none: slime's layers are those of its {family or module.rpartition('.')[2]}, and {model_type} has its own here"
            raise ConfigError(FIELD, value, wanted)
        return False
    if not module.startswith(_MEGATRON):
        return True
    if module != _OF_MEGATRON or name not in _LOCAL | _OF_ENGINE:
        wanted = f"none: {model_type} has layers of its own, and Megatron's others are for models that are not here"
        raise ConfigError(FIELD, value, wanted)
    engine = given.get("transformer_impl", "local") == "transformer_engine"
    if name in _OF_ENGINE and not has_engine():
        raise ConfigError(FIELD, value, f"none, or {_OF_MEGATRON} get_gpt_layer_local_spec: Transformer Engine is not installed")
    if engine != (name in _OF_ENGINE):
        kind = "transformer_engine" if name in _OF_ENGINE else "local"
        raise ConfigError(FIELD, value, f"none, or {kind} for trainer.megatron.transformer_impl")
    return False
