"""Floating-point operations of a model on packed sequences, counted from its shape, and the peak rate of a device.

A multiplication and the addition of its result count as two. Counted are the matrix products: projections, attention's scores and weighted
sums, MLPs, the chosen experts and their router, the vocabulary, linear attention's reads and writes of its state; not norms, rotations,
softmaxes, convolutions. A training step counts three times the forward pass (the backward pass has two products for each), whatever is
computed again to save memory.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shared.model.architecture import Architecture

# Dense bfloat16 products a second by device name, from the vendors' data sheets; the first that matches counts
PEAKS = (
    (r"\bGB200\b", 2500e12),
    (r"\bB200\b", 2250e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835e12),
    (r"\b(H200|GH200|H100|H800)\b", 989e12),
    (r"\bH20\b", 148e12),
    (r"\b(A100|A800)\b", 312e12),
    (r"\bA40\b", 150e12),
    (r"\bA30\b", 165e12),
    (r"\bA10\b", 125e12),
    (r"\bL40S\b", 362e12),
    (r"\bL40\b", 181e12),
    (r"\bL4\b", 121e12),
    (r"\bMI300X\b", 1307e12),
)


class Work(NamedTuple):
    """What operations are counted from: tokens, and pairs of a query and a key that it sees."""

    tokens: float = 0.0
    pairs: float = 0.0


NOTHING = Work()


def work(lengths: Sequence[int], shared: Work = NOTHING) -> Work:
    """Returns the work of sequences of these lengths, which do not attend to one another, less what is ``shared``."""
    tokens = np.asarray(lengths, np.float64)
    return Work(float(tokens.sum()) - shared.tokens, float((tokens * (tokens + 1) / 2).sum()) - shared.pairs)


def forward(architecture: Architecture, lengths: Sequence[int], *, shared: Work = NOTHING, value_head: bool = False) -> float:
    """Returns the operations of one forward pass.

    Args:
        lengths: tokens of each sequence. shared: of their work, what is computed once for several and counted more often in ``lengths``.
        value_head: a critic, without the vocabulary.
    """
    tokens, pairs = work(lengths, shared)
    return _weights(architecture, tokens, value_head) + pairs * architecture.softmax_layers * _attention(architecture)


def training(
    architecture: Architecture, lengths: Sequence[int], *, shared: Work = NOTHING, value_head: bool = False, adapters: bool = False
) -> float:
    """Returns the operations of one forward and backward pass.

    Args:
        adapters: only LoRA's adapters train, so that the weights have no gradients. The adapters' own few operations are not counted.
    """
    whole = 3 * forward(architecture, lengths, shared=shared, value_head=value_head)
    return whole - _weights(architecture, work(lengths, shared).tokens, value_head) if adapters else whole


def _weights(a: Architecture, tokens: float, value_head: bool) -> float:
    layers = sum(_mlp(a, layer) for layer in range(a.num_layers)) + a.softmax_layers * _projections(a)
    if (m := a.linear) is not None:  # of a state: what it holds at the key, the change there, and what it holds at the query
        state = m.linear_num_value_heads * m.linear_key_head_dim * m.linear_value_head_dim
        layers += len(m.layers) * (2.0 * a.hidden_size * (m.projected + m.values) + 6.0 * state)
    return tokens * (layers + 2.0 * a.hidden_size * (1 if value_head else a.vocab_size))


def peak(device: str, dtype: str) -> float | None:
    """Returns the matrix-product operations a second of the device that torch calls so, from `PEAKS`.

    None for an unknown device, and where the ``dtype`` of training is not bfloat16.
    """
    return next((value for name, value in PEAKS if dtype == "bfloat16" and re.search(name, device)), None)


def _projections(a: Architecture) -> float:
    h, heads = a.hidden_size, a.num_attention_heads
    if a.latent is None:
        return 2.0 * h * a.head_dim * ((3 if a.output_gate else 2) * heads + 2 * a.num_key_value_heads)
    m = a.latent
    query_dim = heads * (m.qk_head_dim + m.qk_pos_emb_head_dim)
    query = h * query_dim if m.q_lora_rank is None else m.q_lora_rank * (h + query_dim)
    key_value = h * (m.kv_lora_rank + m.qk_pos_emb_head_dim) + m.kv_lora_rank * heads * (m.qk_head_dim + m.v_head_dim)
    return 2.0 * (query + key_value + heads * m.v_head_dim * h)


def _attention(a: Architecture) -> float:
    """Returns one layer's operations for one pair of a query and a key: the score, and its part of the weighted sum."""
    if a.latent is None:
        return 4.0 * a.num_attention_heads * a.head_dim
    m = a.latent
    return 2.0 * a.num_attention_heads * (m.qk_head_dim + m.qk_pos_emb_head_dim + m.v_head_dim)


def _mlp(a: Architecture, layer: int) -> float:
    """Returns one layer's MLP operations for one token; all MLPs are gated and have three matrices."""
    if a.experts is None or not a.is_moe_layer(layer):
        return 6.0 * a.hidden_size * a.ffn_hidden_size
    e = a.experts
    return 2.0 * a.hidden_size * (e.count + e.shared_gate) + 6.0 * a.hidden_size * (
        e.per_token * e.ffn_hidden_size + e.shared_ffn_hidden_size
    )
