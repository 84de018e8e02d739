"""Packs as dense batches: the grouping, and attention on it against one sequence at a time."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.megatron.attention import PackedCausalAttention
from services.trainer.megatron.packed_sequences import SHORT, SIMILAR, length_groups, model_input
from shared.model.parallel_layout import ParallelLayout
from shared.runtime.errors import MyxoError
from tests.unit.trainer.megatron.tiny import pack

CPU = torch.device("cpu")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=40))
def test_every_token_goes_through_exactly_one_row_and_comes_back(lengths):
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    groups, restore = length_groups(starts, CPU)
    values = torch.arange(starts[-1])
    if restore is None:
        assert [(g.count, g.length) for g in groups] == [(len(lengths), lengths[0])]
        return
    laid_out = torch.cat([values[group.rows] for group in groups])
    assert torch.equal(laid_out[restore], values)
    assert sum(group.count for group in groups) == len(lengths)
    sequence_of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = values - torch.tensor(starts)[sequence_of]
    for group in groups:
        rows = sequence_of[group.rows].view(group.count, group.length)
        assert (rows == rows[:, :1]).all()  # a row, its padding included, is of one sequence
        for row, sequence in zip(place[group.rows].view(group.count, -1), rows[:, 0].tolist(), strict=True):
            assert torch.equal(row[: lengths[sequence]], torch.arange(lengths[sequence]))  # in order, padding behind
            assert lengths[sequence] >= SIMILAR * group.length or group.length <= SHORT


def test_equal_lengths_need_no_reordering():
    groups, restore = length_groups([0, 12, 24, 36], CPU)
    assert restore is None and [(g.count, g.length) for g in groups] == [(3, 12)]


def test_many_short_sequences_are_one_batch():
    lengths = [8 + i % 9 for i in range(250)]
    groups, _ = length_groups(torch.tensor([0, *lengths]).cumsum(0).tolist(), CPU)
    assert len(groups) == 1


@pytest.mark.parametrize("multiple", [1, 2, 8])
def test_model_input_pads_to_the_multiple_and_counts_positions_per_sequence(multiple):
    batch = pack([torch.arange(1, 6), torch.arange(1, 9)])
    layout = ParallelLayout(tensor=multiple, sequence_parallel=multiple > 1)
    given = model_input(batch, layout, dense=True, device=CPU)
    assert given.tokens.shape == (1, 13 + given.padding) and given.tokens.numel() % multiple == 0
    assert given.padding < multiple
    expected = [*range(5), *range(8), *range(given.padding)]
    assert given.positions[0].tolist() == expected
    assert given.sequences.cu_seqlens_q.tolist()[:3] == [0, 5, 13]
    assert given.sequences.cu_seqlens_q[-1] == given.tokens.numel()


@pytest.fixture
def attention(make_actor):
    """The core attention of a model's first layer (2 key/value heads for 4 heads of 16)."""
    core = make_actor("qwen3").model.modules[0].decoder.layers[0].self_attention.core_attention
    assert isinstance(core, PackedCausalAttention)
    return core


PACKS = [[5], [12, 12, 12], [1, 40, 3, 17, 40, 2, 9, 33], [60, 1, 1, 1]]


@pytest.mark.parametrize(
    ("lengths", "window", "sinks"), [*((pack, 0, False) for pack in PACKS), (PACKS[1], 5, False), (PACKS[2], 1, False), (PACKS[2], 7, True)]
)
def test_attention_equals_one_sequence_at_a_time(lengths, window, sinks, attention):
    generator = torch.Generator().manual_seed(1)
    attention.window, offset = window, torch.nn.Parameter(torch.randn(4, generator=generator))
    attention.softmax_offset = offset if sinks else None
    taken = (offset,) if sinks else ()
    total = sum(lengths)
    query, key, value = (torch.randn(total, heads, 16, generator=generator, dtype=torch.float32).requires_grad_() for heads in (4, 2, 2))
    upstream = torch.randn(total, 64, generator=generator)
    batch = pack([torch.zeros(n, dtype=torch.int64) for n in lengths])
    sequences = model_input(batch, ParallelLayout(), dense=True, device=CPU).sequences
    packed = attention(query, key, value, packed_seq_params=sequences)
    packed_gradients = torch.autograd.grad((packed * upstream).sum(), (query, key, value, *taken))
    parts = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = torch.einsum("thd,shd->hts", q, k) * 16**-0.5
        seen = torch.ones(scores.shape[1:]).tril()
        seen = seen.triu(1 - window) if window else seen
        scores = scores.masked_fill(seen == 0, -torch.inf)
        scores = torch.cat([scores, offset[:, None, None].expand(-1, len(q), 1)], -1) if sinks else scores
        weights = F.softmax(scores, -1)[..., : len(k)]
        parts.append(torch.einsum("hts,shd->thd", weights, v).flatten(1))
    single = torch.cat(parts)
    gradients = torch.autograd.grad((single * upstream).sum(), (query, key, value, *taken))
    torch.testing.assert_close(packed, single, atol=2e-6, rtol=1e-5)
    for ours, theirs in zip(packed_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=1e-5)


def test_attention_refuses_what_is_not_packed(attention):
    tensor = torch.zeros(3, 4, 16)
    with pytest.raises(MyxoError, match="packed"):
        attention(tensor, tensor, tensor)
