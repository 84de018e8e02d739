"""What a sample keeps over interruptions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.engine.generation import Finish, Generation, Span
from services.rollout.partial_samples import Partial

LONGEST = 1000


def generation(tokens: list[int], spans: list[tuple[int, int, int]], finish: Finish) -> Generation:
    return Generation(
        tokens=np.asarray(tokens, np.int32),
        log_probs=-np.asarray(tokens, np.float32) / 10,
        finish=finish,
        spans=tuple(Span(*span) for span in spans),
        cached_tokens=0,
    )


def test_an_aborted_generation_is_gone_on_with() -> None:
    partial = Partial()
    partial.extend(generation([5, 6], [(0, 2, 3)], "abort"), LONGEST)
    assert partial.finish is None
    partial.extend(generation([7, 8, 9], [(0, 1, 3), (1, 3, 4)], "stop"), LONGEST)
    assert partial.finish == "stop"
    assert partial.tokens.tolist() == [5, 6, 7, 8, 9]
    assert partial.segments == [(0, 3, 3), (3, 5, 4)]
    assert np.allclose(partial.log_probs, [-0.5, -0.6, -0.7, -0.8, -0.9])


def test_an_abort_before_the_first_token_changes_nothing() -> None:
    partial = Partial()
    partial.extend(generation([], [], "abort"), LONGEST)
    assert partial.finish is None
    assert partial.segments == []


def test_an_abort_at_full_length_ends_the_sample() -> None:
    partial = Partial()
    partial.extend(generation([1, 2, 3], [(0, 3, 0)], "abort"), 3)
    assert partial.finish == "length"


@given(st.lists(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), max_size=4), max_size=6))
def test_segments_tile_the_tokens_however_often_it_was_interrupted(pieces: list[list[tuple[int, int]]]) -> None:
    """Each piece is one answer of the engine: (length, growth of the version) span by span."""
    partial, version, expected = Partial(), 0, []
    for piece in pieces:
        spans, at = [], 0
        for length, growth in piece:
            version += growth
            spans.append((at, at + length, version))
            expected += [version] * length
            at += length
        partial.extend(generation(list(range(at)), spans, "abort"), LONGEST)
    tiled = [version for start, end, version in partial.segments for _ in range(start, end)]
    assert tiled == expected
    assert len(partial.tokens) == len(partial.log_probs) == len(expected)
    versions = [version for _, _, version in partial.segments]
    assert versions == sorted(set(versions))
