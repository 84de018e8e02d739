"""A response's text: where it stops, and which of it is the model's own."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.data.stop_strings import end_across
from shared.schema.sample import sampled, scored_text, turns_of
from tests.support.tables import table

TEXT = st.text(alphabet="abc", max_size=12)


def decode(tokens: list[int]) -> str:
    """A vocabulary of bytes: é is two tokens."""
    return bytes(tokens).decode(errors="replace")


def first_end(text: str, stops: list[str]) -> int | None:
    """The number of characters up to the end of the stop string that ends first."""
    return min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)


@given(TEXT, TEXT, st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3))
def test_a_text_drawn_in_two_parts_ends_where_it_ends_as_a_whole(before: str, drawn: str, stops: list[str]) -> None:
    whole = first_end(before + drawn, stops)
    if first_end(before, stops) is not None:
        return  # the engine has ended it
    engine = first_end(drawn, stops)  # what it sees of the second part
    found = end_across(before.encode(), drawn.encode(), stops, decode)
    seen = min((end for end in (engine, found) if end is not None), default=None)
    expected = None if whole is None else whole - len(before)
    assert seen == (engine if not before else expected)


@table(
    ("before", "drawn", "count"),
    [
        ("ab", "cd", 1),
        ("xa", "bcd", 2),
        ("abc", "", None),
        ("", "abc", None),
        ("é", "abc", 3),
        ("ab", "xabc", 4),
        ("ab" + "x" * 40, "c", None),
    ],
)
def test_the_edge(before: str, drawn: str, count: int | None) -> None:
    assert end_across(before.encode(), drawn.encode(), ["abc"], decode) == count


@table(
    ("before", "drawn", "count"),
    [("", "xabc", 4), ("x" * 99, "xabcd", 4), ("abc", "xx", None), ("ab", "c" + "x" * 99, 1), ("", "x" * 99 + "abc", 102), ("", "", None)],
)
def test_one_that_the_last_tokens_complete_ends_a_part_that_the_engine_cut_before_it_looked(before: str, drawn: str, count: int) -> None:
    assert end_across(before.encode(), drawn.encode(), ["abc"], decode, ends=()) == count


def test_an_edge_in_the_middle_of_a_character() -> None:
    text = "né!".encode()
    for edge in range(1, len(text)):
        assert end_across(text[:edge], text[edge:], ["é!"], decode) == len(text) - edge


def test_of_no_stops_nothing_is_decoded() -> None:
    def never(tokens: list[int]) -> str:
        raise AssertionError(tokens)

    assert end_across([1, 2], [3], [], never) is None and end_across([1, 2], [3], [""], never) is None
    assert end_across([], [3], ["x"], never) is None


# --- which of a response's text is the model's own, and what of it is scored


@table(
    ("mask", "log_probs", "own"),
    [
        ([1, 1, 1], [-1, 0, -1], [1, 1, 1]),
        ([1, 0, 0, 1], [-1, 0, 0, -1], [1, 0, 0, 1]),  # a tool between turns
        ([0, 0, 0, 0, 0, 0, 1], [-1, -1, 0, 0, 0, 0, -1], [1, 1, 0, 0, 0, 0, 1]),  # a stale turn, a tool, a trained turn
        ([0, 0, 0, 0], [-1, 0, -1, -2], [1, 1, 1, 1]),  # a removed sample with a token that the model was sure of
        ([1, 0, 0, 1], None, [1, 0, 0, 1]),
        ([0, 0], None, [0, 0]),
    ],
)
def test_the_models_own_tokens_by_mask_and_log_probs(mask: list[int], log_probs: list[float] | None, own: list[int]) -> None:
    given = None if log_probs is None else np.array(log_probs, np.float32)
    assert sampled(np.array(mask, np.uint8), given).astype(int).tolist() == own


def test_a_response_of_one_turn_stays_as_it_is() -> None:
    response = np.arange(3)
    assert turns_of(np.ones(3, bool), response, str) == [] == turns_of(np.zeros(3, bool), response, str)  # the latter: nothing is known
    assert scored_text(" as\tit came", [], "own") == scored_text(" as\tit came", [], "last_turn") == " as\tit came"


def test_turns_are_scored_without_what_stands_between_them_and_do_not_grow_together() -> None:
    words = ["\\bo", "[tool says \\boxed{42}]", "xed{41}"]
    turns = turns_of(np.array([True, False, True]), np.arange(3), lambda ids: "".join(words[i] for i in ids))
    assert turns == ["\\bo", "xed{41}"]
    assert scored_text("".join(words), turns, "own") == "\\bo\nxed{41}"
    assert scored_text("".join(words), turns, "last_turn") == "xed{41}"
    assert scored_text("".join(words), turns, "full") == "".join(words)
