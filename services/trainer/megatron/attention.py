"""Causal attention within each sequence of a pack, as a Megatron ``core_attention`` module without Transformer Engine.

Megatron's own ``DotProductAttention`` refuses packed sequences. Here, in half precision on a GPU, PyTorch's variable-length
flash attention does the work; anywhere else, scaled dot-product attention on dense batches of sequences of similar length.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from services.trainer.megatron import DEVICE_TYPE
from services.trainer.megatron.packed_sequences import PackedSequences, gather_keys_and_values
from services.trainer.parallel.runtime import device
from services.trainer.parallel.varlen_attention import Lengths, by_length, fits, varlen
from shared.runtime.errors import MyxoError


def uses_dense_batches(dtype: torch.dtype) -> bool:
    """Returns whether attention in ``dtype`` on this machine needs :attr:`PackedSequences.groups`."""
    return DEVICE_TYPE == "cpu" or dtype == torch.float32


class PackedCausalAttention(MegatronModule):
    """Causal self-attention over packed sequences; grouped key/value heads are shared, not copied, where possible.

    Args:
        config: the model's. softmax_scale: factor on the logits; None for ``head_dim ** -0.5``. window: tokens that a query sees,
            itself included; 0 for all. sinks: whether each head has a learned logit that joins its softmax. Megatron gives every core
            attention more arguments, which have no meaning here.

    Attributes:
        softmax_offset: the logits of this rank's heads, [heads], or None.
    """

    softmax_offset: torch.nn.Parameter | None

    def __init__(
        self, config: TransformerConfig, softmax_scale: float | None = None, window: int = 0, sinks: bool = False, **_: object
    ) -> None:
        super().__init__(config=config)
        self.scale, self.window = softmax_scale, window
        self.dense = uses_dense_batches(config.params_dtype)
        self.softmax_offset = None
        if sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device()))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Returns Megatron's sharded state: the logits of sinks are split by heads."""
        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)
        return sharded

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
        """Takes ``query``: [T, heads, head_dim]; ``key``: [T, key/value heads, head_dim]; ``value``: [T, key/value heads, width],
        where latent attention has a width other than head_dim. Returns [T, heads * width].

        Raises:
            MyxoError: the input is not packed, or wants a bias; neither occurs in this trainer.
        """
        if packed_seq_params is None or attention_bias is not None:
            raise MyxoError("PackedCausalAttention takes packed sequences without an attention bias, and nothing else")
        if packed_seq_params.context is not None:
            key, value = gather_keys_and_values(key, value, packed_seq_params.context)
            attend = self._dense_chunks if self.dense else self._varlen
        else:
            attend = self._dense if self.dense else self._by_length
        return attend(query, key, value, packed_seq_params).reshape(query.size(0), -1)

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences) -> Tensor:
        outputs = []
        for group in sequences.groups:
            q, k, v = (
                # the index_select is not needed where the sequences are equally long and in order
                (tensor if sequences.restore is None else tensor.index_select(0, rows))
                .view(group.count, -1, tensor.size(1), tensor.size(2))
                .transpose(1, 2)
                for tensor, rows in ((query, group.rows), (key, group.keys), (value, group.keys))
            )
            attended = self._masked(q, k, v, group.seen)
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined if sequences.restore is None else joined.index_select(0, sequences.restore)

    def _masked(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
        """Attends in dense batches [n, heads, tokens, width].

        Args:
            seen: bool [n or 1, 1, queries, keys], or [queries, keys]: for each query the keys from the sequence's first to its own; None
                where those are all that are not later.
        """
        if seen is None and (self.window or self.softmax_offset is not None):
            seen = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril()
        if self.window and seen is not None:
            own = seen.sum(-1, keepdim=True) - 1
            seen = seen & (torch.arange(key.size(2), device=query.device) > own - self.window)
        gqa = query.size(1) != key.size(1)
        if self.softmax_offset is None or seen is None:
            return F.scaled_dot_product_attention(query, key, value, seen, is_causal=seen is None, scale=self.scale, enable_gqa=gqa)
        # one more key, of zeros, whose score is the mask's: SDPA adds masks of numbers to the logits
        mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill(~seen, -torch.inf)
        mask = mask.expand(*torch.broadcast_shapes(mask.shape, (1, query.size(1), 1, 1)))
        mask = torch.cat([mask, self.softmax_offset.to(query.dtype)[:, None, None].expand(*mask.shape[:-1], 1)], -1)
        key, value = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
        return F.scaled_dot_product_attention(query, key, value, mask, scale=self.scale, enable_gqa=gqa)

    def _dense_chunks(self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences) -> Tensor:
        """Attends chunk by chunk under context parallelism, each chunk with the keys up to its own last."""
        assert sequences.context is not None
        queries, keys = zip(*sequences.context.spans, strict=True)
        outputs = []
        for q, k, v in zip(query.split(queries), key.split(keys), value.split(keys), strict=True):
            seen = torch.ones(q.size(0), k.size(0), dtype=torch.bool, device=q.device).tril(k.size(0) - q.size(0))
            q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
            attended = self._masked(q, k, v, seen)
            outputs.append(attended[0].transpose(0, 1))
        return torch.cat(outputs)

    def _by_length(self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences) -> Tensor:
        found = sequences.long
        if found is None or self.window or self.softmax_offset is not None or not fits(query, value):
            return self._varlen(query, key, value, sequences)
        return by_length(query, key, value, found, self.scale)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences) -> Tensor:
        context, shared = sequences.context, sequences.shared
        if shared is not None:
            key, value = (tensor.index_select(0, shared.rows) for tensor in (key, value))
            lengths = (shared.cu_queries, shared.cu_keys, shared.longest_queries, shared.longest_keys)
        elif context is None:
            lengths = (sequences.cu_seqlens_q, sequences.cu_seqlens_kv, sequences.max_seqlen_q, sequences.max_seqlen_kv)
        else:  # fewer queries than keys: the kernel's causal mask lets the last query see the last key
            most_queries, most_keys = (max(span[side] for span in context.spans) for side in (0, 1))
            lengths = (context.cu_queries, context.cu_keys, most_queries, most_keys)
        return self._kernel(query, key, value, lengths)

    def _kernel(self, query: Tensor, key: Tensor, value: Tensor, lengths: Lengths) -> Tensor:
        return varlen(query, key, value, lengths, self.scale, self.window, self.softmax_offset)
