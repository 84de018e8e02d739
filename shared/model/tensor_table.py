"""The table of names: which Hugging Face tensors become which Megatron parameters, in all families.

A row holds if the model, or the layer, has every feature in its ``when``; a family is a set of features, and nothing else
knows one from another. Sizes are words, resolved by :func:`sizes`, so that the same table says what a checkpoint must hold.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shared.model.architecture import Architecture

Shape = tuple[int, ...]
Layout = Literal["plain", "vocabulary", "qkv", "gated_qkv", "glu", "sections", "by_key_head", "transposed", "interleaved"]


@dataclass(frozen=True)
class TensorSource:
    """The Hugging Face tensors that become one Megatron parameter.

    Args:
        tensors: their names and shapes. layout: ``plain`` as it is; ``vocabulary`` with rows of zeros below; ``qkv`` interleaved by
            key/value group, ``gated_qkv`` also with the gates behind the queries; ``glu`` and ``sections`` one above the other;
            ``by_key_head`` likewise, where tensors interleave by key head; ``transposed``; ``interleaved`` transposed, with the rows of the
            two halves in turn. sections: rows that the ranks split each for itself; of ``glu``, halves.
        float32: whether it stays float32 in a model of another dtype.
        expert: the one whose part it is of a tensor of all experts, along the first dimension; None for whole tensors.
    """

    tensors: tuple[tuple[str, Shape], ...]
    layout: Layout = "plain"
    float32: bool = False
    expert: int | None = None
    sections: Shape = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.tensors)


@dataclass(frozen=True)
class NameRow:
    """One Megatron parameter of a layer.

    Args:
        megatron: its name below ``decoder.layers.N.``, in the local spec and, where that differs, in Transformer Engine's.
        tensors: name below ``model.layers.N.`` and sizes of each Hugging Face tensor it is made of.
        layout, float32, sections: see :class:`TensorSource`, sections as words. when: features that the layer must have.

    In names ``{expert}`` stands for an expert's number; without it in Hugging Face's, a tensor is of all experts.
    """

    megatron: tuple[str, ...]
    tensors: tuple[tuple[str, tuple[str, ...]], ...]
    layout: Layout = "plain"
    when: frozenset[str] = frozenset()
    float32: bool = False
    sections: tuple[str, ...] = ()

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.megatron[0]

    @property
    def stacked(self) -> bool:
        return self.per_expert and "{expert}" not in self.tensors[0][0]


def _row(
    megatron: str, tensors: dict[str, str], layout: Layout = "plain", when: str = "", float32: bool = False, sections: str = ""
) -> NameRow:
    held = tuple((name, tuple(words.split())) for name, words in tensors.items())
    return NameRow(tuple(megatron.split()), held, layout, frozenset(when.split()), float32, tuple(sections.split()))


def _glu(prefix: str, width: str) -> dict[str, str]:
    return {f"{prefix}.gate_proj.weight": f"{width} hidden", f"{prefix}.up_proj.weight": f"{width} hidden"}


def _qkv(kind: str, columns: str = "", queries: str = "queries") -> dict[str, str]:
    return {f"self_attn.{name}_proj.{kind}": f"{rows}{columns}" for name, rows in (("q", queries), ("k", "keys"), ("v", "keys"))}


_BEFORE_MLP = "pre_mlp_layernorm.weight mlp.linear_fc1.layer_norm_weight"
_EXPERT_UP_BIAS = "mlp.experts.local_experts.{expert}.linear_fc1.bias mlp.experts.linear_fc1.bias{expert}"
_EXPERT_DOWN_BIAS = "mlp.experts.local_experts.{expert}.linear_fc2.bias mlp.experts.linear_fc2.bias{expert}"
_EXPERT_UP = "mlp.experts.local_experts.{expert}.linear_fc1.weight mlp.experts.linear_fc1.weight{expert}"
_EXPERT_DOWN = "mlp.experts.local_experts.{expert}.linear_fc2.weight mlp.experts.linear_fc2.weight{expert}"
_LINEAR_PROJECTIONS = {"qkv": "qkv", "z": "values", "b": "heads", "a": "heads"}
_LINEAR_SECTIONS = "linear_keys linear_keys linear_values linear_values linear_heads linear_heads"

TABLE: tuple[NameRow, ...] = (
    _row("input_layernorm.weight self_attention.linear_qkv.layer_norm_weight", {"input_layernorm.weight": "hidden"}),
    # attention with grouped keys and values
    _row("self_attention.linear_qkv.weight", _qkv("weight", " hidden"), "qkv", "grouped plain_output"),
    _row("self_attention.linear_qkv.weight", _qkv("weight", " hidden", "2*queries"), "gated_qkv", "grouped output_gate"),
    _row("self_attention.linear_qkv.bias", _qkv("bias"), "qkv", "grouped qkv_bias"),
    _row("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": "head"}, when="grouped qk_norm"),
    _row("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": "head"}, when="grouped qk_norm"),
    _row("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": "queries"}, when="grouped joint_qk_norm"),
    _row("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": "keys"}, when="grouped joint_qk_norm"),
    # latent attention
    _row("self_attention.linear_q_proj.weight", {"self_attn.q_proj.weight": "queries hidden"}, when="latent full_queries"),
    _row("self_attention.linear_q_down_proj.weight", {"self_attn.q_a_proj.weight": "query_rank hidden"}, when="low_queries"),
    _row("self_attention.q_layernorm.weight", {"self_attn.q_a_layernorm.weight": "query_rank"}, when="low_queries"),
    _row("self_attention.linear_q_up_proj.weight", {"self_attn.q_b_proj.weight": "queries query_rank"}, when="low_queries"),
    _row("self_attention.linear_kv_down_proj.weight", {"self_attn.kv_a_proj_with_mqa.weight": "kv_rank+rope hidden"}, when="latent"),
    _row("self_attention.kv_layernorm.weight", {"self_attn.kv_a_layernorm.weight": "kv_rank"}, when="latent"),
    _row("self_attention.linear_kv_up_proj.weight", {"self_attn.kv_b_proj.weight": "keys+values kv_rank"}, when="latent"),
    # the indexer of sparse attention, which no gradient moves
    _row("self_attention.indexer.wq_b.weight", {"self_attn.indexer.wq_b.weight": "index_queries query_rank"}, when="indexer"),
    _row("self_attention.indexer.wk.weight", {"self_attn.indexer.wk.weight": "index_head hidden"}, when="indexer"),
    _row("self_attention.indexer.k_norm.weight", {"self_attn.indexer.k_norm.weight": "index_head"}, when="indexer", float32=True),
    _row("self_attention.indexer.k_norm.bias", {"self_attn.indexer.k_norm.bias": "index_head"}, when="indexer", float32=True),
    _row(
        "self_attention.indexer.weights_proj.weight",
        {"self_attn.indexer.weights_proj.weight": "index_heads hidden"},
        when="indexer",
        float32=True,
    ),
    _row("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": "hidden values"}, when="softmax_attention"),
    _row("self_attention.linear_proj.bias", {"self_attn.o_proj.bias": "hidden"}, when="biases"),
    _row("self_attention.core_attention.softmax_offset", {"self_attn.sinks": "heads"}, when="grouped sinks"),
    # linear attention
    _row(
        "self_attention.in_proj.weight",
        {"linear_attn.in_proj_qkvz.weight": "linear_qkvz hidden", "linear_attn.in_proj_ba.weight": "2*linear_heads hidden"},
        "by_key_head",
        "linear joint_projections",
        sections=_LINEAR_SECTIONS,
    ),
    _row(
        "self_attention.in_proj.weight",
        {f"linear_attn.in_proj_{name}.weight": f"linear_{rows} hidden" for name, rows in _LINEAR_PROJECTIONS.items()},
        "sections",
        "linear apart_projections",
        sections=_LINEAR_SECTIONS,
    ),
    _row(
        "self_attention.conv1d.weight",
        {"linear_attn.conv1d.weight": "linear_qkv one kernel"},
        "sections",
        "linear",
        sections="linear_keys linear_keys linear_values",
    ),
    _row("self_attention.dt_bias", {"linear_attn.dt_bias": "linear_heads"}, when="linear"),
    _row("self_attention.A_log", {"linear_attn.A_log": "linear_heads"}, when="linear"),
    _row("self_attention.out_norm.weight", {"linear_attn.norm.weight": "linear_head"}, when="linear"),
    _row("self_attention.out_proj.weight", {"linear_attn.out_proj.weight": "hidden linear_values"}, when="linear"),
    _row("self_attn_bda.norm.weight", {"post_self_attn_layernorm.weight": "hidden"}, when="post_norms attention_names"),
    _row("self_attn_bda.norm.weight", {"post_attention_layernorm.weight": "hidden"}, when="post_norms feedforward_names"),
    # MLP
    _row(_BEFORE_MLP, {"post_attention_layernorm.weight": "hidden"}, when="attention_names"),
    _row(_BEFORE_MLP, {"pre_feedforward_layernorm.weight": "hidden"}, when="feedforward_names"),
    _row("mlp.linear_fc1.weight", _glu("mlp", "ffn"), "glu", "dense gate_up_apart"),
    _row("mlp.linear_fc1.weight", {"mlp.gate_up_proj.weight": "2*ffn hidden"}, "glu", "dense gate_up_fused"),
    _row("mlp.linear_fc2.weight", {"mlp.down_proj.weight": "hidden ffn"}, when="dense"),
    # mixture of experts
    _row("mlp.router.weight", {"mlp.gate.weight": "experts hidden"}, when="moe own_names"),
    _row("mlp.router.expert_bias", {"mlp.gate.e_score_correction_bias": "experts"}, when="moe own_names expert_bias", float32=True),
    _row("mlp.router.weight", {"block_sparse_moe.gate.weight": "experts hidden"}, when="moe mixtral_names"),
    _row(
        "mlp.router.expert_bias",
        {"block_sparse_moe.e_score_correction_bias": "experts"},
        when="moe mixtral_names expert_bias",
        float32=True,
    ),
    _row("mlp.shared_experts.linear_fc1.weight", _glu("mlp.shared_experts", "shared_ffn"), "glu", "moe shared"),
    _row("mlp.shared_experts.linear_fc2.weight", {"mlp.shared_experts.down_proj.weight": "hidden shared_ffn"}, when="moe shared"),
    _row("mlp.shared_experts.linear_fc1.weight", _glu("mlp.shared_expert", "shared_ffn"), "glu", "moe gated_shared"),
    _row("mlp.shared_experts.linear_fc2.weight", {"mlp.shared_expert.down_proj.weight": "hidden shared_ffn"}, when="moe gated_shared"),
    _row("mlp.shared_experts.gate_weight", {"mlp.shared_expert_gate.weight": "one hidden"}, when="moe gated_shared"),
    _row(_EXPERT_UP, _glu("mlp.experts.{expert}", "expert_ffn"), "glu", "moe own_names apart_experts"),
    _row(_EXPERT_DOWN, {"mlp.experts.{expert}.down_proj.weight": "hidden expert_ffn"}, when="moe own_names apart_experts"),
    _row(_EXPERT_UP, {"mlp.experts.gate_up_proj": "experts 2*expert_ffn hidden"}, "glu", "moe untransposed_experts"),
    _row(_EXPERT_DOWN, {"mlp.experts.down_proj": "experts hidden expert_ffn"}, when="moe untransposed_experts"),
    _row(
        _EXPERT_UP,
        {f"block_sparse_moe.experts.{{expert}}.{name}.weight": "expert_ffn hidden" for name in ("w1", "w3")},
        "glu",
        "moe mixtral_names",
    ),
    _row(_EXPERT_DOWN, {"block_sparse_moe.experts.{expert}.w2.weight": "hidden expert_ffn"}, when="moe mixtral_names"),
    _row("mlp.router.weight", {"mlp.router.weight": "experts hidden"}, when="moe stacked_experts"),
    _row("mlp.router.bias", {"mlp.router.bias": "experts"}, when="moe stacked_experts biases"),
    _row(_EXPERT_UP, {"mlp.experts.gate_up_proj": "experts hidden 2*expert_ffn"}, "interleaved", "moe stacked_experts"),
    _row(_EXPERT_UP_BIAS, {"mlp.experts.gate_up_proj_bias": "experts 2*expert_ffn"}, "interleaved", "moe stacked_experts biases"),
    _row(_EXPERT_DOWN, {"mlp.experts.down_proj": "experts expert_ffn hidden"}, "transposed", "moe stacked_experts"),
    _row(_EXPERT_DOWN_BIAS, {"mlp.experts.down_proj_bias": "experts hidden"}, when="moe stacked_experts biases"),
    _row("mlp_bda.norm.weight", {"post_mlp_layernorm.weight": "hidden"}, when="post_norms attention_names"),
    _row("mlp_bda.norm.weight", {"post_feedforward_layernorm.weight": "hidden"}, when="post_norms feedforward_names"),
)


def features(architecture: Architecture, layer: int) -> frozenset[str]:
    """Returns the words of one layer that ``when`` may ask for."""
    a, linear = architecture, architecture.is_linear_layer(layer)
    low = a.latent is not None and a.latent.q_lora_rank is not None
    having = {
        "linear": linear,
        "joint_projections": linear and not a.apart_projections,
        "apart_projections": linear and a.apart_projections,
        "softmax_attention": not linear,
        "grouped": a.latent is None and not linear,
        "latent": a.latent is not None,
        "low_queries": low,
        "full_queries": not low,
        "output_gate": a.output_gate,
        "plain_output": not a.output_gate,
        "moe": a.is_moe_layer(layer),
        "dense": not a.is_moe_layer(layer),
        "gate_up_fused": a.fused_gate_up,
        "gate_up_apart": not a.fused_gate_up,
        "indexer": a.has_indexer(layer),
        "feedforward_names": a.feedforward_names,
        "attention_names": not a.feedforward_names,
        **_expert_features(a),
    }
    traits = {name: getattr(a, name) for name in ("qk_norm", "joint_qk_norm", "qkv_bias", "biases", "sinks", "post_norms")}
    return frozenset(name for name, has in {**having, **traits}.items() if has)


def _expert_features(a: Architecture) -> dict[str, bool]:
    upright = a.stacked_experts and a.linear is not None
    shared = a.experts is not None and a.experts.shared_ffn_hidden_size > 0
    gated = a.experts is not None and a.experts.shared_gate
    return {
        "mixtral_names": a.mixtral_names,
        "stacked_experts": a.stacked_experts and not upright,
        "untransposed_experts": upright,
        "apart_experts": not a.stacked_experts,
        "own_names": not a.mixtral_names and (upright or not a.stacked_experts),
        "expert_bias": a.experts is not None and a.experts.score == "sigmoid",
        "shared": shared and not gated,
        "gated_shared": shared and gated,
    }


def sizes(architecture: Architecture) -> dict[str, int]:
    """Returns the numbers behind the table's words."""
    a, heads = architecture, architecture.num_attention_heads
    known = {
        "hidden": a.hidden_size,
        "head": a.head_dim,
        "heads": heads,
        "queries": heads * a.head_dim,
        "keys": a.num_key_value_heads * a.head_dim,
        "values": heads * (a.latent.v_head_dim if a.latent else a.head_dim),
        "ffn": a.ffn_hidden_size,
        "2*ffn": 2 * a.ffn_hidden_size,
        "2*queries": 2 * heads * a.head_dim,
        "one": 1,
    }
    if a.latent:
        known["query_rank"] = a.latent.q_lora_rank or 0
        known["kv_rank"] = a.latent.kv_lora_rank
        known["kv_rank+rope"] = a.latent.kv_lora_rank + a.latent.qk_pos_emb_head_dim
        known["keys+values"] = heads * (a.latent.qk_head_dim + a.latent.v_head_dim)
    if a.linear:
        known["kernel"], known["linear_head"] = a.linear.linear_conv_kernel_dim, a.linear.linear_value_head_dim
        known["linear_keys"], known["linear_values"] = a.linear.keys, a.linear.values
        known["linear_heads"], known["2*linear_heads"] = a.linear.linear_num_value_heads, 2 * a.linear.linear_num_value_heads
        known["linear_qkv"], known["linear_qkvz"] = 2 * a.linear.keys + a.linear.values, 2 * (a.linear.keys + a.linear.values)
    if a.indexer:
        known["index_heads"], known["index_head"] = a.indexer.heads, a.indexer.head_dim
        known["index_queries"] = a.indexer.heads * a.indexer.head_dim
    if a.experts:
        known["experts"] = a.experts.count
        known["expert_ffn"] = a.experts.ffn_hidden_size
        known["2*expert_ffn"] = 2 * a.experts.ffn_hidden_size
        known["shared_ffn"] = a.experts.shared_ffn_hidden_size
    return known


def layer_rows(architecture: Architecture, layer: int) -> tuple[NameRow, ...]:
    """Returns the rows that hold for one layer."""
    having = features(architecture, layer)
    return tuple(row for row in TABLE if row.when <= having)


# Megatron's names of a draft layer's own parameters, and in the same order each family's: DeepSeek's for most
_DRAFT_OWN = ("enorm", "hnorm", "eh_proj", "final_layernorm")
_DRAFT_NAMES: Mapping[str, tuple[str, str, str, str]] = {
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "qwen3_next": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
}


def draft_prefix(a: Architecture, draft: int) -> str:
    """Returns the prefix of the names of a draft layer's Hugging Face tensors."""
    if a.linear is not None:
        return f"mtp.layers.{draft}"
    return f"{a.prefix}.mtp_layers.{draft}" if a.mimo_drafts else f"{a.prefix}.layers.{a.num_layers + draft}"


@lru_cache(maxsize=4)
def parameter_sources(architecture: Architecture) -> dict[str, TensorSource]:
    """Returns the sources of Megatron's parameters by their global names: those of the local spec, and of Transformer Engine's layers.

    The last pipeline stage's copy of a tied embedding becomes the same tensors as the first stage's.
    """
    found = {name: source for names, source in _parameters(architecture) for name in names}
    found.setdefault("output_layer.weight", found["embedding.word_embeddings.weight"])
    return found


def _parameters(architecture: Architecture) -> Iterator[tuple[tuple[str, ...], TensorSource]]:
    """Yields, in the order of the model, the names of each parameter (in the local spec first) and its source."""
    a, hidden = architecture, architecture.hidden_size
    vocabulary = a.vocab_size, hidden
    yield ("embedding.word_embeddings.weight",), TensorSource(((f"{a.prefix}.embed_tokens.weight", vocabulary),), "vocabulary")
    for layer in range(a.num_layers):
        yield from _layer_parameters(a, layer, f"decoder.layers.{layer}", f"{a.prefix}.layers.{layer}")
    for draft in range(a.trained_drafts):
        prefix = draft_prefix(a, draft)
        yield from _layer_parameters(a, a.num_layers + draft, f"mtp.layers.{draft}.transformer_layer", prefix)
        names = _DRAFT_NAMES.get(a.model_type, ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
        for own, name in zip(_DRAFT_OWN, names, strict=True):
            shape = (hidden, 2 * hidden) if own == "eh_proj" else (hidden,)
            tensor = f"{'mtp' if a.linear is not None else prefix}.{name}.weight"
            yield (f"mtp.layers.{draft}.{own}.weight",), TensorSource(((tensor, shape),))
    yield ("decoder.final_layernorm.weight",), TensorSource(((f"{a.prefix}.norm.weight", (hidden,)),))
    if not a.tied_embeddings:
        yield ("output_layer.weight",), TensorSource((("lm_head.weight", vocabulary),), "vocabulary")


def _layer_parameters(a: Architecture, layer: int, within: str, prefix: str) -> Iterator[tuple[tuple[str, ...], TensorSource]]:
    """Yields the same of one layer, whose parameters have names that begin with ``within``, and its tensors with ``prefix``."""
    size = sizes(a)
    for row in layer_rows(a, layer):
        shapes = [(name, tuple(size[word] for word in words)) for name, words in row.tensors]
        for expert in range(a.experts.count) if a.experts and row.per_expert else (0,):
            tensors = tuple((f"{prefix}.{name.format(expert=expert)}", shape) for name, shape in shapes)
            names = tuple(f"{within}.{name.format(expert=expert)}" for name in row.megatron)
            sections = tuple(size[word] for word in row.sections)
            yield names, TensorSource(tensors, row.layout, row.float32, expert if row.stacked else None, sections)


def is_untrained(name: str) -> bool:
    """Returns whether no gradient moves a tensor with this name of Megatron's: a router's bias, or a part of an indexer."""
    return name.endswith(".expert_bias") or ".indexer." in name


def hf_tensors(architecture: Architecture) -> dict[str, Shape]:
    """Returns the names and shapes of all tensors in the model's safetensors, in the order of the model."""
    return {name: shape for _, source in _parameters(architecture) for name, shape in source.tensors}


def megatron_parameters(architecture: Architecture, engine: bool = False) -> list[str]:
    """Returns the global names of Megatron's parameters that train, in the order of the model. ``engine``: Transformer Engine's layers."""
    names = [names[-1 if engine else 0] for names, _ in _parameters(architecture)]
    return [name for name in names if not is_untrained(name)]
