"""The shape of a language model, and the operations of its layers, independent of any framework's names for them."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretching of low rotary frequencies.

    Args:
        factor: by which wavelengths above ``original_max_positions / low_freq_factor`` grow; those below
            ``original_max_positions / high_freq_factor`` stay, the ones between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023) as DeepSeek-V3 uses it, in Megatron's names: it computes the frequencies, inside its latent attention.

    Args:
        rotary_scaling_factor: of the context's length over the original one. beta_fast, beta_slow: rotations over the original
            context that bound the blend. mscale, mscale_all_dim: growth of the attention's logits with the factor.
    """

    rotary_scaling_factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True)
class GroupedYarn:
    """YaRN for attention with grouped keys and values, whose logits grow with the factor alone.

    Args:
        factor: of the context's length over the original one. beta_fast, beta_slow: rotations over the original context that bound the
            blend. truncate: whether its bounds are whole dimensions.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LinearScaling:
    """Places are divided by ``factor``."""

    factor: float


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding.

    Args:
        theta: base of the frequencies. fraction: share of each head's dimensions that are rotated.
        interleaved: neighbouring dimensions form the pairs, instead of the two halves of the head.
    """

    theta: float
    fraction: float = 1.0
    interleaved: bool = False
    scaling: Llama3Scaling | YarnScaling | GroupedYarn | LinearScaling | None = None


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values, and maybe queries, pass through a low rank. In Megatron's names.

    Args:
        q_lora_rank: None for queries that are projected at once. qk_head_dim, qk_pos_emb_head_dim: the parts of a query or key
            head without and with rotary embedding. v_head_dim: width of a value head.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class LinearAttention:
    """Gated delta net (Yang et al. 2024), in Megatron's names: attention with a state of one size, behind a causal convolution.

    Args:
        layers: indices of the layers that have it; the others have softmax attention.
    """

    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    layers: tuple[int, ...]

    @property
    def keys(self) -> int:
        """Returns the width of all key heads; queries are as wide."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def values(self) -> int:
        """Returns the width of all value heads; their output gates are as wide."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def projected(self) -> int:
        """Returns the width of all that a token is projected to: queries, keys, values, gates, and two numbers a value head."""
        return 2 * (self.keys + self.values + self.linear_num_value_heads)


@dataclass(frozen=True)
class Indexer:
    """The choice of the keys that a query attends to (DeepSeek sparse attention, 2025): those of the highest scores by a small attention.

    Args:
        heads, head_dim: of its queries; all share one key. top_k: keys that a query attends to. interleaved: neighbouring dimensions
            form the pairs of its rotary embedding, instead of two halves.
        shared_layers: indices of the layers without an indexer, which take the keys that the last layer before them chose.
    """

    heads: int
    head_dim: int
    top_k: int
    interleaved: bool = False
    shared_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Experts:
    """Mixture of experts.

    Args:
        count: experts per layer. per_token: experts chosen for each token. ffn_hidden_size: width of one expert.
        normalize: whether the chosen experts' probabilities are rescaled to sum to one.
        dense_layers: indices of the layers that keep a plain MLP.
        score: ``softmax``, or ``sigmoid`` with a bias for each expert that has a say in the choice only.
        shared_ffn_hidden_size: width of the experts that see every token, together; 0 for none. shared_gate: whether a sigmoid of the
            token weights their output.
        groups, groups_per_token: experts are chosen from this many of the groups, which are ranked by their best two.
        scaling: factor on the routed experts' sum.
        swiglu_limit: bound of gate and linear part of the clamped SwiGLU, x sigmoid(1.702 x) (y + 1); None for the usual one.
    """

    count: int
    per_token: int
    ffn_hidden_size: int
    normalize: bool
    dense_layers: tuple[int, ...] = ()
    score: str = "softmax"
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    groups: int = 1
    groups_per_token: int = 1
    scaling: float = 1.0
    swiglu_limit: float | None = None


@dataclass(frozen=True)
class Tower:
    """The part of a model that sees or hears, by what its memory is planned by.

    Args:
        parameters: of all of it, what leads to the language model included. layers, hidden_size, ffn_hidden_size, heads: of its layers.
        gated: whether their MLPs are. rotated: whether places are rotations. per_token: patches, or frames, of a token of the language
            model. matrix: transformers' name of a matrix of the first layer.
    """

    parameters: int
    layers: int
    hidden_size: int
    ffn_hidden_size: int
    heads: int
    gated: bool
    rotated: bool
    per_token: int
    matrix: str


@dataclass(frozen=True)
class Architecture:
    """A model's shape.

    Args:
        head_dim: width of a query head (under latent attention, both of its parts).
        qk_norm: RMS norm over each query and key head. joint_qk_norm: one over all query heads together, and one over all key heads.
        qkv_bias: biases on the q, k and v projections. biases: on attention's output, routers and experts as well.
        output_gate: a sigmoid of the token weights each output of softmax attention.
        zero_centered_norms: norms multiply by one more than their weight, but that of linear attention's output.
        sinks: a learned logit of each head joins its softmax, and takes no value.
        windows: for each layer the tokens that a query sees, itself included; 0 for all. Empty: all, in every layer.
        window_rope: the rotary embedding of layers with a window; None: that of the others.
        softmax_scale: factor on attention's logits; None for the root of a head's width, below one.
        gelu: MLPs are gated by GELU, by the tanh formula, instead of SiLU. scaled_embedding: embeddings are multiplied by the root of the
            hidden size, rounded to the model's dtype.
        post_norms: RMS norms after attention and MLP as well, before the residual sums. feedforward_names: the norms before and after the
            MLP are named by it, and that after attention as others name the one before the MLP.
        fused_gate_up: Hugging Face keeps the two halves of a gated MLP in one tensor.
        prefix: of its tensors' names. apart_projections: it keeps what linear attention projects to in four tensors, not in two.
        mixtral_names: it names experts and routers as Mixtral's are. stacked_experts: it keeps a matrix of all experts in one tensor.
        draft_layers: layers behind the last that only guess further tokens, in the checkpoint. trained_drafts: those in the trainer's
            model: all of them where a run trains them, else none. tower: what sees or hears, where memory is planned with it.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tied_embeddings: bool
    rope: Rope
    experts: Experts | None = None
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None
    indexer: Indexer | None = None
    qk_norm: bool = False
    joint_qk_norm: bool = False
    qkv_bias: bool = False
    biases: bool = False
    sinks: bool = False
    windows: tuple[int, ...] = ()
    output_gate: bool = False
    zero_centered_norms: bool = False
    window_rope: Rope | None = None
    softmax_scale: float | None = None
    gelu: bool = False
    scaled_embedding: bool = False
    post_norms: bool = False
    feedforward_names: bool = False
    fused_gate_up: bool = False
    prefix: str = "model"
    apart_projections: bool = False
    mixtral_names: bool = False
    stacked_experts: bool = False
    draft_layers: int = 0
    trained_drafts: int = 0
    tower: Tower | None = None

    def is_moe_layer(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    def window(self, layer: int) -> int:
        """Returns the tokens that a query of a layer sees, itself included; 0 for all."""
        return self.windows[layer] if self.windows else 0

    def is_linear_layer(self, layer: int) -> bool:
        return self.linear is not None and layer in self.linear.layers

    @property
    def mimo_drafts(self) -> bool:
        """Returns whether draft layers have MiMo's names, take hidden states first, and no embedding at a sequence's first place."""
        return self.model_type == "mimo"

    @property
    def softmax_layers(self) -> int:
        """Returns how many layers have softmax attention."""
        return self.num_layers - (len(self.linear.layers) if self.linear else 0)

    def has_indexer(self, layer: int) -> bool:
        return self.indexer is not None and layer not in self.indexer.shared_layers

    def as_json(self) -> dict[str, Any]:
        """Returns plain values, flat (``rope.theta``), equal after a round trip through JSON, for a checkpoint."""
        return _flat(asdict(self))


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


# The operations of a layer whose outputs engine and trainer are compared by, in the order in which they are computed. The output is the
# residual stream that the next layer gets. The files that hold them are safetensors, one for each rank of a pass: float32 [T, width] by
# name, ``embedding``, ``layers.N.OPERATION``, ``final_norm``, ``log_probs`` [T - 1, 1]; ``layers.N.experts`` are int32. A name says of a
# tensor that is not whole how the ranks' parts make it: ``NAME:columns`` side by side, or ``NAME:rows`` one after the other.
OPERATIONS = (
    "attention_norm", "q", "k", "v", "attention", "attention_output", "mlp_norm", "router_logits", "experts", "mlp_output", "output",
)  # fmt: skip
ROUNDINGS = 2  # passes of the trainer whose operations are changed at random, by as much as rounding may change them


def operation_names(layers: int) -> list[str]:
    """Returns the names of all operations in the order in which they are computed."""
    return ["embedding", *(f"layers.{index}.{one}" for index in range(layers) for one in OPERATIONS), "final_norm", "log_probs"]
