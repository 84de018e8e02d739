"""Reading engines' answers: what each release says of versions, and answers that do not fit. No engine here."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.engine.generation import Generation, GenerationRequest, Span, parse_group
from services.rollout.engine.transport import EngineError
from shared.hooks import hook_sample

REQUEST = GenerationRequest([5, 6], 8, rid="a")


def answer(count: int, *, versions: list[tuple[int, int, int]] | None = None, at_end: object = "3", **changes: Any) -> Any:
    """A ``/generate`` answer of ``count`` tokens, in SGLang's words."""
    meta = {
        "id": "a$",
        "finish_reason": {"type": "length", "length": count},
        "weight_version": at_end,
        "output_token_logprobs": [[-0.5 * token, token, None] for token in range(count)],
        "cached_tokens": 1,
    }
    if versions is not None:
        meta["weight_versions"] = [{"version": str(v), "start": start, "end": end} for start, end, v in versions]
    return [{"output_ids": list(range(count)), "meta_info": meta | changes}]


def parse(reply: Any, version_before: int = 3, late: frozenset[int] = frozenset()) -> Generation:
    (generation,) = parse_group(reply, [REQUEST], version_before, late, "http://engine/generate")
    return generation


def test_arrays() -> None:
    generation = parse(answer(3, versions=[(0, 3, 3)]))
    np.testing.assert_array_equal(generation.tokens, np.array([0, 1, 2], np.int32), strict=True)
    np.testing.assert_array_equal(generation.log_probs, np.array([0, -0.5, -1], np.float32), strict=True)
    assert (generation.finish, generation.cached_tokens) == ("length", 1)


@pytest.mark.parametrize(("before", "at_end", "version"), [(3, "3", 3), (3, "5", 3), (5, "3", 3)])
def test_an_engine_that_names_the_last_version_only(before: int, at_end: str, version: int) -> None:
    assert parse(answer(4, at_end=at_end), before).spans == (Span(0, 4, version),)


BY_RECEIVER: dict[str, tuple[list[int | None], set[int], list[tuple[int, int, int]]]] = {
    "over two pushes": ([3, 3, 4, 6], set(), [(0, 2, 3), (2, 3, 4), (3, 4, 6)]),
    "the first of a late version": ([3, 3, 4, 4], {4}, [(0, 3, 3), (3, 4, 4)]),
    "unknown until a push": ([None, None, 4, 4], set(), [(0, 2, 3), (2, 4, 4)]),
    "unknown since a load": ([3, 4, None, None], set(), [(0, 1, 3), (1, 4, 4)]),
    "all unknown": ([None] * 4, set(), [(0, 4, 3)]),
    "those of the last part alone": ([4, 4], set(), [(0, 2, 3), (2, 4, 4)]),
}


@pytest.mark.parametrize("case", BY_RECEIVER)
def test_an_engine_whose_receiver_reports_each_tokens_version(case: str) -> None:
    told, late, expected = BY_RECEIVER[case]
    assert parse(answer(4, token_versions=told, at_end="9"), 3, frozenset(late)).spans == tuple(Span(*span) for span in expected)
    known = hook_sample.token_versions({"token_versions": told}, 4)
    assert known == [*[None] * (4 - len(told)), *told]
    native = answer(4, token_versions=told, versions=[(0, 4, 5)])
    assert parse(native).spans == (Span(0, 4, 5),), "the engine's own report counts"


def test_the_likeliest_tokens_of_each_place() -> None:
    """One that a grammar forbids has no log-prob."""
    asked = GenerationRequest([5, 6], 8, rid="a", top_count=2)
    rows = [[[-0.5, 7, None], [None, 8, None]], [[-1.0, 1, None], [-2.0, 2, None]]]
    (generation,) = parse_group(answer(2, output_top_logprobs=rows), [asked], 3, frozenset(), "http://engine/generate")
    assert generation.top_log_probs.reshape(2, 2, 2).tolist() == [[[-0.5, 7], [-9999.0, 8]], [[-1.0, 1], [-2.0, 2]]]
    with pytest.raises(EngineError, match="not 2 of the likeliest tokens at each of 2 places"):
        parse_group(answer(2, output_top_logprobs=rows[:1]), [asked], 3, frozenset(), "http://engine/generate")


def test_a_request_that_never_began() -> None:
    reply = answer(0, finish_reason={"type": "abort", "message": "Abort in waiting queue"}, versions=[(0, 0, 3)])
    del reply[0]["meta_info"]["output_token_logprobs"], reply[0]["meta_info"]["cached_tokens"]
    generation = parse(reply)
    assert generation.finish == "abort" and generation.spans == ()
    assert generation.tokens.shape == generation.log_probs.shape == (0,)


LATE = {
    "moved": ([(0, 4, 3), (4, 8, 4)], {4}, [(0, 5, 3), (5, 8, 4)]),
    "its only token was the old one's": ([(0, 7, 3), (7, 8, 4)], {4}, [(0, 8, 3)]),
    "one of two": ([(0, 3, 3), (3, 4, 4), (4, 8, 5)], {4}, [(0, 4, 3), (4, 8, 5)]),
    "both": ([(0, 3, 3), (3, 4, 4), (4, 8, 5)], {4, 5}, [(0, 4, 3), (4, 5, 4), (5, 8, 5)]),
    "came in before the first token": ([(0, 8, 4)], {4}, [(0, 1, 3), (1, 8, 4)]),
    "was there when the request was sent": ([(0, 8, 3)], {3}, [(0, 8, 3)]),
    "not late": ([(0, 4, 3), (4, 8, 4)], set(), [(0, 4, 3), (4, 8, 4)]),
}


@pytest.mark.parametrize("case", LATE)
def test_versions_that_began_late(case: str) -> None:
    reported, late, expected = LATE[case]
    assert parse(answer(8, versions=reported), 3, frozenset(late)).spans == tuple(Span(*span) for span in expected)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.sets(st.integers(3, 9)), st.integers(0, 3))
def test_spans_always_cover_the_output_with_growing_versions(lengths: list[int], late: set[int], before: int) -> None:
    edges = [0, *np.cumsum(lengths).tolist()]
    reported = [(start, end, 3 + i) for i, (start, end) in enumerate(pairwise(edges))]
    spans = parse(answer(edges[-1], versions=reported), before, frozenset(late)).spans
    assert [spans[0].start, *(span.end for span in spans)] == [*(span.start for span in spans), edges[-1]]
    assert all(left.version < right.version for left, right in pairwise(spans))
    by_engine = {at: version for start, end, version in reported for at in range(start, end)}
    assert all(span.version <= by_engine[at] for span in spans for at in range(span.start, span.end))


WRONG = {
    "answered .*'no'.* to a group of 1": {"error": "no"},
    "answered for 'b": answer(2, id="b$"),
    "2 log-probs do not belong": [answer(2)[0] | {"output_ids": [0, 1, 2]}],
    "unknown finish reason": answer(2, finish_reason={"type": "boredom"}),
    "weight version 'default', not an integer": answer(2, at_end="default"),
    "do not cover 4 tokens": answer(4, versions=[(0, 2, 3), (3, 4, 4)]),
    "cover 5 tokens": answer(5, versions=[(0, 4, 3)]),
}


@pytest.mark.parametrize("message", WRONG)
def test_an_answer_that_does_not_fit(message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse(WRONG[message])
