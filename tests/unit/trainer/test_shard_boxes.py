"""Slices of a flattened tensor as boxes of it, and who writes which part."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.parallel.joint_write import HeldPart, elect
from services.trainer.parallel.staged_shards import boxes_of_interval, elements_before, is_ordered, overlap, pieces

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_the_boxes_of_an_interval_hold_exactly_its_elements_in_order(shape, data):
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    start = data.draw(st.integers(0, whole.size))
    stop = data.draw(st.integers(start, whole.size))
    boxes = boxes_of_interval(start, stop, shape)
    found = [part for offsets, sizes in boxes for part in whole[within(offsets, sizes)].ravel()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(SHAPES, st.integers(1, 200))
def test_pieces_make_up_the_whole_and_are_small(shape, most):
    seen = np.zeros(shape, int)
    cut = list(pieces(shape, 4, most))
    for offsets, sizes in cut:
        seen[within(offsets, sizes)] += 1
    assert (seen == 1).all()
    assert not any(overlap(one, other) for index, one in enumerate(cut) for other in cut[:index])
    longest = next((size for size in shape if size > 1), 1)
    assert all(np.prod(sizes) * 4 <= max(most, np.prod(shape) // longest * 4) for _, sizes in cut)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=3), st.integers(-3, 400))
def test_elements_before_a_position_are_counted_in_a_view_with_gaps(dimensions, position):
    shape, strides, span = [], [], 1
    for size, gap in reversed(dimensions):
        shape.insert(0, size)
        strides.insert(0, span + gap)
        span = strides[0] * size
    assert is_ordered(shape, strides)
    places = sum(np.arange(size).reshape([-1 if i == d else 1 for i in range(len(shape))]) * strides[d] for d, size in enumerate(shape))
    assert elements_before(position, shape, strides) == int((np.ravel(places) < position).sum())


def test_a_transposed_view_is_not_in_order():
    assert not is_ordered((3, 4), (1, 3)) and is_ordered((3, 4), (8, 1)) and is_ordered((1, 4), (1, 1))


def within(offsets, sizes):
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


NAMES = st.dictionaries(st.sampled_from("abcdefgh"), st.just(None), max_size=8)


@given(st.lists(NAMES, min_size=1, max_size=6), st.data())
def test_everything_is_written_once_in_each_directory_that_holds_it(names, data):
    size = {name: 10 * ord(name) for name in "abcdefgh"}
    copies = data.draw(st.sets(st.sampled_from("abcdefgh")))
    held = [{name: HeldPart(size[name], name not in copies) for name in each} for each in names]
    leaders = [data.draw(st.integers(0, rank)) for rank in range(len(held))]
    directories = [[rank for rank, leader in enumerate(leaders) if leader == each] for each in sorted(set(leaders))]
    elected = elect(held, directories)
    for number, ranks in enumerate(directories):
        there = {name for rank in ranks for name in held[rank]}
        mains = [name for rank in ranks for name in elected[rank].main]
        assert sorted(mains) == sorted(there - copies)
        extra = [name for rank in ranks for name in elected[rank].copies]
        assert sorted(extra) == (sorted(there & copies) if number else [])
        assert all(elected[rank].main | elected[rank].copies <= held[rank].keys() for rank in ranks)


def test_replicas_share_the_work_and_own_slices_count():
    held = [{f"w{i}": HeldPart(100) for i in range(8)} | {f"own{rank}": HeldPart(200 * rank)} for rank in range(3)]
    written = [sum(held[rank][name].nbytes for name in each.main) for rank, each in enumerate(elect(held, [[0, 1, 2]]))]
    assert sum(written) == 800 + 600 and max(written) - min(written) <= 100
