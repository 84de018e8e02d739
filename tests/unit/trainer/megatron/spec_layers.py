"""Layers that tests name with ``--spec``, as a user's module has them."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from services.trainer.megatron.attention import PackedCausalAttention
from services.trainer.megatron.expert_balance import BalancedRouter
from services.trainer.megatron.moe import ReplayedLayer, ReplayedMoELayer
from services.trainer.megatron.spec import RMSNorm, layer_spec


class OwnNorm(RMSNorm):
    """Computes what its base does, and counts how often."""

    calls = 0

    def forward(self, hidden):
        OwnNorm.calls += 1
        return super().forward(hidden)


def of_all_layers(architecture, config):
    spec = layer_spec(architecture, config, None)
    spec.submodules.input_layernorm = OwnNorm
    return spec


def of_a_stage(args, config, vp_stage, **more):
    """Is in the form of slime's functions, which make the layers of a stage from Megatron's arguments."""
    assert (args.num_layers, args.moe_router_topk, args.spec[1]) == (config.num_layers, 2, "of_a_stage") and not more
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    layer = get_gpt_layer_local_spec(num_experts=args.num_experts, qk_layernorm=args.qk_layernorm, normalization="RMSNorm")
    layer.module, parts = ReplayedLayer, layer.submodules
    parts.input_layernorm, parts.pre_mlp_layernorm = OwnNorm, RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention, attention.q_layernorm, attention.k_layernorm = PackedCausalAttention, RMSNorm, RMSNorm
    parts.mlp.module, parts.mlp.submodules.router = ReplayedMoELayer, BalancedRouter
    return TransformerBlockSubmodules(layer_specs=[layer] * count)


def without_query_norms(architecture, config):
    spec = layer_spec(architecture, config, None)
    spec.submodules.self_attention.submodules.q_layernorm = IdentityOp
    return spec


def of_megatron(config):
    return get_gpt_layer_local_spec(num_experts=config.num_moe_experts, qk_layernorm=True, normalization="RMSNorm")


def wants_more(config, tokenizer):
    return None


def breaks(config):
    raise RuntimeError("no layers today")


def gives_a_word():
    return "layers"
