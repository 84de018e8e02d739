"""The fields of Megatron's configuration that follow from an architecture alone, not from the layout or the training settings."""

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from shared.model.architecture import Architecture, Experts, LatentAttention, Rope, YarnScaling


def config_class(architecture: Architecture) -> type[TransformerConfig]:
    """Returns Megatron's class of configurations; latent attention has one of its own."""
    return TransformerConfig if architecture.latent is None else MLATransformerConfig


def architecture_options(architecture: Architecture) -> dict[str, Any]:
    """Returns the fields of `config_class`."""
    a = architecture
    options: dict[str, Any] = {
        "num_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "ffn_hidden_size": a.ffn_hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "num_query_groups": a.num_key_value_heads,
        "kv_channels": a.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": a.norm_eps,
        "qk_layernorm": a.qk_norm or a.latent is not None,
        "add_qkv_bias": a.qkv_bias,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "rotary_interleaved": a.rope.interleaved,
    }
    if a.experts is not None:
        options |= _experts(a.experts, [int(a.is_moe_layer(layer)) for layer in range(a.num_layers)])
    if a.latent is not None:
        options |= _latent(a.latent, a.rope)
    return options


def _experts(experts: Experts, layers: list[int]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_layer_freq": layers,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "moe_router_score_function": experts.score,
        # softmax over the chosen experts' logits is softmax over all, rescaled; without rescaling it comes first
        "moe_router_pre_softmax": experts.score == "softmax" and not experts.normalize,
    }
    if experts.shared_ffn_hidden_size:
        options["moe_shared_expert_intermediate_size"] = experts.shared_ffn_hidden_size
    if experts.score == "sigmoid":
        # the biases stay as loaded: pre-training balanced the experts with them, and the engine chooses by them
        options |= {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0}
    if experts.groups > 1:
        options |= {"moe_router_num_groups": experts.groups, "moe_router_group_topk": experts.groups_per_token}
    if experts.scaling != 1.0:
        options["moe_router_topk_scaling_factor"] = experts.scaling
    return options


def _latent(latent: LatentAttention, rope: Rope) -> dict[str, Any]:
    options: dict[str, Any] = {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_head_dim": latent.nope_head_dim,
        "qk_pos_emb_head_dim": latent.rope_head_dim,
        "v_head_dim": latent.value_head_dim,
        "rope_type": "rope",
        "rotary_base": rope.theta,
        "rotary_scaling_factor": 1.0,
    }
    if isinstance(rope.scaling, YarnScaling):
        options |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": rope.scaling.factor,
            "original_max_position_embeddings": rope.scaling.original_max_positions,
            "beta_fast": rope.scaling.beta_fast,
            "beta_slow": rope.scaling.beta_slow,
            "mscale": rope.scaling.mscale,
            "mscale_all_dim": rope.scaling.mscale_all_dim,
        }
    return options
