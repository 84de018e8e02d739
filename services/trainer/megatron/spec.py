"""Which modules the transformer layers are made of: Megatron's own, without Transformer Engine.

The seam for another implementation is :func:`decoder_spec`: it alone decides what a layer consists of. The weight names of
both implementations are known to :mod:`.names`.
"""

from __future__ import annotations

import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.multi_latent_attention as multi_latent_attention
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from services.trainer.megatron.architecture import Architecture
from services.trainer.megatron.attention import PackedCausalAttention
from services.trainer.megatron.norm import LatentNorm, NormedResidual, RMSNorm
from services.trainer.megatron.replicated import ReplicatedLinear

if not hasattr(moe_utils, "te_general_gemm"):
    # The router's matrix product asks for this name, which exists only where Transformer Engine does (0.15, 0.16).
    moe_utils.te_general_gemm = None

if not HAVE_TE:
    # Without Transformer Engine this module takes it for installed all the same (0.16), and its own linear layer that every
    # tensor-parallel rank holds whole is not marked for sequence parallelism.
    multi_latent_attention.HAVE_TE = False
    multi_latent_attention.Linear = ReplicatedLinear


def decoder_spec(
    architecture: Architecture, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline stage.

    Args:
        architecture: the whole model's. config: Megatron's, of the same model. vp_stage: which of the rank's model chunks.
    """
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = [layer_spec(architecture, config, architecture.is_moe_layer(index)) for index in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def layer_spec(architecture: Architecture, config: TransformerConfig, moe: bool) -> ModuleSpec:
    """One layer: Megatron's local spec with the packed attention and a norm that knows sequence parallelism."""
    experts = architecture.experts.count if architecture.experts is not None and moe else None
    latent = architecture.latent is not None
    spec = get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=False,
        qk_layernorm=architecture.qk_norm or latent,
        multi_latent_attention=latent,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedCausalAttention
    if latent:
        attention.linear_q_down_proj = attention.linear_kv_down_proj = multi_latent_attention.Linear
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
    elif architecture.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if architecture.post_norms:
        after = ModuleSpec(module=NormedResidual, params={"config": config})
        layer.self_attn_bda = layer.mlp_bda = after
    return spec
