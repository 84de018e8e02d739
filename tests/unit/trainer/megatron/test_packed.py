"""Packs as dense batches, and split over context-parallel ranks."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.megatron.attention import PackedCausalAttention
from services.trainer.megatron.packed_sequences import SHORT, SIMILAR, length_groups, model_input, padded_starts, split
from shared.model.parallel_layout import ParallelLayout
from shared.runtime.errors import MyxoError
from tests.support.tables import table
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.test_prefix_sharing import gradients
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


# --- how sequences are split over context-parallel ranks


class Ranks:
    """As much of a process group as a split asks for."""

    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.sampled_from([2, 3, 4]), st.sampled_from([1, 2, 3]))
def test_every_token_has_one_place_and_sees_its_own_sequence_up_to_itself(lengths, size, tensor):
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    padded = padded_starts(starts, size, tensor)
    assert all((stop - start) % (2 * size) == 0 for start, stop in pairwise(padded))
    assert (padded[-1] // size) % tensor == 0
    assert padded[-1] - starts[-1] < len(lengths) * 2 * size + 2 * size * tensor  # no more padding than that
    parts = [split(starts, padded, Ranks(size), rank, torch.device("cpu")) for rank in range(size)]

    tokens = torch.arange(starts[-1])
    gathered = torch.cat([part.own(tokens + 1) - 1 for part in parts])  # the padding becomes -1
    assert torch.equal(gathered[parts[0].back], tokens)
    assert (gathered >= 0).sum() == len(tokens)
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for part in parts:
        assert torch.equal(part.back, parts[0].back)
        assert len({sum(keys for _, keys in p.spans) for p in parts}) == 1  # the same work for all
        queries = part.rows.split([q for q, _ in part.spans])
        keys = gathered[part.keys].split([k for _, k in part.spans])
        for seeing, seen in zip(queries, keys, strict=True):
            for index, token in enumerate(seeing.tolist()):
                if token >= 0:
                    first = starts[of[token]]
                    up_to = seen[: len(seen) - len(seeing) + index + 1]
                    assert up_to.tolist() == list(range(first, token + 1))


def test_sequences_that_divide_are_not_padded():
    assert padded_starts([0, 8, 24, 32], 2, 2) == [0, 8, 24, 32]
    assert padded_starts([0, 8, 20], 2, 1) == [0, 8, 20]


@table(("size", "tensor", "total"), [(2, 1, 4), (2, 2, 4), (2, 4, 8), (4, 2, 8), (4, 3, 24), (2, 8, 16)])
def test_one_token_is_padded_to_what_the_ranks_divide(size, tensor, total):
    assert padded_starts([0, 1], size, tensor)[-1] == total


def of_uneven_sequences(directory, config):
    """Loss, gradients and log-probs of a pack whose sequences the ranks do not divide, some of one token, some of several chunks."""
    model, batch = rank_steps.actor(directory, **config), pack([torch.arange(n) % 67 for n in (1, 151, 6, 65, 1, 2, 40, 7)])
    loss, _, named = gradients(model, batch, rank_steps.weighted_loss, need_entropy=True)
    return loss, named, model.log_probs([batch])[0]


@pytest.mark.extra
@pytest.mark.parametrize("kind", ["qwen3_next", "glm_moe_dsa", "gpt_oss"])
def test_uneven_sequences_have_the_gradients_of_one_rank(kind, hf, two_ranks):
    loss, named, log_probs = of_uneven_sequences(hf(kind), {})
    for other_loss, others, others_log_probs in two_ranks.run(
        of_uneven_sequences, hf(kind), {"context_parallel_size": 2, "use_distributed_optimizer": False}
    ):
        assert other_loss == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(others_log_probs, log_probs, atol=1e-5, rtol=0)
        for name, gradient in others.items():
            assert (gradient - named[name]).norm() <= 1e-4 * named[name].norm() + 1e-6, name
