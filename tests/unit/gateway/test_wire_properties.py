"""Whatever comes in is a turn or a refusal, and whatever goes out is read by the clients' own models as it was meant."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import openai.types.responses as responses
import pytest
from anthropic.types import Message
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from services.gateway.routes import CHAT_FORMATS
from shared.formats import anthropic_messages, openai_chat, openai_responses, token_generate
from shared.formats.request import (
    CalledTool,
    ChatTurn,
    MalformedCall,
    TurnRefused,
    TurnResult,
    TurnTokens,
    TurnUsage,
    assistant_message,
    started,
)
from tests.support.tables import table
from tests.support.wire_server import whole_turn

WORDS = st.sampled_from(
    re.findall(
        r"\w+",
        """
    assistant arguments auto call_id content developer file function function_call function_call_output id image_url include_usage
    input input_schema input_text instructions logprobs max_completion_tokens max_output_tokens max_tokens message messages
    min_version model n name none output output_text parameters reasoning reasoning_content reasoning_text role sampling_params seed
    stop stop_sequences stop_token_ids stream stream_options system temperature text thinking token_ids tool tool_call_id tool_calls
    tool_choice tool_result tool_use tool_use_id tools top_p type user
    """,
    )
)
SCALARS = st.none() | st.booleans() | st.integers(-3, 5) | st.integers() | st.floats(allow_nan=False) | WORDS | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS, lambda values: st.lists(values, max_size=4) | st.dictionaries(WORDS | st.text(max_size=3), values, max_size=5), max_leaves=20
)

GOOD: dict[Any, dict[str, Any]] = {
    openai_chat.parse: {
        "model": "m",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "b"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    openai_responses.parse: {
        "model": "m",
        "input": [
            {"role": "user", "content": "a"},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "b"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
    },
    anthropic_messages.parse: {
        "model": "m",
        "max_tokens": 5,
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "b"}, {"type": "text", "text": "c"}]},
        ],
        "tools": [{"name": "f", "input_schema": {}}],
        "system": "s",
    },
    token_generate.parse: {"model": "m", "token_ids": [1, 2], "sampling_params": {"temperature": 1.0, "stop": ["x"]}},
}
GOOD[openai_chat.parse_completion] = {"model": "m", "prompt": "a", "stop": ["x"], "logprobs": 1}
GOOD[anthropic_messages.parse_count] = {key: value for key, value in GOOD[anthropic_messages.parse].items() if key != "max_tokens"}
PARSERS = list(GOOD)


def test_the_good_bodies_are_turns() -> None:
    for parse, body in GOOD.items():
        assert parse(json.dumps(body).encode(), "id").model == "m"


@pytest.mark.parametrize("parse", PARSERS, ids=lambda parse: parse.__module__)
@given(body=st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_refused_as_a_request(parse, body) -> None:
    try:
        parse(body, "id")
    except TurnRefused as error:
        assert error.status == 400
        assert json.loads(json.dumps(error.body("openai")))["error"]["message"]


def _nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@table("depth", [10, 200, 2000])
@table("parse", PARSERS[:3])
def test_what_is_nested_too_deep_is_refused(parse, depth) -> None:
    body = json.dumps(GOOD[parse])
    for empty in ('"parameters": {}', '"input_schema": {}', '"input": {}'):
        body = body.replace(empty, empty[:-2] + _nested(depth))
    if depth == 10:
        assert parse(body.encode(), "id").tools
        return
    with pytest.raises(TurnRefused):
        parse(body.encode(), "id")


@table(
    ("given", "text"),
    [(None, "{}"), ("", ""), ('{"a": 1', '{"a": 1'), ("null", "null"), ({"a": "é"}, '{"a": "é"}'), ([1], "[1]"), (7, "7")],
)
@table("parse", PARSERS[:3])
def test_whatever_arguments_a_call_had_may_be_sent_back(parse, given, text) -> None:
    body = json.dumps(GOOD[parse])
    for empty in ('"arguments": "{}"', '"input": {}'):
        body = body.replace(empty, f"{empty.partition(':')[0]}: {json.dumps(given)}")
    [[call]] = [message["tool_calls"] for message in parse(body.encode(), "id").messages if "tool_calls" in message]
    assert call["function"]["arguments"] == text


@pytest.mark.parametrize("parse", PARSERS, ids=lambda parse: parse.__module__)
@given(data=st.data())
def test_a_good_body_with_anything_anywhere_is_a_turn_or_a_refusal(parse, data) -> None:
    body = json.loads(json.dumps(GOOD[parse]))
    for _ in range(data.draw(st.integers(1, 3))):
        _mutate(body, data)
    try:
        turn = parse(json.dumps(body).encode(), "id")
    except TurnRefused as error:
        assert error.status == 400
        return
    if isinstance(turn, ChatTurn):
        for message in turn.messages:
            assert message["role"] in ("system", "user", "assistant", "tool")
            assert isinstance(message["content"], str)


def _mutate(node: Any, data: st.DataObject) -> None:
    """Puts an arbitrary value, or takes one away, somewhere in a body."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys)) if keys else None
        if key is not None and isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
            node = node[key]
            continue
        if key is not None and data.draw(st.integers(0, 3)) == 0:
            del node[key]
        elif isinstance(node, dict):
            node[data.draw(WORDS) if key is None or data.draw(st.booleans()) else key] = data.draw(VALUES)
        elif key is None:
            node.append(data.draw(VALUES))
        else:
            node[key] = data.draw(VALUES)
        return


TEXTS = st.text(max_size=8)
JSON_SCALARS = SCALARS.filter(lambda value: value not in (float("inf"), float("-inf")))
ARGUMENTS = st.dictionaries(TEXTS, JSON_SCALARS | st.lists(JSON_SCALARS, max_size=2), max_size=3).map(json.dumps)


@st.composite
def results(draw: st.DrawFn) -> TurnResult:
    drawn = draw(st.lists(st.tuples(st.integers(0, 9), st.floats(-50, 0, width=32), TEXTS), max_size=4))
    names = draw(st.lists(TEXTS, max_size=3))
    return TurnResult(
        request_id=draw(st.uuids()).hex,
        model="m",
        created=draw(st.integers(0, 1 << 31)),
        content=draw(TEXTS),
        finish=draw(st.sampled_from(["stop", "length", "tool_calls"])),
        usage=TurnUsage(prompt=draw(st.integers(5, 9)), completion=len(drawn), cached=draw(st.integers(0, 5))),
        versions=(0, 1),
        reasoning=draw(TEXTS),
        tool_calls=[CalledTool(id=f"call_{number}", name=name, arguments=draw(ARGUMENTS)) for number, name in enumerate(names)],
        malformed_calls=[MalformedCall(text=text, status="invalid_json") for text in draw(st.lists(TEXTS, max_size=1))],
        stop_text=draw(st.none() | TEXTS),
        tokens=TurnTokens(
            prompt=np.arange(3, dtype=np.int32),
            completion=np.asarray([token for token, _, _ in drawn], np.int32),
            logprobs=np.asarray([logprob for _, logprob, _ in drawn], np.float32),
            texts=[text.encode(errors="replace") for _, _, text in drawn],
            top=[[(text.encode(errors="replace"), logprob)] * draw(st.integers(0, 2)) for _, logprob, text in drawn],
        ),
    )


TURN = ChatTurn(request_id="id", model="m", messages=[{"role": "user", "content": "a"}], logprobs=True, token_ids=True, stream=True)
MODELS = {"/v1/chat/completions": ChatCompletion, "/v1/responses": responses.Response, "/v1/messages": Message}


@pytest.mark.parametrize("path", list(MODELS))
@given(result=results())
def test_an_answer_is_read_by_the_clients_model_and_sent_back_as_it_was(path, result) -> None:
    answer = json.loads(json.dumps(CHAT_FORMATS[path].answer(TURN, result)))
    read = MODELS[path].model_validate(answer)
    assert read.model_dump(mode="json", exclude_unset=True) == answer
    assert _sent_back(path, read) == assistant_message(result) or path == "/v1/messages"
    if path == "/v1/messages":
        assert _with_read_arguments(_sent_back(path, read)) == _with_read_arguments(assistant_message(result))


def _sent_back(path: str, read: Any) -> Any:
    """Returns the message that a client's next request has for an answer, without results of its calls."""
    wire, results_of = CHAT_FORMATS[path], list[Any]()
    if path == "/v1/chat/completions":
        message = read.choices[0].message
        results_of = [{"role": "tool", "tool_call_id": call.id, "content": ""} for call in message.tool_calls or ()]
        body = {"model": "m", "messages": [message.to_dict(), *results_of]}
    elif path == "/v1/responses":
        calls = [item for item in read.output if item.type == "function_call"]
        results_of = [{"type": "function_call_output", "call_id": call.call_id, "output": ""} for call in calls]
        body = {"model": "m", "input": [*(item.to_dict() for item in read.output), *results_of]}
    else:
        calls = [block for block in read.content if block.type == "tool_use"]
        blocks = [{"type": "tool_result", "tool_use_id": call.id} for call in calls] or [{"type": "text", "text": "go on"}]
        turns = [{"role": "assistant", "content": [block.to_dict() for block in read.content]}, {"role": "user", "content": blocks}]
        body = {"model": "m", "max_tokens": 1, "messages": turns}
    return wire.parse(json.dumps(body).encode(), "id").messages[0]


def _with_read_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call["function"], "arguments": json.loads(call["function"]["arguments"])} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize("path", list(MODELS))
@given(result=results())
def test_events_hold_the_whole_answer_whatever_it_is(path, result) -> None:
    wire = CHAT_FORMATS[path]
    whole = wire.answer(TURN, result)
    events = b"".join(whole_turn(wire.events(TURN, started(result)), result))
    data = [json.loads(line[6:]) for line in events.split(b"\n") if line.startswith(b"data: {")]
    assert all(line.startswith((b"data: ", b"event: ")) or not line for line in events.split(b"\n"))
    if path == "/v1/responses":
        assert data[-1]["response"] == json.loads(json.dumps(whole))
        return
    texts = [event["delta"].get("text", "") for event in data if event.get("type") == "content_block_delta"]
    texts += [event["choices"][0]["delta"].get("content") or "" for event in data if event.get("choices")]
    assert "".join(texts) == result.content


def test_the_docs_name_what_has_no_effect() -> None:
    page = (Path(__file__).parents[3] / "docs" / "wire-formats.md").read_text()
    rows = dict(re.findall(r"^\| (chat completions|text completions|responses|messages|tokens) \| (`[^|]*`) \|$", page, re.MULTILINE))
    bodies = {
        "chat completions": openai_chat._ChatBody,
        "responses": openai_responses._ResponseBody,
        "messages": anthropic_messages._MessageBody,
        "tokens": token_generate._GenerateBody,
        "text completions": openai_chat._CompletionBody,
    }
    assert {name: set(re.findall(r"`(\w+)`", row)) for name, row in rows.items()} == {
        name: set(body.WITHOUT_EFFECT) for name, body in bodies.items()
    }
