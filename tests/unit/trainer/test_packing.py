"""A batch on its ranks: dealt out, packed, and what its sequences share."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.trainer.batches import demonstration_micro_batches
from services.trainer.packing import BadSample, collect, pack, separate, shared_prefixes, spread
from services.trainer.partition import SampleTooLong, Untrainable, partition_batch, parts
from shared.config.algorithm import AlgorithmSection
from shared.schema.messages import Batch, BatchGroup, Payload
from shared.schema.sample import NO_LIMIT
from tests.support.train_samples import train_sample
from tests.support.valid_messages import example

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


# --- a batch dealt out from its references: every sample once, groups whole where that costs nothing

few = settings(max_examples=60, deadline=None)

groups_of_lengths = st.lists(st.lists(st.integers(2, 60), min_size=1, max_size=6), min_size=1, max_size=12)


Positions = dict[int, tuple[int, ...]]


def batch(lengths: list[list[int]], removed: Positions | None = None, stale: Positions | None = None) -> Batch:
    groups = []
    for number, tokens in enumerate(lengths):
        left_out = {"removed": (removed or {}).get(number, ()), "stale": (stale or {}).get(number, ())}
        payload = example(Payload, tokens=tuple(tokens))
        groups.append(example(BatchGroup, group=f"g{number:08d}", payload=payload, rewards=[0.0] * len(tokens), **left_out))
    return Batch(step=3, version=2, groups=groups)


@few
@given(lengths=groups_of_lengths, steps=st.integers(1, 4), ranks=st.integers(1, 4), square=st.booleans())
def test_every_sample_is_dealt_once(lengths: list[list[int]], steps: int, ranks: int, square: bool) -> None:
    dealt = partition_batch(batch(lengths), steps, ranks, 64, (lambda tokens: tokens + tokens**2 / 40) if square else float)
    total = sum(map(len, lengths))
    assert len(dealt.items) == total
    assert sorted(number for rank in range(ranks) for number in dealt.samples_of(rank)) == list(range(total))
    for placement in dealt.steps:
        assert len({len(rank) for rank in placement}) == 1
        assert all(sum(dealt.items[number].tokens for number in micro) <= 64 for rank in placement for micro in rank)
    for rank in range(ranks):
        assert {dealt.items[number].group for number in dealt.samples_of(rank)} == set(dealt.groups_of(rank))


@few
@given(lengths=groups_of_lengths, ranks=st.integers(1, 4), budget=st.integers(8, 64))
def test_a_sample_longer_than_a_micro_batch_is_one_by_itself(lengths: list[list[int]], ranks: int, budget: int) -> None:
    dealt = partition_batch(batch(lengths), 1, ranks, budget, longest=NO_LIMIT)
    assert sorted(number for rank in range(ranks) for number in dealt.samples_of(rank)) == list(range(sum(map(len, lengths))))
    for micro in (micro for placement in dealt.steps for rank in placement for micro in rank):
        tokens = [dealt.items[number].tokens for number in micro]
        assert sum(tokens) <= budget or len(tokens) == 1


def test_a_sample_longer_than_the_longest_is_refused() -> None:
    with pytest.raises(Untrainable, match="has 60 tokens, a micro-batch holds at most 59"):
        partition_batch(batch([[60, 2]]), 1, 1, 30, longest=59)


@few
@given(trained=st.lists(st.booleans(), min_size=1, max_size=30), count=st.integers(1, 6))
def test_parts_have_as_many_trained_samples(trained: list[bool], count: int) -> None:
    found = parts(trained, count)
    assert [number for part in found for number in part] == list(range(len(trained)))
    sizes = [sum(trained[number] for number in part) for part in found]
    assert max(sizes) - min(sizes) <= 1
    assert len(found) == max(1, min(count, sum(trained)))


def test_removed_and_stale_samples_do_not_count_as_trained() -> None:
    dealt = partition_batch(batch([[4, 4, 4], [4, 4, 4]], removed={0: (0,)}, stale={0: (1,)}), 2, 1, 64)
    assert [sorted(number for micro in placement[0] for number in micro) for placement in dealt.steps] == [[0, 1, 2, 3], [4, 5]]
    assert dealt.removed() == {0}
    assert dealt.name(4) == "g00000001/1"


@pytest.mark.parametrize("optimizer_steps", [1, 3])
def test_the_same_batch_is_dealt_the_same_way(optimizer_steps: int) -> None:
    lengths = [[5, 9, 33], [60, 2], [17, 17, 17, 17]]
    first, second = (partition_batch(batch(lengths), optimizer_steps, 2, 64) for _ in range(2))
    assert first.steps == second.steps


# --- what sequences share, against a set of all beginnings

SEQUENCES = st.lists(st.lists(st.sampled_from([0, 1, 255, 256, 151_935]), min_size=1, max_size=12), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(SEQUENCES)
def test_every_beginning_is_computed_exactly_once_for_each_token_that_follows(sequences):
    starts = np.cumsum([0, *map(len, sequences)]).tolist()
    tokens = np.concatenate([np.array(sequence, np.int64) for sequence in sequences])
    found = shared_prefixes(tokens, starts)
    beginnings = [(*sequence[: t + 2],) for sequence in sequences for t in range(len(sequence))]
    last = [t + 1 == len(sequence) for sequence in sequences for t in range(len(sequence))]
    assert len(found.computed) == len({b for b, ends in zip(beginnings, last, strict=True) if not ends}) + len(sequences)
    assert len(found.back) == len(tokens) and (np.diff(found.computed) > 0).all()
    for index, source in enumerate(found.computed[found.back].tolist()):
        assert beginnings[source] == beginnings[index]
        assert not last[index] or source == index, "the last token of a sequence predicts nothing, and is its own"
    assert found.shared.sum() + len(found.computed) == len(tokens)
    for shared, start, stop in zip(found.shared.tolist(), starts[:-1], starts[1:], strict=True):
        own = np.arange(start + shared, stop)
        assert np.array_equal(found.computed[found.back[own]], own)
    assert found.saved == 1 - len(found.computed) / len(tokens)


def test_a_fork_and_a_conversation_that_goes_on():
    prompt = [7, 8, 9, 10]
    found = shared_prefixes(np.array([*prompt, 1, 2, *prompt, 3, *prompt, 1, 2, 4, 5]), [0, 6, 11, 19])
    # of 6, 5 and 8 tokens: one prompt but for its last token, which predicts 1 and 3; 1 2 4 5 continues from 1 2, whose 2 predicts nothing
    assert found.shared.tolist() == [0, 3, 5]
    assert found.back.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 7, 0, 1, 2, 3, 4, 8, 9, 10]
