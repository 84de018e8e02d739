"""The architecture that Megatron's flags describe: how the ready configs of published sizes are held to those sizes."""

from collections.abc import Mapping
from typing import Any

from shared.config import flag_table
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
from shared.model.architecture_flags import LINEAR, default_of, layer_pattern
from shared.model.families import FAMILIES, Family
from shared.runtime.errors import ConfigError

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
"""Megatron knows Llama 3's scaling with these constants only."""


_POSITIONS = 4096
"""Where no flag says how many; checkpoints of one size differ in it, and it limits nothing here."""


def is_known(name: str) -> bool:
    flag = flag_table.catalogue().get(name)
    return flag is not None and "architecture" in flag.groups


def architecture_of(flags: Mapping[str, Any]) -> Architecture:
    """The inverse of :func:`flags_of`, but for what no flag says: ``kimi_k2`` comes back as ``deepseek_v3``, which it is, and
    draft layers are not counted.

    Raises:
        ConfigError: a flag is missing, is no architecture flag, or asks for what no known family has.
    """
    for name in flags:
        if not is_known(name):
            raise ConfigError(f"trainer.megatron.{name}", flags[name], "an architecture flag")
    return _Reader({name: value for name, value in flags.items() if value is not None}).architecture()


class _Reader:
    def __init__(self, flags: dict[str, Any]) -> None:
        self.flags = flags

    def required(self, name: str) -> Any:
        if name not in self.flags:
            raise ConfigError(f"trainer.megatron.{name}", None, "a value; it is part of the model's shape")
        return self.flags[name]

    def get(self, name: str) -> Any:
        return self.flags.get(name, default_of(name))

    def fixed(self, name: str, wanted: object) -> None:
        if self.get(name) != wanted:
            raise ConfigError(f"trainer.megatron.{name}", self.get(name), f"{wanted!r}; no known family has another")

    def architecture(self) -> Architecture:
        clamped = bool(self.get("quick_geglu"))
        self.fixed("normalization", "RMSNorm")
        self.fixed("disable_bias_linear", not clamped)
        self.fixed("glu_linear_offset", float(clamped))
        self.fixed("position_embedding_type", "yarn" if clamped else "rope")
        self.fixed("softmax_type", "learnable" if clamped else "vanilla")
        heads = self.required("num_attention_heads")
        latent, experts, linear = self.latent(), self.experts(), self.linear()
        gemma = bool(self.get("apply_layernorm_1p")) and linear is None
        self.fixed("swiglu", not clamped and not gemma)
        self.fixed("apply_layernorm_1p", linear is not None or gemma)
        self.fixed("attention_output_gate", linear is not None)
        self.fixed("moe_shared_expert_gate", bool(linear and experts))
        qk_norm = bool(self.get("qk_layernorm")) and latent is None
        post_norms = bool(self.get("post_self_attn_layernorm"))
        if post_norms != bool(self.get("post_mlp_layernorm")):
            raise ConfigError("trainer.megatron.post_mlp_layernorm", not post_norms, "as post_self_attn_layernorm is")
        model_type = self.model_type(qk_norm, post_norms, latent, experts, linear is not None, gemma)
        if latent is not None:
            key_value_heads, head_dim = heads, latent.qk_head_dim + latent.qk_pos_emb_head_dim
        else:
            key_value_heads = self.required("num_query_groups") if self.get("group_query_attention") else heads
            head_dim = self.flags.get("kv_channels", self.required("hidden_size") // heads)
        return Architecture(
            model_type=model_type,
            num_layers=self.required("num_layers"),
            hidden_size=self.required("hidden_size"),
            ffn_hidden_size=self.required("ffn_hidden_size"),
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            head_dim=head_dim,
            vocab_size=self.required("vocab_size"),
            max_positions=self.flags.get("max_position_embeddings", _POSITIONS),
            norm_eps=float(self.get("norm_epsilon")),
            tied_embeddings=not self.get("untie_embeddings_and_output_weights"),
            rope=self.rope(),
            experts=experts,
            latent=latent,
            linear=linear,
            output_gate=linear is not None,
            zero_centered_norms=linear is not None or gemma,
            gelu=gemma,
            scaled_embedding=gemma,
            feedforward_names=gemma,
            indexer=self.indexer(),
            qk_norm=qk_norm,
            qkv_bias=bool(self.get("add_qkv_bias")),
            biases=clamped,
            sinks=clamped,
            windows=self.windows(),
            stacked_experts=FAMILIES[model_type].stacked_experts,
            post_norms=post_norms,
            prefix=FAMILIES[model_type].prefix,
            apart_projections=FAMILIES[model_type].apart_projections,
            fused_gate_up=FAMILIES[model_type].fused_gate_up,
        )

    def model_type(
        self, qk_norm: bool, post_norms: bool, latent: LatentAttention | None, experts: Experts | None, linear: bool, gemma: bool
    ) -> str:
        def fits(family: Family) -> bool:
            return (
                family.latent == (latent is not None)
                and family.indexer == (self.indexer() is not None)
                and family.experts == ("gpt_oss" if self.get("quick_geglu") else experts.score if experts else None)
                and family.post_norms == post_norms
                and family.gemma == gemma
                and family.linear == linear
                and (family.qk_norm == qk_norm or not isinstance(family.qk_norm, bool))
                and (family.qkv_bias == bool(self.get("add_qkv_bias")) or not isinstance(family.qkv_bias, bool))
            )

        for name, family in FAMILIES.items():
            if fits(family):
                return name
        raise ConfigError("trainer.megatron", dict(self.flags), f"the shape of one of {', '.join(FAMILIES)}")

    def windows(self) -> tuple[int, ...]:
        if self.get("window_size") is None:
            return ()
        kinds = layer_pattern("window_attn_skip_freq", self.required("window_attn_skip_freq"), self.required("num_layers"))
        return tuple(self.required("window_size")[0] * kind for kind in kinds)

    def rope(self) -> Rope:
        scaling: Llama3Scaling | YarnScaling | GroupedYarn | None = None
        if self.get("position_embedding_type") == "yarn":
            bounds = {name: float(self.get(name)) for name in ("beta_fast", "beta_slow")}
            positions = int(self.get("original_max_position_embeddings"))
            scaling = GroupedYarn(float(self.required("rotary_scaling_factor")), positions, **bounds, truncate=False)
        if self.get("use_rope_scaling"):
            scaling = Llama3Scaling(factor=float(self.get("rope_scaling_factor")), **_LLAMA3)  # type: ignore[arg-type]
        if self.get("rope_type") == "yarn":
            names = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
            scaling = YarnScaling(
                rotary_scaling_factor=float(self.required("rotary_scaling_factor")),
                original_max_position_embeddings=int(self.get("original_max_position_embeddings")),
                **{name: float(self.get(name)) for name in names},
            )
        return Rope(
            theta=float(self.get("rotary_base")),
            fraction=float(self.get("rotary_percent")),
            interleaved=bool(self.get("rotary_interleaved")),
            scaling=scaling,
        )

    def latent(self) -> LatentAttention | None:
        if not self.get("multi_latent_attention"):
            return None
        return LatentAttention(
            q_lora_rank=self.get("q_lora_rank"),
            kv_lora_rank=self.required("kv_lora_rank"),
            qk_head_dim=self.required("qk_head_dim"),
            qk_pos_emb_head_dim=self.required("qk_pos_emb_head_dim"),
            v_head_dim=self.required("v_head_dim"),
        )

    def linear(self) -> LinearAttention | None:
        if self.get("linear_attention_freq") is None:
            return None
        self.fixed("experimental_attention_variant", "gated_delta_net")
        pattern = layer_pattern("linear_attention_freq", self.get("linear_attention_freq"), self.required("num_layers"))
        return LinearAttention(**{name: self.get(name) for name in LINEAR}, layers=tuple(i for i, linear in enumerate(pattern) if linear))

    def indexer(self) -> Indexer | None:
        if self.get("experimental_attention_variant") != "dsa":
            return None
        return Indexer(*(self.required(f"dsa_indexer_{name}") for name in ("n_heads", "head_dim", "topk")))

    def experts(self) -> Experts | None:
        if self.get("num_experts") is None:
            return None
        score = self.get("moe_router_score_function")
        layers = self.required("num_layers")
        with_experts = layer_pattern("moe_layer_freq", self.get("moe_layer_freq"), layers)
        if len(with_experts) != layers:
            raise ConfigError("trainer.megatron.moe_layer_freq", with_experts, f"a number for each of the {layers} layers")
        self.fixed("moe_router_enable_expert_bias", score == "sigmoid")
        return Experts(
            count=self.required("num_experts"),
            per_token=self.get("moe_router_topk"),
            ffn_hidden_size=self.required("moe_ffn_hidden_size"),
            normalize=score == "sigmoid" or not self.get("moe_router_pre_softmax"),
            dense_layers=tuple(layer for layer in range(layers) if not with_experts[layer]),
            score=score,
            shared_ffn_hidden_size=self.get("moe_shared_expert_intermediate_size") or 0,
            shared_gate=self.get("moe_shared_expert_gate"),
            groups=self.get("moe_router_num_groups") or 1,
            groups_per_token=self.get("moe_router_group_topk") or 1,
            scaling=float(self.get("moe_router_topk_scaling_factor") or 1.0),
            swiglu_limit=self.get("activation_func_clamp_value"),
        )
