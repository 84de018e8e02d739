"""Samples end to end: what stands where, and what is refused."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.trainer.packing import (
    BadBatch,
    BadSample,
    SampleTooLong,
    TrainSample,
    check_batch,
    pack,
    rank_micro_batches,
)

many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def sample(prompt=2, response=3, **changes) -> TrainSample:
    fields = dict(
        prompt_tokens=np.arange(1, 1 + prompt, dtype=np.int32),
        response_tokens=np.arange(11, 11 + response, dtype=np.int32),
        loss_mask=np.ones(response, np.uint8),
        rollout_log_probs=np.linspace(-1, -2, response, dtype=np.float32),
        versions=np.full(response, 4, np.int32),
        advantage=0.5,
        group="g7",
        rollout_id="r3",
    )
    return TrainSample(**{**fields, **changes})


@st.composite
def samples(draw, name=0):
    prompt, response = draw(st.integers(1, 6)), draw(st.integers(0, 8))
    mask = np.array(draw(st.lists(st.integers(0, 1), min_size=response, max_size=response)), dtype=np.uint8)
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    garbage = generator.choice([np.nan, -np.inf, np.inf, 7.0], response)
    per_token = draw(st.booleans())
    return TrainSample(
        prompt_tokens=generator.integers(0, 100, prompt).astype(np.int32),
        response_tokens=generator.integers(0, 100, response).astype(np.int32),
        loss_mask=mask,
        rollout_log_probs=np.where(mask == 1, generator.normal(-1, 1, response), garbage).astype(np.float32),
        versions=np.where(mask == 1, generator.integers(0, 9, response), -7).astype(np.int32),
        advantage=np.where(mask == 1, generator.normal(size=response), garbage) if per_token else generator.normal(),
        group="g",
        rollout_id=draw(st.integers(0, 5)),
    )


def unpack(batch, weighted: bool):
    """What a packed batch says of its sequences, read back token by token."""
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        tokens = batch.tokens[start:end].tolist()
        assert batch.labels[start:end].tolist() == [*tokens[1:], 0]
        assert batch.loss_mask[end - 1] == 0
        names = ["advantages", "rollout_log_probs", "versions"] + ["weights"] * weighted
        yield tokens, batch.loss_mask[start : end - 1], {name: batch.fields[name][start : end - 1] for name in names}


@many
@given(batch_samples=st.lists(samples(), min_size=1, max_size=6), weighted=st.booleans())
def test_packing_reads_back(batch_samples, weighted):
    weights = [1.0 / (3 + i) for i in range(len(batch_samples))]
    batch = pack(batch_samples, 200, weights=weights if weighted else None)
    total = sum(s.length for s in batch_samples)
    assert {name: (x.dtype, tuple(x.shape)) for name, x in vars(batch).items() if isinstance(x, torch.Tensor)} == {
        "tokens": (torch.int64, (total,)),
        "labels": (torch.int64, (total,)),
        "loss_mask": (torch.float32, (total,)),
        "cu_seqlens": (torch.int32, (len(batch_samples) + 1,)),
    }
    assert batch.max_seqlen == max(s.length for s in batch_samples)
    assert all(torch.isfinite(field).all() for field in batch.fields.values())
    read_back = list(unpack(batch, weighted))
    assert len(read_back) == len(batch_samples)
    for s, weight, (tokens, mask, fields) in zip(batch_samples, weights, read_back, strict=True):
        prompt = s.prompt_tokens.size
        assert tokens == [*s.prompt_tokens.tolist(), *s.response_tokens.tolist()]
        assert mask.tolist() == [0.0] * (prompt - 1) + s.loss_mask.tolist()
        trained = np.flatnonzero(s.loss_mask)
        advantages = np.broadcast_to(s.advantage, s.loss_mask.shape).astype(np.float32)
        expected = {"advantages": advantages, "rollout_log_probs": s.rollout_log_probs, "versions": s.versions}
        if weighted:
            expected["weights"] = np.full(s.loss_mask.shape, weight, np.float32)
        for name, values in expected.items():
            blank = np.full(len(mask), -1 if name == "versions" else 0, values.dtype)
            blank[prompt - 1 + trained] = values[trained]
            np.testing.assert_array_equal(fields[name].numpy(), blank, err_msg=name)


@many
@given(
    batch_samples=st.lists(samples(), min_size=1, max_size=12).filter(lambda s: any(x.trained_tokens for x in s)),
    dp_size=st.integers(1, 5),
    budget=st.integers(14, 60),
)
def test_ranks_together_hold_every_sample_once(batch_samples, dp_size, budget):
    weights = np.array([2.0**-i for i in range(len(batch_samples))])
    ranks = [rank_micro_batches(batch_samples, weights, dp_rank=rank, dp_size=dp_size, max_tokens=budget) for rank in range(dp_size)]
    assert len({len(rank) for rank in ranks}) == 1
    packed = [batch for rank in ranks for batch in rank]
    assert all(batch.tokens.numel() <= budget for batch in packed)
    assert len({frozenset(batch.fields) for batch in packed}) == 1
    found = sorted(tokens for batch in packed for tokens, _, _ in unpack(batch, weighted=True))
    fillers = max(0, len(packed) - len(batch_samples))
    expected = [[*s.prompt_tokens.tolist(), *s.response_tokens.tolist()] for s in batch_samples]
    assert found == sorted(expected + [[0, 0]] * fillers)
    total = sum(batch.fields["weights"].double().sum().item() for batch in packed)
    assert total == sum(w * s.trained_tokens for w, s in zip(weights, batch_samples, strict=True))


def test_a_filler_has_the_fields_of_any_micro_batch_and_trains_nothing():
    filler, other = pack([], 10, weights=[]), pack([sample()], 10, weights=[1.0])
    assert filler.fields.keys() == other.fields.keys()
    assert all(filler.fields[name].dtype == other.fields[name].dtype for name in other.fields)
    assert (filler.tokens.numel(), filler.cu_seqlens.tolist(), filler.max_seqlen) == (2, [0, 2], 2)
    assert filler.loss_mask.sum() == 0
    assert filler.fields["weights"].sum() == 0


def test_moving_and_adding_fields_leave_the_original_alone():
    batch = pack([sample()], 10)
    more = batch.with_fields(proximal_log_probs=torch.zeros(5))
    assert "proximal_log_probs" in more.fields
    assert "proximal_log_probs" not in batch.fields
    moved = more.to("meta")
    tensors = [moved.tokens, moved.labels, moved.loss_mask, moved.cu_seqlens, *moved.fields.values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.fields.keys() == more.fields.keys()
    assert batch.tokens.device.type == "cpu"
    with pytest.raises(BadBatch, match=r"ref_log_probs has shape \(4,\), expected \(5,\)"):
        batch.with_fields(ref_log_probs=torch.zeros(4))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt_tokens": np.array([], np.int32)}, "prompt_tokens: is empty"),
        ({"prompt_tokens": np.array([3, -2], np.int32)}, "prompt_tokens: token -2 at position 1 is negative"),
        ({"response_tokens": np.array([3, 4, -1], np.int32)}, "response_tokens: token -1 at position 2 is negative"),
        ({"response_tokens": np.array([3.0, 4, 1])}, r"response_tokens: has dtype float64 and shape \(3,\)"),
        ({"prompt_tokens": [1, 2]}, "prompt_tokens: is a list, expected a numpy array"),
        ({"prompt_tokens": np.ones((1, 2), np.int32)}, r"prompt_tokens: has dtype int32 and shape \(1, 2\)"),
        ({"loss_mask": np.ones(2, np.uint8)}, "loss_mask: has 2 values for 3 response tokens"),
        ({"loss_mask": np.array([1, 2, 0], np.uint8)}, "loss_mask: is 2 at position 1, expected 0 or 1"),
        ({"versions": np.ones(4, np.int32)}, "versions: has 4 values for 3 response tokens"),
        ({"versions": np.array([1, 1, -1], np.int32)}, "versions: is -1 at trained position 2"),
        ({"rollout_log_probs": np.ones(2, np.float32)}, "rollout_log_probs: has 2 values for 3 response tokens"),
        ({"rollout_log_probs": [1.0, 2.0, 3.0]}, "rollout_log_probs: is a list, expected a numpy array"),
        ({"rollout_log_probs": np.ones(3, np.int32)}, "rollout_log_probs: has dtype int32"),
        (
            {"rollout_log_probs": np.array([-1, np.nan, -np.inf], np.float32)},
            r"rollout_log_probs: is nan at trained position 1 \(2 such positions\)",
        ),
        ({"advantage": float("nan")}, "advantage: is nan"),
        ({"advantage": np.array([0.0, 1.0])}, "advantage: has 2 values for 3 response tokens"),
        ({"advantage": np.array([0.0, 1.0, np.inf])}, "advantage: is inf at trained position 2"),
    ],
)
def test_a_bad_sample_is_refused_with_its_name_and_numbers(changes, problem):
    with pytest.raises(BadSample, match=f"sample g7/r3: {problem}"):
        sample(**changes)


def test_garbage_at_mask_0_is_no_fault():
    mask = np.array([1, 0, 1], np.uint8)
    bad = sample(
        loss_mask=mask,
        rollout_log_probs=np.array([-1, np.nan, -2], np.float32),
        versions=np.array([1, -5, 1], np.int32),
        advantage=np.array([1, np.inf, 2]),
    )
    fields = pack([bad], 10).fields
    assert fields["rollout_log_probs"].tolist() == [0, -1, 0, -2, 0]
    assert fields["versions"].tolist() == [-1, 1, -1, 1, -1]
    assert fields["advantages"].tolist() == [0, 1, 0, 2, 0]


def test_tokens_outside_the_vocabulary_are_refused():
    pack([sample()], 10, vocab_size=14)
    for refuse in (pack, check_batch):
        with pytest.raises(BadSample, match="response_tokens: token 13 at position 2 is outside the vocabulary of 13"):
            refuse([sample()], 10, vocab_size=13)
        with pytest.raises(BadSample, match="prompt_tokens: token 2 at position 1 is outside the vocabulary of 2"):
            refuse([sample()], 10, vocab_size=2)
    with pytest.raises(BadSample, match="outside the vocabulary of 13"):
        rank_micro_batches([sample()], [1.0], dp_rank=0, dp_size=1, max_tokens=10, vocab_size=13)


def test_a_sample_over_the_budget_is_refused_by_name():
    too_long = "sample g7/r3 has 5 tokens, a micro-batch holds at most 4: raise max_tokens_per_gpu"
    for refuse in (pack, check_batch):
        with pytest.raises(SampleTooLong, match=too_long) as error:
            refuse([sample()], 4)
        assert (error.value.sample, error.value.tokens, error.value.budget) == ("g7/r3", 5, 4)
    with pytest.raises(SampleTooLong, match=too_long):
        rank_micro_batches([sample()], [1.0], dp_rank=0, dp_size=1, max_tokens=4)
    with pytest.raises(BadBatch, match="2 samples have 10 tokens together, a micro-batch holds at most 9"):
        pack([sample(), sample()], 9)


def test_a_batch_that_trains_nothing_is_refused():
    untrained = sample(loss_mask=np.zeros(3, np.uint8))
    with pytest.raises(BadBatch, match=r"mask is 0 on every token of the batch \(2 samples, 10 tokens\)"):
        check_batch([untrained, untrained], 10)
    with pytest.raises(BadBatch, match="no samples"):
        check_batch([], 10)
    with pytest.raises(BadBatch, match="mask is 0"):
        rank_micro_batches([untrained], [1.0], dp_rank=0, dp_size=1, max_tokens=10)
    check_batch([untrained, sample()], 10)
    assert pack([untrained], 10).loss_mask.sum() == 0  # one micro-batch of a batch may be so


def test_weights_and_ranks_are_checked():
    with pytest.raises(BadBatch, match="1 weights for 2 samples"):
        pack([sample(), sample()], 10, weights=[1.0])
    with pytest.raises(BadBatch, match="2 weights for 1 samples"):
        rank_micro_batches([sample()], [1.0, 1.0], dp_rank=0, dp_size=1, max_tokens=10)
    with pytest.raises(BadBatch, match=r"dp_rank 2 is not in \[0, 2\)"):
        rank_micro_batches([sample()], [1.0], dp_rank=2, dp_size=2, max_tokens=10)


def test_a_sample_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample().advantage = 1.0
