"""Causal attention within each sequence of a pack, as a Megatron ``core_attention`` module without Transformer Engine.

Megatron's own ``DotProductAttention`` refuses packed sequences. Here, in half precision on a GPU, PyTorch's variable-length
flash attention does the work; anywhere else, scaled dot-product attention on dense batches of sequences of similar length.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from services.trainer.megatron import DEVICE_TYPE
from services.trainer.megatron.packed import PackedSequences
from shared.errors import MyxoError


def uses_dense_batches(dtype: torch.dtype) -> bool:
    """Whether attention in ``dtype`` on this machine needs :attr:`PackedSequences.groups`."""
    return DEVICE_TYPE == "cpu" or dtype == torch.float32


@cache
def _varlen_kernel() -> tuple[Callable[..., Any], bool]:
    """The kernel (torch >= 2.10), and whether it shares key/value heads; older ones want one for each query head."""
    from torch.nn.attention.varlen import varlen_attn  # registers CUDA operators

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


class PackedCausalAttention(MegatronModule):
    """Causal self-attention over packed sequences; grouped key/value heads are shared, not copied, where possible.

    Args:
        config: the model's. softmax_scale: factor on the logits; None for ``head_dim ** -0.5``. The other arguments are
            those that Megatron gives to every core attention, and have no meaning here.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.dense = uses_dense_batches(config.params_dtype)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """``query``: [T, heads, head_dim]; ``key``, ``value``: [T, key/value heads, head_dim]. Returns [T, heads * head_dim].

        Raises:
            MyxoError: the input is not packed, or wants a bias; neither occurs in this trainer.
        """
        if packed_seq_params is None or attention_bias is not None:
            raise MyxoError("PackedCausalAttention takes packed sequences without an attention bias, and nothing else")
        attend = self._dense if self.dense else self._varlen
        return attend(query, key, value, packed_seq_params).reshape(query.size(0), -1)

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences) -> Tensor:
        outputs = []
        for group in sequences.groups:
            q, k, v = (
                # an index_select for nothing where the sequences are equally long and in order
                (tensor if sequences.restore is None else tensor.index_select(0, group.rows))
                .view(group.count, group.length, tensor.size(1), tensor.size(2))
                .transpose(1, 2)
                for tensor in (query, key, value)
            )
            attended = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=query.size(1) != key.size(1)
            )
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined if sequences.restore is None else joined.index_select(0, sequences.restore)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences) -> Tensor:
        varlen_attn, shares_heads = _varlen_kernel()
        more: dict[str, Any] = {}
        if query.size(1) != key.size(1):
            if shares_heads:
                more["enable_gqa"] = True
            else:
                repeat = query.size(1) // key.size(1)
                key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        attended = varlen_attn(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            sequences.cu_seqlens_q,
            sequences.cu_seqlens_kv,
            sequences.max_seqlen_q,
            sequences.max_seqlen_kv,
            scale=self.scale,
            window_size=(-1, 0),  # nothing ahead: causal
            **more,
        )
        assert isinstance(attended, Tensor)
        return attended
