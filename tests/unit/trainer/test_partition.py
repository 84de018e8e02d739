"""A batch dealt out from its references: every sample once, groups whole where that costs nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.partition import Untrainable, partition_batch, parts
from shared.schema.messages import Batch, BatchGroup, Payload
from shared.schema.sample import NO_LIMIT

few = settings(max_examples=60, deadline=None)

groups_of_lengths = st.lists(st.lists(st.integers(2, 60), min_size=1, max_size=6), min_size=1, max_size=12)


Positions = dict[int, tuple[int, ...]]


def batch(lengths: list[list[int]], removed: Positions | None = None, stale: Positions | None = None) -> Batch:
    groups = [
        BatchGroup(
            group=f"g{number:08d}",
            payload=Payload(keys=[f"k{number}"], bytes=1, tokens=tuple(tokens)),
            rewards=[0.0] * len(tokens),
            removed=(removed or {}).get(number, ()),
            stale=(stale or {}).get(number, ()),
        )
        for number, tokens in enumerate(lengths)
    ]
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
