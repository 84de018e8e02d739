"""How sequences are split over context-parallel ranks."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.megatron.packed_sequences import padded_starts, split
from tests.support.tables import table
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.test_prefix_sharing import gradients
from tests.unit.trainer.megatron.tiny import pack


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
