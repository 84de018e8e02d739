"""Turns become trajectories: tokens as they were read and drawn, each sampled one trained once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.schema.sample import Sample
from shared.sessions.session import Trajectory, Turn, trajectories


def turn(request: str, parent: Turn | None, rest: list[int], completion: list[int], version: int = 1, *, breaks: bool = False) -> Turn:
    before = [] if parent is None else parent.tokens.tolist()
    if breaks:
        before = [*before[:-1], 99]
    return Turn(
        request=request,
        parent=None if parent is None else parent.request,
        prompt=np.array([*before, *rest], np.int32),
        completion=np.array(completion, np.int32),
        log_probs=-np.arange(1, len(completion) + 1, dtype=np.float32),
        spans=((0, len(completion), version),) if completion else (),
        finish="stop",
    )


def check(found: Trajectory) -> None:
    """Holds a trajectory to what a sample must be."""
    arrays = {"prompt": found.prompt, "response": found.response, "log_probs": found.log_probs, "mask": found.mask}
    sample = Sample(group="g", index=0, **arrays, segments=found.segments, finish=found.finish, text="")
    sample.check()


def test_turns_that_extend_each_other_are_one_trajectory() -> None:
    first = turn("r1", None, [1, 2], [3, 4], version=1)
    second = turn("r2", first, [5], [6], version=2)
    [found] = trajectories([first, second])
    check(found)
    assert found.tokens.tolist() == [1, 2, 3, 4, 5, 6] and found.prompt.tolist() == [1, 2]
    assert found.mask.tolist() == [1, 1, 0, 1]
    assert found.log_probs.tolist() == [-1, -2, 0, -1]
    assert found.segments == [(0, 3, 1), (3, 4, 2)], "what was read has the version of what was drawn before it"
    assert found.turns == ("r1", "r2") and found.spans == ((0, 2), (3, 4))


def test_a_fork_holds_the_shared_beginning_and_trains_it_not_again() -> None:
    first = turn("r1", None, [1], [2])
    left, right = turn("r2", first, [3], [4]), turn("r3", first, [5], [6])
    further = turn("r4", right, [7], [8])
    one, other = trajectories([first, left, right, further])
    assert one.tokens.tolist() == [1, 2, 3, 4] and one.mask.tolist() == [1, 0, 1]
    assert other.tokens.tolist() == [1, 2, 5, 6, 7, 8] and other.mask.tolist() == [0, 0, 1, 0, 1]
    assert other.log_probs.tolist() == [-1, 0, -1, 0, -1] and other.spans == ((0, 1), (2, 3), (4, 5))
    assert other.sampled.tolist() == [True, False, True, False, True], "the shared beginning is the model's own, too"


def test_a_prompt_that_is_not_its_parents_tokens_begins_anew() -> None:
    first = turn("r1", None, [1], [2])
    second = turn("r2", first, [3], [4], breaks=True)
    assert [found.tokens.tolist() for found in trajectories([first, second])] == [[1, 2], [1, 99, 3, 4]]
    assert [found.mask.tolist() for found in trajectories([first, second])] == [[1], [1]]


def test_turns_without_tokens_are_left_out() -> None:
    first = turn("r1", None, [1], [])
    second = turn("r2", first, [3], [4])
    [found] = trajectories([first, second])
    assert found.tokens.tolist() == [1, 3, 4] and trajectories([]) == []


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.booleans()), min_size=1, max_size=12))
def test_every_sampled_token_is_trained_once(shape: list[tuple[int, int, bool]]) -> None:
    turns: list[Turn] = []
    for index, (parent, length, breaks) in enumerate(shape):
        before = turns[-1 - parent] if parent < len(turns) else None
        tokens = [1000 * (index + 1) + position for position in range(length)]
        turns.append(turn(f"r{index}", before, [7], tokens, version=index, breaks=breaks and before is not None))
    found = trajectories(turns)
    for one in found:
        check(one)
    trained = [int(token) for one in found for token in one.response[one.mask == 1]]
    assert sorted(trained) == sorted(int(token) for one in turns for token in one.completion)
    for one in found:
        last = next(turn for turn in turns if turn.request == one.turns[-1])
        assert one.tokens.tolist() == last.tokens.tolist()
