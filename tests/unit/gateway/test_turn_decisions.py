"""How a turn is drawn, which turn a conversation goes on from, and by which id a request is known."""

import json
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import numpy as np
import pytest

from services.gateway.chat_tokens import ParsedCall
from services.gateway.routes import Api, request_id
from services.gateway.turn_decisions import (
    StopStringTracker,
    _called,
    check_tokens,
    continued,
    digests,
    fixed_by_task,
    recalled,
    thought_digest,
    turn_sampling,
    turn_seed,
    unconstrained,
)
from services.gateway.turns import UnrecordedSessions
from shared.formats import anthropic_messages
from shared.formats.request import ChatTurn, RequestedSampling, TokenTurn, TurnRefused, chat_call, json_constraint
from shared.formats.request_body import LONGEST_ID
from shared.schema.message import MAX_SAMPLES
from shared.schema.messages import Sampling
from shared.sessions.session import Session, SessionEnded, SessionLog, SessionOver, Turn, TurnBegun, TurnEnded, TurnGeneration
from shared.sessions.session_store import SessionStore

TASK = Sampling(temperature=0.8, top_p=0.9, max_new_tokens=100, stop=["END"], stop_token_ids=[7])


def session(**changes: object) -> Session:
    fields = {"id": "s1", "group": "g", "rollout": 0, "attempt": 0, "key_digest": "0" * 64, "deadline": 9.0, "sampling": TASK}
    return Session(**{**fields, **changes})


def test_what_is_trained_is_drawn_as_the_task_says_and_an_evaluation_as_its_client_does() -> None:
    asked = RequestedSampling(temperature=0.0, top_p=0.9, max_tokens=10, stop=("X",), seed=5)
    drawn, kept = turn_sampling(session(), asked, 20, 512, [1]), fixed_by_task(session(), asked)
    assert (drawn.temperature, drawn.top_p, drawn.max_new_tokens) == (0.8, 0.9, 10)
    assert drawn.stop == ["END", "X"] and drawn.stop_token_ids == [7, 1] and kept == ("temperature", "seed")
    evaluated = session(evaluation=True)
    assert turn_sampling(evaluated, asked, 20, 512, [1]).temperature == 0.0 and fixed_by_task(evaluated, asked) == ("seed",)


def test_each_request_for_one_prompt_has_its_own_seed_and_an_evaluation_its_clients() -> None:
    log, evaluated, own = SessionLog(session(seed=7)), SessionLog(session(seed=7, evaluation=True)), RequestedSampling(seed=5)
    seeds = {}
    for name, choice, length in (("r1", 0, 2), ("r1n1", 1, 2), ("r2", 0, 2), ("r3", 0, 3), ("r4", 0, 2)):
        for one in (log, evaluated):
            one.apply([TurnBegun(request=name, holder="a", at=0.0, until=1.0, rest=np.arange(length))])
        asked = TokenTurn(request_id=name, model=None, prompt=np.arange(length), choice=choice)
        seeds[name] = (turn_seed(log, asked) or 0) - 7, turn_seed(evaluated, replace(asked, sampling=own))
        if name == "r2":
            ended = {"completion": np.arange(1), "log_probs": np.zeros(1, np.float32), "spans": ((0, 1, 0),), "finish": "stop"}
            log.apply([TurnEnded(request=name, holder="a", **ended)])
    assert {name: drawn // MAX_SAMPLES for name, (drawn, _) in seeds.items()} == {"r1": 0, "r1n1": 1, "r2": 2, "r3": 0, "r4": 3}
    assert [given for _, given in seeds.values()] == [5, 5 + MAX_SAMPLES, 5, 5, 5] and not fixed_by_task(evaluated.session, own)
    assert turn_seed(SessionLog(session(evaluation=True)), asked) is None, "engines without seeds"


def test_a_turn_that_an_engine_cut_on_its_end_token_has_ended() -> None:
    for finish, last, expected in (("abort", 7, "stop"), ("length", 7, "stop"), ("abort", 8, "abort"), ("length", 8, "length")):
        tokens: dict[str, Any] = {"completion": np.array([5, last]), "log_probs": np.zeros(2, np.float32), "spans": ((0, 2, 0),)}
        found = StopStringTracker(np.empty(0, np.int32), TASK, str).whole(TurnGeneration(**tokens, finish=finish))
        assert (found.finish, found.completion.tolist()) == (expected, [5, last])
        stops = TASK.model_copy(update={"stop": ["END"], "stop_token_ids": []})
        tracker = StopStringTracker(np.empty(0, np.int32), stops, lambda tokens: "".join("EN" if one == 5 else "D" for one in tokens))
        assert tracker.whole(TurnGeneration(**tokens, finish=finish)).finish == "stop"


def test_a_turn_is_no_longer_than_the_task_and_the_context_let_it() -> None:
    assert turn_sampling(session(), RequestedSampling(max_tokens=5000), 20, 512, []).max_new_tokens == 100
    assert turn_sampling(session(), RequestedSampling(), 500, 512, []).max_new_tokens == 12
    longer = session(sampling=TASK.model_copy(update={"min_new_tokens": 50}))
    assert turn_sampling(longer, RequestedSampling(), 500, 512, []).min_new_tokens == 12
    with pytest.raises(TurnRefused, match="prompt is too long: 512 tokens > 511 maximum, by the model's maximum context length") as refused:
        turn_sampling(session(), RequestedSampling(), 512, 512, [])
    assert refused.value.status == 400
    with pytest.raises(TurnRefused, match="prompt: expected a prompt of at least one token"):
        turn_sampling(session(), RequestedSampling(), 0, 512, [], "prompt")
    with pytest.raises(TurnRefused, match="token id 100 is not in"):
        check_tokens(100, 100, "token_ids")


def test_a_session_that_has_ended_asks_frozen_models_for_nothing_more() -> None:
    log = SessionLog(session(), ended=SessionEnded(at=1.0))
    assert UnrecordedSessions.log_for(log).ended == log.ended and UnrecordedSessions.log_for(SessionLog(session())).ended is None
    of_policy = {"kept": 8, "variables": {"enable_thinking": False}, "min_version": 3, "seed": 4}
    assert UnrecordedSessions.log_for(SessionLog(session(**of_policy))).session == UnrecordedSessions.log_for(SessionLog(session())).session


def test_of_no_calls_there_is_none_too_many() -> None:
    """A turn that makes none would have an empty grammar."""
    choice = {"type": "none", "disable_parallel_tool_use": True}
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    body = {"model": "m", "max_tokens": 9, "messages": ASKED, "tools": tools, "tool_choice": choice}
    assert anthropic_messages.parse(json.dumps(body).encode(), "r").constraints == ()


async def test_a_frozen_models_turn_is_over_with_its_session() -> None:
    sessions = UnrecordedSessions(None, "run")  # type: ignore[arg-type]
    log, other = (UnrecordedSessions.log_for(SessionLog(session(id=name))) for name in ("s1", "s2"))
    begun = TurnBegun(request="r1", holder="a", at=0.0, until=1.0, rest=np.arange(2))
    await sessions.begin(log, begun)
    with patch.object(SessionStore, "ended", AsyncMock(return_value={"s1"})):
        await sessions.refresh_all([log, other])
    assert log.ended is not None and other.ended is None
    assert (await sessions.begin(log, begun)).prompt.tolist() == [0, 1]  # it is let go of
    with pytest.raises(SessionOver):
        await sessions.begin(log, TurnBegun(request="r2", holder="a", at=0.0, until=1.0, rest=np.arange(2)))


ASKED = [{"role": "user", "content": "2+2?"}]
CALLS = {"role": "assistant", "content": "", "tool_calls": [chat_call("c1", "add", '{"a": 2, "b": 2}')]}


def turn(name: str, conversation: str) -> Turn:
    return Turn(name, None, np.arange(3), np.arange(2), np.zeros(2), ((0, 2, 0),), "stop", conversation)


def goes_on(turns: list[Turn], messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Any:
    return continued(turns, messages, tools)


def test_a_conversation_goes_on_from_the_longest_turn_that_it_begins_with() -> None:
    first = turn("r1", digests([*ASKED, CALLS], [])[-1])
    result = {"role": "tool", "tool_call_id": "c1", "content": "4"}
    answered = {"role": "assistant", "content": "4."}
    second = turn("r2", digests([*ASKED, CALLS, result, answered], [])[-1])
    further = {"role": "user", "content": "thanks"}
    assert goes_on([first, second], [*ASKED, CALLS, result, answered, further], []) == (second, [further])
    assert goes_on([first, second], [*ASKED, CALLS, result], []) == (first, [result])
    changed = {**answered, "content": "5."}
    assert goes_on([first, second], [*ASKED, CALLS, result, changed, further], []) == (first, [result, changed, further])
    assert goes_on([first, second], ASKED, []) is None
    assert goes_on([first, second], [*ASKED, CALLS], []) is None, "nothing is new"
    assert goes_on([first], [*ASKED, CALLS, result], [{"type": "function"}]) is None, "other tools make another prompt"


def test_of_turns_that_say_the_same_the_one_goes_on_whose_reasoning_comes_back() -> None:
    known = digests([*ASKED, CALLS], [])[-1]
    turns = [replace(turn(name, known), thought=thought_digest(f"by {name}")) for name in ("r1", "r2", "r3")]
    result = {"role": "tool", "tool_call_id": "c1", "content": "4"}
    for thought, name in (("by r2", "r2"), (" by r1\n", "r1"), ("", "r3"), ("somebody's", None)):
        found = goes_on(turns, [*ASKED, {**CALLS, "reasoning_content": thought}, result], [])
        assert (found and found[0].request) == name
    answered = [{"role": "assistant", "content": "4."}, {"role": "user", "content": "thanks"}]
    later = turn("r4", digests([*ASKED, CALLS, result, answered[0]], [])[-1])
    edited = [*ASKED, {**CALLS, "reasoning_content": "edited"}, result, *answered]
    assert goes_on([*turns, later], edited, []) is None, "later turns followed what was thought"
    assert goes_on([*turns, later], [*ASKED, CALLS, result, *answered], []) == (later, answered[1:])


def test_a_stored_response_is_the_beginning_of_what_continues_it() -> None:
    said = [{"role": "assistant", "content": "4"}, {"role": "assistant", "content": "6"}]
    first = replace(turn("r1", ""), messages=json.dumps([*ASKED, said[0]]))
    second = replace(turn("r2", ""), after="r1", messages=json.dumps([*ASKED, said[1]]))
    head, new = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "thanks"}
    asked = ChatTurn(request_id="r3", model=None, messages=[head, new], head=1, kept=[new], previous="r2", place="input")
    turns = {"r1": first, "r2": second, "r0": turn("r0", "")}
    log = SessionLog(session(), turns=turns)
    found = recalled(log, asked)
    assert (found.messages, found.kept) == ([head, *(history := [*ASKED, said[0], *ASKED, said[1], new])], history)
    for name in ("r9", "r0"):
        with pytest.raises(TurnRefused, match="previous_response_id: no response .* is stored") as refused:
            recalled(log, replace(asked, previous=name))
        assert refused.value.status == 404
    result = {"role": "tool", "tool_call_id": "c9", "content": "4"}
    with pytest.raises(TurnRefused, match="follows no call"):
        recalled(log, replace(asked, messages=[result], head=0))
    log.threads["c"] = "r2", {"i1": json.dumps([further := {"role": "user", "content": "by the way"}])}
    named = recalled(log, replace(asked, previous="", thread="c"))
    assert (named.messages, named.kept) == ([head, *history[:-1], further, new], [*history[:-1], further, new])
    repeated = replace(asked, request_id="r2", previous="", thread="c")
    assert recalled(log, repeated) is repeated, "its own answer is no part of what it asked"


def test_a_message_is_the_same_without_its_reasoning_and_with_arguments_written_anew() -> None:
    thought = {**CALLS, "reasoning_content": "two and two"}
    anew = {**CALLS, "tool_calls": [chat_call("c9", "add", json.dumps({"b": 2, "a": 2}))]}
    broken = {**CALLS, "tool_calls": [chat_call("c1", "add", '{"a": 2')]}
    drawn = {**CALLS, "tool_calls": [chat_call("c1", "add", '{"a": 2.0, "b": 2e0}')]}  # JavaScript writes it as `anew`
    half = {**CALLS, "tool_calls": [chat_call("c1", "add", '{"a": 2.5, "b": 1e999}')]}
    given = {"thought": thought, "anew": anew, "broken": broken, "drawn": drawn, "half": half}
    found = {name: digests([*ASKED, message], [])[-1] for name, message in given.items()}
    deep = {**CALLS, "tool_calls": [chat_call("c1", "add", '{"a":' * 5000 + "1" + "}" * 5000)]}
    assert digests([deep], []), "what cannot be read is text"
    assert found["thought"] == found["anew"] == found["drawn"] == digests([*ASKED, CALLS], [])[-1] != found["broken"]
    assert found["half"] not in (found["drawn"], found["broken"])


def test_the_calls_of_an_answer_have_ids_that_may_come_back() -> None:
    """Some models write their calls' ids."""
    calls = [ParsedCall("", "ok", "add", None, name) for name in ("functions.add:0", "functions.add:0", None, "", "x" * 300)]
    ids = [call.id for call in _called(calls, "resp_1")]
    assert ids[0] == "functions.add:0" and len(set(ids)) == 5 and all(1 <= len(one) <= LONGEST_ID for one in ids)


def test_a_request_is_known_by_its_name_or_as_a_repetition() -> None:
    log, body = SessionLog(session()), b'{"messages": []}'
    named = request_id(log, "chatcmpl-", "/v1", {"idempotency-key": "x"}, body)
    assert named == request_id(log, "chatcmpl-", "/v1", {"idempotency-key": "x"}, body)
    assert named != request_id(log, "chatcmpl-", "/v1", {"idempotency-key": "x"}, b"another"), "what was asked otherwise is answered anew"
    assert named != request_id(SessionLog(session(id="s2")), "chatcmpl-", "/v1", {"idempotency-key": "x"}, body)
    first, second = (request_id(log, "chatcmpl-", "/v1", {"x-stainless-retry-count": "0"}, body) for _ in range(2))
    assert first != second and first.startswith("chatcmpl-"), "two that are alike are two"
    repeated = {"x-stainless-retry-count": "1"}
    assert request_id(log, "chatcmpl-", "/v1", repeated, body) not in (first, second), "the first attempt never arrived"
    begun = TurnBegun(request=first, holder="a", at=0.0, until=1.0, rest=np.arange(2))
    ended = {"completion": np.arange(1), "log_probs": np.zeros(1, np.float32), "spans": ((0, 1, 0),), "finish": "stop"}
    log.apply([begun])
    assert request_id(log, "chatcmpl-", "/v1", repeated, body) == first
    log.apply([TurnEnded(request=first, holder="a", **ended)])
    assert request_id(log, "chatcmpl-", "/v1", repeated, body) == first
    assert request_id(log, "chatcmpl-", "/v1", repeated, b"{}") != first
    log.apply([TurnBegun(request=second, holder="a", at=0.0, until=1.0, rest=np.arange(2))])
    assert request_id(log, "chatcmpl-", "/v1", repeated, body) not in (first, second), "of several that are alike none is known to be meant"


def test_constraints_are_enforced_in_evaluations_alone() -> None:
    asked = ChatTurn(request_id="r", model=None, messages=ASKED, constraints=(json_constraint("response_format", None),))
    assert unconstrained(asked, "enforce", evaluation=True, notes=True) is asked
    with pytest.raises(TurnRefused, match="response_format: .*evaluations alone"):
        unconstrained(asked, "enforce", evaluation=False, notes=True)
    silent = unconstrained(asked, "ignore", evaluation=True, notes=False)
    assert (silent.messages, silent.ignored) == (ASKED, ("response_format",)), "a template without system messages is given no note"


# --- which sessions may end without a reward


@pytest.mark.parametrize(("environment", "taken"), [("given", False), ("math", True), ("", True)])
async def test_a_reward_is_left_out_where_something_else_scores_the_session(environment: str, taken: bool) -> None:
    sampling = Sampling(temperature=1.0, max_new_tokens=8)
    fields: dict[str, Any] = {"group": "g1", "rollout": 0, "attempt": 0, "key_digest": "0" * 64, "deadline": 100.0}
    log, ended = SessionLog(Session(id="s1", sampling=sampling, environment=environment, **fields)), Mock(ended=SessionEnded(at=1.0))
    parts = dict.fromkeys(("turns", "replicas", "metrics"), Mock())
    api = Api(Mock(end=AsyncMock(return_value=ended)), **parts, model="m", names=frozenset(), most=1)
    if taken:
        assert json.loads((await api._end(Mock(), log, b"{}")).body)["reward"] is None
        return
    with pytest.raises(TurnRefused, match="nothing else scores this session") as caught:
        await api._end(Mock(), log, b"{}")
    assert (caught.value.status, caught.value.field) == (400, "reward")
