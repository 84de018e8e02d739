"""The modules of the transformer layers: Megatron's own, or Transformer Engine's where the run asks for them.

:func:`decoder_spec` alone decides the modules of a layer. The weight names of both implementations are in `shared.model.tensor_table`.
Transformer Engine's layers have not been run: none of the machines that this was made on has it.
"""

import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.multi_latent_attention as multi_latent_attention
from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from services.trainer.megatron.attention import PackedCausalAttention
from services.trainer.megatron.expert_balance import BalancedRouter
from services.trainer.megatron.grouped_experts import GroupedExperts
from services.trainer.megatron.layer_modules import LatentNorm, NormedResidual, ReplicatedLinear, RMSNorm
from services.trainer.megatron.routing_replay import ReplayedLayer, ReplayedMoELayer
from shared.model.architecture import Architecture
from shared.runtime.errors import ConfigError

if not hasattr(moe_utils, "te_general_gemm"):
    # The router's matrix product asks for this name, which exists only where Transformer Engine does (0.15, 0.16).
    moe_utils.te_general_gemm = None

if not HAVE_TE:
    # Without Transformer Engine this module takes it for installed all the same (0.16), and its own linear layer that every
    # tensor-parallel rank holds whole is not marked for sequence parallelism.
    multi_latent_attention.HAVE_TE = False
    multi_latent_attention.Linear = ReplicatedLinear


def decoder_spec(architecture: Architecture, config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Returns the layers of this rank's pipeline stage.

    Args:
        architecture: the whole model's. config: Megatron's, of the same model. vp_stage: which of the rank's model chunks.
    """
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    engine = config.transformer_impl == "transformer_engine"
    if engine:
        check_engine(architecture, config)
    make = engine_layer_spec if engine else layer_spec
    experts = architecture.experts.count if architecture.experts else None
    moe = [architecture.is_moe_layer(index) for index in range(first, first + count)]
    layers = [make(architecture, config, experts if has_experts else None) for has_experts in moe]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TENorm if engine else RMSNorm)


def check_engine(architecture: Architecture, config: TransformerConfig) -> None:
    """Raises ConfigError where Transformer Engine's layers cannot stand in for the local ones."""
    field, given = "trainer.megatron.transformer_impl", config.transformer_impl
    if not HAVE_TE:
        raise ConfigError(field, given, "local; Transformer Engine is not installed")
    if architecture.latent is not None or architecture.post_norms:
        raise ConfigError(field, given, f"local; {architecture.model_type} has layers that are made for it only")
    if config.context_parallel_size > 1:
        raise ConfigError(field, given, "local with context parallelism, which is Myxo's own")


def engine_layer_spec(architecture: Architecture, config: TransformerConfig, experts: int | None) -> ModuleSpec:
    """Returns one layer of Transformer Engine's modules, which take packed sequences as they are."""
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=architecture.qk_norm
    )
    spec.module = ReplayedLayer
    if experts is not None:
        spec.submodules.mlp.module, spec.submodules.mlp.submodules.router = ReplayedMoELayer, BalancedRouter
    return spec


def layer_spec(architecture: Architecture, config: TransformerConfig, experts: int | None) -> ModuleSpec:
    """Returns one layer: Megatron's local spec with the packed attention and a norm that knows sequence parallelism."""
    latent = architecture.latent is not None
    spec = get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=False,
        qk_layernorm=architecture.qk_norm or latent,
        multi_latent_attention=latent,
        normalization="RMSNorm",
    )
    spec.module, layer = ReplayedLayer, spec.submodules
    if experts is not None:
        layer.mlp.module, layer.mlp.submodules.experts.module = ReplayedMoELayer, GroupedExperts
        layer.mlp.submodules.router = BalancedRouter
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
