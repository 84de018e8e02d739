"""An architecture in the names of Megatron's command line.

A model's shape comes from its Hugging Face checkpoint. Flags that describe a shape are compared with it (:func:`differences`), so that
a script written for another size is refused, and the ready configs of every published size are written in them
(:func:`architecture_of`). Two names are not Megatron's own but common beside it: ``post_self_attn_layernorm`` and
``post_mlp_layernorm``, the norms after each block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shared.config import megatron_flags
from shared.model.architecture import Architecture, Experts, LatentAttention, Llama3Scaling, Rope, YarnScaling
from shared.model.families import FAMILIES, Family
from shared.runtime.errors import ConfigError

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
"""Megatron knows Llama 3's scaling with these constants only."""


_POSITIONS = 4096
"""Where no flag says how many; checkpoints of one size differ in it, and it limits nothing here."""


def flags_of(architecture: Architecture) -> dict[str, Any]:
    """Every architecture flag that applies, in Megatron's names with underscores; switches are all there, true or false."""
    a = architecture
    grouped = a.latent is None and a.num_key_value_heads != a.num_attention_heads
    return {
        "num_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "ffn_hidden_size": a.ffn_hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "group_query_attention": grouped,
        **({"num_query_groups": a.num_key_value_heads} if a.latent is None else {}),
        "kv_channels": a.head_dim if a.latent is None else a.latent.nope_head_dim,
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
    flags: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_head_dim": latent.nope_head_dim,
        "qk_pos_emb_head_dim": latent.rope_head_dim,
        "v_head_dim": latent.value_head_dim,
        "rope_type": "yarn" if rope.scaling else "rope",
    }
    if isinstance(rope.scaling, YarnScaling):
        flags |= {
            "rotary_scaling_factor": rope.scaling.factor,
            "original_max_position_embeddings": rope.scaling.original_max_positions,
            "beta_fast": rope.scaling.beta_fast,
            "beta_slow": rope.scaling.beta_slow,
            "mscale": rope.scaling.mscale,
            "mscale_all_dim": rope.scaling.mscale_all_dim,
        }
    return flags


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
    """Yields which architecture flags say something else than the checkpoint: the flag and both values.

    A flag of something that the model does not have is accepted at Megatron's default, where it says nothing.
    """
    own = flags_of(architecture)
    if architecture.experts is not None and architecture.experts.score == "sigmoid":
        own["moe_router_pre_softmax"] = given.get("moe_router_pre_softmax")  # means nothing to a sigmoid router
    for name, value in given.items():
        if name in own:
            wanted = own[name]
            value = _layers(value, architecture.num_layers) if name == "moe_layer_freq" else value
            if value != wanted:
                yield ConfigError(f"trainer.megatron.{name}", given[name], f"{wanted!r}, as the checkpoint has")
        elif value is not None and value != _default(name):
            yield ConfigError(f"trainer.megatron.{name}", value, f"not given; the checkpoint's {architecture.model_type} has none")


def _is_known(name: str) -> bool:
    flag = megatron_flags.catalogue().get(name)
    return flag is not None and "architecture" in flag.groups


def _default(name: str) -> Any:
    """Megatron's own."""
    return megatron_flags.catalogue()[name].default if _is_known(name) else None


def _layers(frequency: int | Sequence[int], layers: int) -> list[int]:
    """Megatron's ``moe_layer_freq``: 1 for each layer with experts; a number n stands for every n-th layer, from the first."""
    if isinstance(frequency, int):
        return [int(layer % frequency == 0) for layer in range(layers)]
    return list(frequency)


def architecture_of(flags: Mapping[str, Any]) -> Architecture:
    """The inverse of :func:`flags_of`, but for what no flag says: ``kimi_k2`` comes back as ``deepseek_v3``, which it is, and
    draft layers are not counted.

    Raises:
        ConfigError: a flag is missing, is no architecture flag, or asks for what no known family has.
    """
    for name in flags:
        if not _is_known(name):
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
        return self.flags.get(name, _default(name))

    def fixed(self, name: str, wanted: object) -> None:
        if self.get(name) != wanted:
            raise ConfigError(f"trainer.megatron.{name}", self.get(name), f"{wanted!r}; no known family has another")

    def architecture(self) -> Architecture:
        for name, wanted in {"normalization": "RMSNorm", "disable_bias_linear": True, "swiglu": True}.items():
            self.fixed(name, wanted)
        self.fixed("position_embedding_type", "rope")
        self.fixed("apply_layernorm_1p", False)
        self.fixed("moe_shared_expert_gate", False)
        heads = self.required("num_attention_heads")
        latent, experts = self.latent(), self.experts()
        qk_norm = bool(self.get("qk_layernorm")) and latent is None
        post_norms = bool(self.get("post_self_attn_layernorm"))
        if post_norms != bool(self.get("post_mlp_layernorm")):
            raise ConfigError("trainer.megatron.post_mlp_layernorm", not post_norms, "as post_self_attn_layernorm is")
        model_type = self.model_type(qk_norm, post_norms, latent, experts)
        if latent is not None:
            key_value_heads, head_dim = heads, latent.nope_head_dim + latent.rope_head_dim
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
            qk_norm=qk_norm,
            qkv_bias=bool(self.get("add_qkv_bias")),
            post_norms=post_norms,
            fused_gate_up=FAMILIES[model_type].fused_gate_up,
        )

    def model_type(self, qk_norm: bool, post_norms: bool, latent: LatentAttention | None, experts: Experts | None) -> str:
        def fits(family: Family) -> bool:
            return (
                family.latent == (latent is not None)
                and family.experts == (experts.score if experts else None)
                and family.post_norms == post_norms
                and (family.qk_norm == qk_norm or not isinstance(family.qk_norm, bool))
                and (family.qkv_bias == bool(self.get("add_qkv_bias")) or not isinstance(family.qkv_bias, bool))
            )

        for name, family in FAMILIES.items():
            if fits(family):
                return name
        raise ConfigError("trainer.megatron", dict(self.flags), f"the shape of one of {', '.join(FAMILIES)}")

    def rope(self) -> Rope:
        scaling: Llama3Scaling | YarnScaling | None = None
        if self.get("use_rope_scaling"):
            scaling = Llama3Scaling(factor=float(self.get("rope_scaling_factor")), **_LLAMA3)  # type: ignore[arg-type]
        if self.get("rope_type") == "yarn":
            names = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
            scaling = YarnScaling(
                factor=float(self.required("rotary_scaling_factor")),
                original_max_positions=int(self.get("original_max_position_embeddings")),
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
            query_rank=self.get("q_lora_rank"),
            key_value_rank=self.required("kv_lora_rank"),
            nope_head_dim=self.required("qk_head_dim"),
            rope_head_dim=self.required("qk_pos_emb_head_dim"),
            value_head_dim=self.required("v_head_dim"),
        )

    def experts(self) -> Experts | None:
        if self.get("num_experts") is None:
            return None
        score = self.get("moe_router_score_function")
        layers = self.required("num_layers")
        with_experts = _layers(self.get("moe_layer_freq"), layers)
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
            groups=self.get("moe_router_num_groups") or 1,
            groups_per_token=self.get("moe_router_group_topk") or 1,
            scaling=float(self.get("moe_router_topk_scaling_factor") or 1.0),
        )
