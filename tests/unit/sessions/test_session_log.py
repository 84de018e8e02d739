"""The fold of a session's log: the order of its records settles every race."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.schema.message import Message
from shared.schema.messages import Sampling
from shared.schema.sample import Sample
from shared.sessions.session import (
    Session,
    SessionEnded,
    SessionLog,
    SessionProgress,
    SessionProlonged,
    SessionUnknown,
    ThreadExtended,
    Trajectory,
    Turn,
    TurnBegun,
    TurnEnded,
    TurnExtended,
    TurnRewarded,
    new_key,
    parts_of_key,
    trajectories,
)

SAMPLING = Sampling(temperature=1.0, max_new_tokens=8)


def log() -> SessionLog:
    return SessionLog(
        Session(id="s1", group="g1", rollout=0, attempt=0, key_digest="0" * 64, deadline=100.0, sampling=SAMPLING, evaluation=False)
    )


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def begun(request: str, *rest: int, holder: str = "a", at: float = 0.0, until: float = 10.0, **more: object) -> TurnBegun:
    return TurnBegun(request=request, holder=holder, at=at, until=until, rest=ids(*rest), **more)


def drawn(request: str, start: int, *tokens: int, holder: str = "a", version: int = 1) -> TurnExtended:
    values = np.full(len(tokens), -1.0, np.float32)
    spans = ((0, len(tokens), version),)
    return TurnExtended(request=request, holder=holder, start=start, completion=ids(*tokens), log_probs=values, spans=spans, until=20.0)


def ended(request: str, *tokens: int, holder: str = "a") -> TurnEnded:
    values, spans = np.full(len(tokens), -1.0, np.float32), ((0, len(tokens), 1),)
    return TurnEnded(request=request, holder=holder, completion=ids(*tokens), log_probs=values, spans=spans, finish="stop")


def test_a_turn_is_what_its_records_say() -> None:
    state = log()
    state.apply([begun("r1", 1, 2), ended("r1", 3, 4)])
    state.apply([begun("r2", 9, parent="r1", shared=4), ended("r2", 5)])
    assert list(state.turns) == ["r1", "r2"] and not state.pending and state.length == 5
    assert state.turns["r2"].prompt.tolist() == [1, 2, 3, 4, 9]
    assert state.turns["r2"].tokens.tolist() == [1, 2, 3, 4, 9, 5]


def test_records_survive_the_wire() -> None:
    state = log()
    records = [begun("r1", 1, 2), drawn("r1", 0, 3), ended("r1", 3, 4), SessionEnded(at=1.0, reward={"exact": 1.0}, reason="done")]
    state.apply([Message.decode(record.encode()) for record in records])
    assert state.turns["r1"].log_probs.dtype == np.float32
    assert state.turns["r1"].spans == ((0, 2, 1),)
    assert state.ended is not None and state.ended.reward == {"exact": 1.0}


def test_the_first_end_of_a_turn_counts_and_a_repeated_record_changes_nothing() -> None:
    state = log()
    state.apply([begun("r1", 1), drawn("r1", 0, 3), drawn("r1", 0, 3), drawn("r1", 1, 4)])
    assert state.pending["r1"].completion.tolist() == [3, 4] and state.pending["r1"].spans == ((0, 2, 1),)
    state.apply([ended("r1", 3, 4, 5), ended("r1", 3, 4, 6), begun("r1", 1), drawn("r1", 0, 7)])
    assert state.turns["r1"].completion.tolist() == [3, 4, 5] and not state.pending


def test_messages_of_a_conversation_that_are_written_twice_count_once() -> None:
    state = log()
    written = [ThreadExtended(name="c", messages=text).encode() for text in ("[1]", "[1]")]  # the same words may be said again
    state.apply([Message.decode(record) for record in (written[0], written[0], written[1], written[0])])
    assert list(state.threads["c"][1].values()) == ["[1]", "[1]"]


def test_a_turn_belongs_to_who_began_it_until_its_lease_runs_out() -> None:
    state = log()
    state.apply([begun("r1", 1, holder="a", at=0, until=10), drawn("r1", 0, 3), begun("r1", 8, 8, holder="b", at=15, until=25)])
    assert state.pending["r1"].holder == "a", "what it drew renewed its lease to 20"
    state.apply([ended("r1", 9, holder="b"), begun("r1", 8, 8, holder="b", at=21, until=31)])
    assert state.pending["r1"].holder == "b"
    assert state.pending["r1"].prompt.tolist() == [1] and state.pending["r1"].completion.tolist() == [3], "it continues from there"
    state.apply([drawn("r1", 1, 5, holder="a"), ended("r1", 3, 5, holder="a"), ended("r1", 3, 4, holder="b")])
    assert state.turns["r1"].completion.tolist() == [3, 4]


def test_progress_counts_what_the_turns_holder_records() -> None:
    found = SessionProgress(log().session)
    found.apply([begun("r1", 1, holder="a", at=0, until=10), drawn("r1", 0, 3), begun("r1", 8, 8, holder="b", at=15, until=25)])
    found.apply([drawn("r1", 1, 4, 4, holder="b", version=9), ended("r1", 9, 9, 9, holder="b")])
    assert (found.gateway, found.tokens, found.newest, found.pending, found.turns) == ("a", 1, 1, 1, 0), "b does not hold it"
    found.apply([begun("r1", 8, 8, holder="b", at=21, until=31), ended("r1", 3, 5, 5, holder="a")])
    assert (found.gateway, found.tokens, found.pending) == ("b", 1, 1), "a has lost it"
    found.apply([drawn("r1", 1, 5, holder="b"), ended("r1", 3, 5, 6, holder="b"), begun("r1", 1, holder="a", at=99)])
    assert (found.gateway, found.tokens, found.context, found.pending, found.turns) == ("b", 3, 4, 0, 1)


def test_a_deadline_is_only_put_off() -> None:
    found = log()
    first = found.session.deadline
    found.apply([SessionProlonged(deadline=first + 20), SessionProlonged(deadline=first + 10)])
    assert found.deadline == first + 20


def test_nothing_counts_after_the_end_and_the_first_end_counts() -> None:
    state = log()
    state.apply([TurnRewarded(request="r0", reward=0.5), TurnRewarded(request="r0", reward=0.7)])
    state.apply([begun("r1", 1), SessionEnded(at=1.0, reward=1.0), ended("r1", 3), begun("r2", 1), SessionEnded(at=2.0, reward=0.0)])
    state.apply([TurnRewarded(request="r1", reward=0.5)])
    assert state.rewards == {"r0": 0.5}
    assert not state.turns and state.ended is not None and state.ended.reward == 1.0


def test_of_several_turns_a_prompt_extends_the_longest() -> None:
    state = log()
    state.apply([begun("r1", 1), ended("r1", 2), begun("r2", 3, parent="r1", shared=2), ended("r2", 4)])
    state.apply([begun("r3", 1), ended("r3", 5)])
    wanted = {"r2": (1, 2, 3, 4, 7), "r1": (1, 2, 3, 9), "r3": (1, 5), None: (1, 6)}
    for request, prompt in wanted.items():
        found = state.extended(ids(*prompt))
        assert (None if found is None else found.request) == request


def test_a_key_opens_its_session_alone() -> None:
    key, digest = new_key("g1.0.0-x")
    session, secret = parts_of_key(key)
    assert session == "g1.0.0-x" and key not in digest and secret not in digest
    opened = log().session.model_copy(update={"key_digest": digest})
    assert opened.opened_by(secret)
    other, _ = new_key("g1.0.0-x")
    assert not opened.opened_by(parts_of_key(other)[1]) and not opened.opened_by("") and not opened.opened_by("ü")
    for wrong in ("", "sk-myxo-", "sk-myxo--x", "sk-myxo-a", "sk-other-a-b", "sk-myxo-é-b"):
        with pytest.raises(SessionUnknown):
            parts_of_key(wrong)


# --- turns become trajectories: tokens as they were read and drawn, each sampled one trained once


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
