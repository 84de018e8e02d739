"""Samples end to end: what stands where, and what is refused."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.trainer.batches import demonstration_micro_batches
from services.trainer.packing import BadSample, collect, pack, separate, spread
from services.trainer.partition import SampleTooLong
from shared.config.algorithm import AlgorithmSection
from tests.support.train_samples import train_sample

many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def sample():
    return train_sample([1, 2], [11, 12, 13], 4, group="g7", index=3)


@st.composite
def samples(draw):
    prompt, response = draw(st.integers(1, 6)), draw(st.integers(0, 8))
    mask = np.array(draw(st.lists(st.integers(0, 1), min_size=response, max_size=response)), dtype=np.uint8)
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    garbage = generator.choice([np.nan, -np.inf, np.inf, 7.0], response)
    return train_sample(
        generator.integers(0, 100, prompt),
        generator.integers(0, 100, response),
        generator.integers(0, 9, response),
        mask=mask,
        log_probs=np.where(mask == 1, generator.normal(-1, 1, response), garbage).astype(np.float32),
    )


def unpack(batch):
    """What a packed batch says of its sequences, read back token by token."""
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        tokens = batch.tokens[start:end].tolist()
        assert batch.labels[start:end].tolist() == [*tokens[1:], 0]
        assert batch.loss_mask[end - 1] == 0
        yield tokens, batch.loss_mask[start : end - 1], {name: field[start : end - 1] for name, field in batch.fields.items()}


@many
@given(batch_samples=st.lists(samples(), min_size=1, max_size=6))
def test_packing_reads_back(batch_samples):
    weights = [1.0 / (3 + i) for i in range(len(batch_samples))]
    batch = pack(batch_samples, weights)
    total = sum(s.length for s in batch_samples)
    assert {name: (x.dtype, tuple(x.shape)) for name, x in vars(batch).items() if isinstance(x, torch.Tensor)} == {
        "tokens": (torch.int64, (total,)),
        "labels": (torch.int64, (total,)),
        "loss_mask": (torch.float32, (total,)),
        "cu_seqlens": (torch.int32, (len(batch_samples) + 1,)),
    }
    assert batch.max_seqlen == max(s.length for s in batch_samples)
    assert all(torch.isfinite(field).all() for field in batch.fields.values())
    read_back = list(unpack(batch))
    assert len(read_back) == len(batch_samples)
    for s, weight, (tokens, mask, fields) in zip(batch_samples, weights, read_back, strict=True):
        assert tokens == [*s.prompt.tolist(), *s.response.tolist()]
        assert mask.tolist() == [0.0] * (s.prompt.size - 1) + s.mask.tolist()
        trained = np.flatnonzero(s.mask)
        expected = {"rollout_log_probs": s.log_probs, "versions": s.versions(), "weights": np.full(s.mask.shape, weight, np.float32)}
        for name, values in expected.items():
            blank = np.full(len(mask), -1 if name == "versions" else 0, values.dtype)
            blank[s.prompt.size - 1 + trained] = values[trained]
            np.testing.assert_array_equal(fields[name].numpy(), blank, err_msg=name)


@many
@given(batch_samples=st.lists(samples(), min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1))
def test_values_spread_over_a_pack_are_collected_again(batch_samples, seed):
    generator = np.random.default_rng(seed)
    values = [torch.as_tensor(np.where(s.mask == 1, generator.normal(size=s.mask.size), np.nan)) for s in batch_samples]
    packed = spread(batch_samples, values, "kl")
    assert packed.shape == pack(batch_samples, [1.0] * len(batch_samples)).tokens.shape and packed.dtype == torch.float32
    for s, given_values, found in zip(batch_samples, values, collect(batch_samples, packed), strict=True):
        np.testing.assert_array_equal(found.numpy(), np.where(s.mask == 1, given_values.float().numpy(), 0))


@many
@given(batch_samples=st.lists(samples(), min_size=1, max_size=12), dp_size=st.integers(1, 5), budget=st.integers(14, 60))
def test_ranks_together_hold_every_demonstration_once(batch_samples, dp_size, budget):
    objective = AlgorithmSection(calculate_per_token_loss=True)
    ranks = [
        demonstration_micro_batches(batch_samples, objective, dp_rank=rank, dp_size=dp_size, max_tokens=budget) for rank in range(dp_size)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    packed = [batch for rank in ranks for batch in rank]
    assert all(batch.tokens.numel() <= budget for batch in packed)
    assert len({frozenset(batch.fields) for batch in packed}) == 1
    found = sorted(tokens for batch in packed for tokens, _, _ in unpack(batch))
    fillers = max(0, len(packed) - len(batch_samples))
    expected = [[*s.prompt.tolist(), *s.response.tolist()] for s in batch_samples]
    assert found == sorted(expected + [[0, 0]] * fillers)
    trained = [int(s.mask.sum()) for s in batch_samples]
    total = sum(batch.fields["weights"].double().sum().item() for batch in packed)
    assert total == pytest.approx(float(any(trained)))  # of ones


def test_a_filler_has_the_fields_of_any_micro_batch_and_trains_nothing():
    filler, other = pack([], []), pack([sample()], [1.0])
    assert filler.fields.keys() == other.fields.keys()
    assert all(filler.fields[name].dtype == other.fields[name].dtype for name in other.fields)
    assert (filler.tokens.numel(), filler.cu_seqlens.tolist(), filler.max_seqlen) == (2, [0, 2], 2)
    assert filler.loss_mask.sum() == 0
    assert filler.fields["weights"].sum() == 0
    assert spread([], [], "kl").shape == filler.tokens.shape


def test_separate_samples_are_those_that_were_packed_together():
    both = [sample(), train_sample([5], [6, 7], 2, mask=np.array([0, 1], np.uint8))]
    packed = pack(both, [0.25, 0.5]).with_fields(more=torch.arange(8.0))
    for found, expected, start in zip(separate(packed), [pack([both[0]], [0.25]), pack([both[1]], [0.5])], (0, 5), strict=True):
        for name in ("tokens", "labels", "loss_mask", "cu_seqlens"):
            assert (
                torch.equal(getattr(found, name), getattr(expected, name)) and getattr(found, name).dtype == getattr(expected, name).dtype
            )
        assert all(torch.equal(found.fields[name], values) for name, values in expected.fields.items())
        assert found.fields["more"].tolist() == [float(start + at) for at in range(expected.tokens.numel())]
        assert found.max_seqlen == expected.max_seqlen


def test_moving_and_adding_fields_leave_the_original_alone():
    batch = pack([sample()], [1.0])
    more = batch.with_fields(proximal_log_probs=torch.zeros(5))
    assert "proximal_log_probs" in more.fields
    assert "proximal_log_probs" not in batch.fields
    moved = more.to("meta")
    tensors = [moved.tokens, moved.labels, moved.loss_mask, moved.cu_seqlens, *moved.fields.values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.fields.keys() == more.fields.keys()
    assert batch.tokens.device.type == "cpu"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([1.0, 2.0], r"shape \(2,\) for 3 response tokens"),
        ([1.0, 2.0, float("nan")], "nan at trained position 2, expected finite numbers"),
        ([float("-inf"), 2.0, 1.0], "-inf at trained position 0"),
    ],
)
def test_values_that_do_not_fit_their_sample_are_refused_by_name(values, problem):
    with pytest.raises(BadSample, match=f"sample g7/3: kl: {problem}"):
        spread([sample()], [torch.tensor(values)], "kl")


def test_what_is_over_the_budget_is_refused():
    with pytest.raises(SampleTooLong, match="has 5 tokens, a micro-batch holds at most 4: raise max_tokens_per_gpu"):
        demonstration_micro_batches([sample()], AlgorithmSection(), dp_rank=0, dp_size=1, max_tokens=4)


def test_the_lines_of_a_split_chat_weigh_as_one_demonstration():
    lines = [
        train_sample([1], [2] * tokens, 0, group=group, index=index) for group, index, tokens in (("a", 0, 3), ("a", 1, 1), ("b", 0, 2))
    ]
    [packed] = demonstration_micro_batches(lines, AlgorithmSection(loss_divisor=1000), dp_rank=0, dp_size=1, max_tokens=100)
    weights = {len(tokens) - 1: fields["weights"][mask > 0].tolist() for tokens, mask, fields in unpack(packed)}
    assert weights == {3: [1 / 8] * 3, 1: [1 / 8], 2: [1 / 4] * 2}, "half of the loss each, and each token of a chat as much"
