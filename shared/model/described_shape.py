"""A model's shape as Megatron's flags describe it: what can be told of a layout where no checkpoint is at hand, and of flags that no model
can have."""

from collections.abc import Iterator, Mapping
from typing import Any

from shared.model.architecture import Architecture, Experts, LatentAttention, Rope
from shared.model.architecture_flags import expert_layers
from shared.runtime.errors import ConfigError

LEAST = ("num_layers", "hidden_size", "num_attention_heads")
"""The flags without which there is no shape."""

DIVISORS = (
    ("num_attention_heads", "num_query_groups"),
    ("num_experts", "moe_router_num_groups"),
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
        qk_norm=bool(given.get("qk_layernorm")) and latent is None,
        qkv_bias=bool(given.get("add_qkv_bias")),
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
    frequency, layers = given.get("moe_layer_freq"), given.get("num_layers")
    if isinstance(frequency, list) and layers and len(frequency) != layers:
        yield _error("moe_layer_freq", given, f"an entry for each of the {layers} layers of num_layers; it has {len(frequency)}")


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


def _experts(given: Mapping[str, Any]) -> Experts | None:
    if not given.get("num_experts"):
        return None
    layers = expert_layers(given.get("moe_layer_freq") or 1, given["num_layers"])
    return Experts(
        count=given["num_experts"],
        per_token=given.get("moe_router_topk") or 2,
        ffn_hidden_size=given.get("moe_ffn_hidden_size") or given.get("ffn_hidden_size") or 4 * given["hidden_size"],
        normalize=True,
        dense_layers=tuple(layer for layer, sparse in enumerate(layers) if not sparse),
        score=given.get("moe_router_score_function") or "softmax",
        shared_ffn_hidden_size=given.get("moe_shared_expert_intermediate_size") or 0,
    )
