"""An architecture in the names of Megatron's command line.

A model's shape comes from its Hugging Face checkpoint. Flags that describe a shape are compared with it (`differences`), so that a script
written for another size is refused. Two names are not Megatron's own but common beside it: ``post_self_attn_layernorm`` and
``post_mlp_layernorm``, the norms after each block.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shared.config import flag_table
from shared.model.architecture import Architecture, LatentAttention, Llama3Scaling, Rope, YarnScaling
from shared.runtime.errors import ConfigError


def flags_of(architecture: Architecture) -> dict[str, Any]:
    """Returns every architecture flag that applies, in Megatron's names with underscores; switches are all there, true or false."""
    a = architecture
    grouped = a.latent is None and a.num_key_value_heads != a.num_attention_heads
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
        "apply_layernorm_1p": False,
        "qk_layernorm": a.qk_norm or a.latent is not None,
        "post_self_attn_layernorm": a.post_norms,
        "post_mlp_layernorm": a.post_norms,
        "add_qkv_bias": a.qkv_bias,
        "disable_bias_linear": True,
        "swiglu": True,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_positions,
        "untie_embeddings_and_output_weights": not a.tied_embeddings,
        **_rope_flags(a.rope),
        **_latent_flags(a.latent, a.rope),
        **_expert_flags(a),
    }


def _rope_flags(rope: Rope) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "rotary_base": rope.theta,
        "rotary_percent": rope.fraction,
        "rotary_interleaved": rope.interleaved,
        "use_rope_scaling": isinstance(rope.scaling, Llama3Scaling),
    }
    if isinstance(rope.scaling, Llama3Scaling):
        flags["rope_scaling_factor"] = rope.scaling.factor
    return flags


def _latent_flags(latent: LatentAttention | None, rope: Rope) -> dict[str, Any]:
    if latent is None:
        return {"multi_latent_attention": False}
    scaling = asdict(rope.scaling) if isinstance(rope.scaling, YarnScaling) else {}
    return {"multi_latent_attention": True, **asdict(latent), "rope_type": "yarn" if scaling else "rope", **scaling}


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
        "moe_shared_expert_gate": False,
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
            value = expert_layers(value, architecture.num_layers) if name == "moe_layer_freq" else value
            if value != wanted:
                yield ConfigError(f"trainer.megatron.{name}", given[name], f"{wanted!r}, as the checkpoint has")
        elif value is not None and value != default_of(name):
            yield ConfigError(f"trainer.megatron.{name}", value, f"not given; the checkpoint's {architecture.model_type} has none")


def _without_effect(given: Mapping[str, Any], architecture: Architecture) -> tuple[str, ...]:
    """Returns the flags of latent attention that mean nothing to this model, whatever their value: scripts set them all the same.

    Heads are as wide as their parts say, and a context that YaRN stretches by 1 stays as it is.
    """
    if architecture.latent is None:
        return ()
    unscaled = architecture.rope.scaling is None and given.get("rotary_scaling_factor") == 1
    return ("kv_channels", *(("rotary_scaling_factor", "mscale", "mscale_all_dim") if unscaled else ()))


def default_of(name: str) -> Any:
    """Returns Megatron's own default of an architecture flag; None for any other name."""
    flag = flag_table.catalogue().get(name)
    return flag.default if flag is not None and "architecture" in flag.groups else None


def expert_layers(frequency: int | Sequence[int], layers: int) -> list[int]:
    """Returns Megatron's ``moe_layer_freq`` as a list, 1 for a layer with experts; n stands for every n-th layer, from the first."""
    if isinstance(frequency, int):
        return [int(layer % frequency == 0) for layer in range(layers)]
    return list(frequency)
