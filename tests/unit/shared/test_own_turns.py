"""Which of a response's text is the model's own, and what of it is scored."""

import numpy as np

from shared.schema.sample import sampled, scored_text, turns_of
from tests.support.tables import table


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
