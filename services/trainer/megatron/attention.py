"""Causal attention within each sequence of a pack, as a Megatron ``core_attention`` module without Transformer Engine.

Megatron's own ``DotProductAttention`` refuses packed sequences. Here, in half precision on a GPU, PyTorch's variable-length
flash attention does the work; anywhere else, scaled dot-product attention on dense batches of sequences of similar length.

`SparseLatentAttention` attends to the keys that an indexer chooses (DeepSeek sparse attention, DeepSeek-AI 2025). An indexer is a small
attention of its own: its scores say which ``top_k`` keys of the sequence a query attends to. Layers may share the choice of one before them
(GLM-5.2). Sequences of at most ``top_k`` tokens are dense latent attention, by its kernels. In a longer one the first ``top_k`` queries see
all keys before them; the others are masked, in chunks of queries: memory grows with a chunk times the keys.

A choice has no gradient, so the indexer is not trained here: its weights are buffers, which no optimizer sees. They are loaded, saved,
exported and pushed like the others. With sequence parallelism each rank chooses for its own tokens, and the choices are gathered. Under
context parallelism keys are gathered, and a rank chooses and attends for its own chunks of the sequences.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from services.trainer.megatron import DEVICE_TYPE
from services.trainer.megatron.packed_sequences import PackedSequences, gather_keys_and_values
from services.trainer.parallel.runtime import device
from services.trainer.parallel.varlen_attention import by_length, fits, varlen
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
        return varlen(query, key, value, lengths, self.scale, self.window, self.softmax_offset)


SCORES = 2**25  # elements of the scores of a chunk of queries, over heads and keys
QUERIES = 512  # queries of a chunk of masked attention


class FrozenMatrix(torch.nn.Module):
    """A matrix, or a norm's weight and bias, that every tensor-parallel rank holds whole and no gradient moves."""

    weight: Tensor
    bias: Tensor

    def __init__(self, *shape: int, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        for name in ("weight", "bias") if bias else ("weight",):
            self.register_buffer(name, torch.empty(*shape, dtype=dtype, device=device()))


class KeyIndexer(torch.nn.Module):
    """Scores keys for each query, and chooses those of the highest scores.

    Args:
        config: has its sizes. interleaved: see `shared.model.architecture.Indexer`.
    """

    def __init__(self, config: MLATransformerConfig, interleaved: bool) -> None:
        super().__init__()
        self.heads, self.width, self.top_k = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim, config.dsa_indexer_topk
        self.interleaved, self.scattered = interleaved, config.sequence_parallel
        self.wq_b = FrozenMatrix(self.heads * self.width, config.q_lora_rank, dtype=config.params_dtype)
        self.wk = FrozenMatrix(self.width, config.hidden_size, dtype=config.params_dtype)
        self.k_norm = FrozenMatrix(self.width, dtype=torch.float32, bias=True)
        self.weights_proj = FrozenMatrix(self.heads, config.hidden_size, dtype=torch.float32)

    @torch.no_grad()
    def forward(self, hidden: Tensor, low: Tensor, cosines: Tensor, sines: Tensor, sequences: PackedSequences) -> Tensor:
        """Chooses keys for this rank's tokens; under sequence parallelism ``hidden`` and ``low`` are those of a tensor-parallel rank.

        Args:
            hidden: [t, hidden size]. low: [t, query rank], normed. cosines, sines: float32 [longest sequence, rotated width].

        Returns:
            int32 [U, top_k], places in the token's sequence; zeros for tokens that see at most ``top_k`` keys.
        """
        group, count = parallel_state.get_tensor_model_parallel_group(), hidden.size(0)
        spans, context = spans_of(sequences), sequences.context
        first = group.rank() * count if self.scattered else 0
        own = torch.cat([torch.arange(keys - queries, keys) for queries, keys in spans])[first : first + count].to(hidden.device)
        cosines, sines = cosines[own], sines[own]
        keys = F.layer_norm(F.linear(hidden, self.wk.weight).float(), (self.width,), self.k_norm.weight, self.k_norm.bias, 1e-6)
        keys = self._rotated(keys.to(hidden.dtype), cosines, sines)
        if self.scattered:
            keys = gather_from_sequence_parallel_region(keys, group=group)
        if context is not None:
            keys = gather_from_sequence_parallel_region(keys, group=context.group)[context.keys]
        weights = F.linear(hidden.float(), self.weights_proj.weight) * (self.heads * self.width) ** -0.5
        chosen = torch.zeros(count, self.top_k, dtype=torch.int32, device=hidden.device)
        start = 0  # of the span's queries
        for (queries, length), span in zip(spans, keys.split([keys for _, keys in spans]), strict=True):
            before = length - queries
            begin, end = max(start + max(self.top_k - before, 0), first), min(start + queries, first + count)
            rows = max(SCORES // (self.heads * length), 1)
            for row in range(begin, end, rows):
                part = slice(row - first, min(row + rows, end) - first)
                asked = F.linear(low[part], self.wq_b.weight).unflatten(-1, (self.heads, self.width))
                asked = self._rotated(asked, cosines[part, None], sines[part, None])
                seen = span[: before + first + part.stop - start].float()
                scores = torch.einsum("qhk,qh->qk", (asked.float() @ seen.T).relu_(), weights[part])
                ahead = torch.arange(len(seen), device=scores.device) > own[part, None]
                chosen[part] = scores.masked_fill_(ahead, -torch.inf).topk(self.top_k, -1, sorted=False).indices.int()
            start += queries
        return gather_from_sequence_parallel_region(chosen, group=group) if self.scattered else chosen

    def _rotated(self, states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Rotates the first dimensions of [..., width]; pairs come out as two halves, of queries and keys alike."""
        rotary, rest = states.split([cosines.size(-1), self.width - cosines.size(-1)], -1)
        rotary = rotary.float()
        if self.interleaved:
            rotary = torch.cat([rotary[..., 0::2], rotary[..., 1::2]], -1)
        left, right = rotary.chunk(2, -1)
        rotary = rotary * cosines + torch.cat([-right, left], -1) * sines
        return torch.cat([rotary.to(states.dtype), rest], -1)


class ChosenKeysAttention(PackedCausalAttention):
    """Causal attention to chosen keys.

    Attributes:
        source: number of the layer that chooses, from 1. kept: whether the choice is asked for again.
    """

    source, kept = 0, False

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
        """Takes and returns what `PackedCausalAttention` does."""
        top_k = self.config.dsa_indexer_topk
        if packed_seq_params is None or not has_choices(packed_seq_params, top_k):
            return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)
        choices, context = packed_seq_params.choices, packed_seq_params.context
        chosen = choices[self.source] if self.kept else choices.pop(self.source)
        if context is not None:
            key, value = gather_keys_and_values(key, value, context)
        queries, keys = zip(*spans_of(packed_seq_params), strict=True)
        outputs = []
        for asked, k, v, places in zip(query.split(queries), key.split(keys), value.split(keys), chosen.split(queries), strict=True):
            q, k, v = (tensor.transpose(0, 1)[None] for tensor in (asked, k, v))
            before, length = k.size(2) - q.size(2), q.size(2)
            dense = min(max(top_k - before, 0), length)  # queries that see all keys before them
            if dense:
                seen = before + dense
                outputs.append(self._masked(q[:, :, :dense], k[:, :, :seen], v[:, :, :seen], _causal(before, dense, q)))
            for row in range(dense, length, QUERIES):
                last = min(row + QUERIES, length)
                given = q[:, :, row:last], k[:, :, : before + last], v[:, :, : before + last], places[row:last]
                outputs.append(checkpoint(self._to_chosen, *given, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(outputs, 2)[0].transpose(0, 1).reshape(query.size(0), -1)

    def _to_chosen(self, query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
        seen = torch.zeros(query.size(2), key.size(2), dtype=torch.bool, device=query.device).scatter_(1, chosen.long(), True)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=self.scale)


class SparseLatentAttention(MLASelfAttention):
    """Megatron's latent attention with an indexer, or with the choice of an earlier layer.

    Args:
        source: number of the layer that chooses the keys, from 1. reused: whether later layers take the choice of this one.
        interleaved: as in `KeyIndexer`. Megatron gives the others.
    """

    def __init__(self, *given: Any, source: int, reused: bool, interleaved: bool, **others: Any) -> None:
        super().__init__(*given, **others)
        if source == self.layer_number:
            self.indexer = KeyIndexer(self.config, interleaved)
        self.core_attention.source = source
        self.core_attention.kept = reused or source != self.layer_number or self.checkpoint_core_attention

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Any = None, position_ids: Any = None, packed_seq_params: Any = None, **others: Any
    ) -> Any:
        """Returns what Megatron's does; the choice goes with the micro-batch, which a layer that is computed again is given again."""
        found = super().get_query_key_value_tensors(hidden_states, key_value_states, position_ids, packed_seq_params, **others)
        if hasattr(self, "indexer") and has_choices(packed_seq_params, self.indexer.top_k):
            length = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden_states, self.config, packed_seq_params)
            table = self.rotary_pos_emb(length, packed_seq=True)
            angles, factor = (table, 1.0) if isinstance(table, Tensor) else table
            angles = angles.flatten(1)
            turned = angles.cos() * factor, angles.sin() * factor
            low = found[3].detach()
            packed_seq_params.choices[self.layer_number] = self.indexer(hidden_states.squeeze(1), low, *turned, packed_seq_params)
        return found


def spans_of(sequences: PackedSequences) -> list[tuple[int, int]]:
    """Returns the queries that this rank has of each sequence, or of each chunk of one, and the keys up to the last of them."""
    if sequences.context is not None:
        return sequences.context.spans
    return [(stop - start, stop - start) for start, stop in pairwise(sequences.starts)]


def _causal(before: int, queries: int, like: Tensor) -> Tensor | None:
    """Returns the mask of queries behind ``before`` other keys, as `PackedCausalAttention` takes it."""
    return torch.ones(queries, before + queries, dtype=torch.bool, device=like.device).tril(before) if before else None


def has_choices(sequences: PackedSequences, top_k: int) -> bool:
    """Returns whether a query of the pack sees more keys than it attends to."""
    return any(stop - start > top_k for start, stop in pairwise(sequences.starts))
