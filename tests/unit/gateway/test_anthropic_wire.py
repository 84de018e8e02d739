"""Anthropic's own client against the format of messages."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from shared.formats.request import RequestedSampling, TurnRefused, assistant_message, overlong_prompt
from tests.support.wire_server import CALLS, PLAIN, WireServer

ASK: Any = [{"role": "user", "content": "What is 2 + 2?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: Any = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}]
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def connected(served: WireServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="sk-myxo-1-secret") as connected:
        yield connected


@pytest.fixture
def client(server: WireServer, connected: anthropic.AsyncAnthropic) -> anthropic.AsyncAnthropic:
    return connected


async def test_an_answer_with_its_usage_and_the_weights_versions(server, client) -> None:
    message = await client.messages.create(
        model="tiny",
        max_tokens=9,
        system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be right."}],
        messages=ASK,
        stop_sequences=["END"],
        metadata={"user_id": "me"},
        extra_body={"min_version": 3, "temperature": 0.5},
    )
    assert (message.type, message.role, message.stop_reason, message.stop_sequence) == ("message", "assistant", "end_turn", None)
    assert [block.text for block in message.content] == [PLAIN.content]
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens, message.usage.output_tokens) == (3, 2, 3)
    assert message.model_extra["weight_versions"] == {"oldest": 3, "newest": 4}
    [turn] = server.turns
    assert list(turn.messages) == [{"role": "system", "content": "Be brief.\nBe right."}, *ASK]
    assert turn.sampling == RequestedSampling(temperature=0.5, max_tokens=9, stop=("END",))
    assert (turn.min_version, turn.ignored, turn.reasoning) == (3, ("metadata",), False)


async def test_tool_calls_and_thinking_come_back_as_the_message_that_they_were(server, client) -> None:
    server.answers = [CALLS, PLAIN]
    message = await client.messages.create(model="tiny", max_tokens=2048, messages=ASK, tools=TOOLS, thinking=THINKING)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.stop_reason == "tool_use"
    assert [block.input for block in message.content[2:]] == [{"a": 1, "b": "zwölf"}, {}]
    results: Any = [
        {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "13"}], "is_error": True},
        {"type": "tool_result", "tool_use_id": "call_2"},
        {"type": "text", "text": "Go on."},
    ]
    conversation: Any = [*ASK, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    await client.messages.create(model="tiny", max_tokens=2048, messages=conversation, tools=TOOLS, tool_choice={"type": "none"})
    first, second = server.turns
    assert list(first.tools) == [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}]
    assert (first.tool_choice, second.tool_choice) == ("auto", "none")
    assert list(second.messages) == [
        *ASK,
        assistant_message(CALLS),
        {"role": "tool", "tool_call_id": "call_1", "content": "13"},
        {"role": "tool", "tool_call_id": "call_2", "content": ""},
        {"role": "user", "content": "Go on."},
    ]


async def test_thinking_is_told_to_those_alone_who_ask_for_it(server, client) -> None:
    server.answers = [CALLS]
    message = await client.messages.create(model="tiny", max_tokens=9, messages=ASK)
    assert message.content[0].type == "text"
    async with client.messages.stream(model="tiny", max_tokens=9, messages=ASK) as stream:
        assert (await stream.get_final_message()).content[0].type == "text"


async def test_a_calls_integer_of_any_size_is_answered(server, client) -> None:
    server.answers = [replace(CALLS, tool_calls=[replace(CALLS.tool_calls[0], arguments='{"a": 1' + "0" * 30 + "}")])]
    message = await client.messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": "x"}])
    assert message.content[-1].input == {"a": 10**30}


@pytest.mark.parametrize("result", [PLAIN, CALLS, replace(PLAIN, content=""), replace(CALLS, content=""), replace(PLAIN, stop_text="END")])
async def test_a_streamed_message_is_the_whole_one_in_events(server, client, result) -> None:
    server.answers = [result]
    async with client.messages.stream(model="tiny", max_tokens=2048, messages=ASK, tools=TOOLS, thinking=THINKING) as stream:
        raw = [event.type async for event in stream if event.type.startswith(("message_", "content_block_"))]
        streamed = await stream.get_final_message()
    whole = await client.messages.create(model="tiny", max_tokens=2048, messages=ASK, tools=TOOLS, thinking=THINKING)
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert (streamed.id, streamed.usage.input_tokens, streamed.usage.output_tokens) == (whole.id, 3, 3)
    assert (raw[0], raw[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert raw.count("content_block_start") == raw.count("content_block_stop") == len(whole.content)


@pytest.mark.parametrize(
    ("result", "reason"), [(replace(PLAIN, stop_text="END"), "stop_sequence"), (replace(PLAIN, finish="length"), "max_tokens")]
)
async def test_why_it_stopped(server, client, result, reason) -> None:
    server.answers = [result]
    message = await client.messages.create(model="tiny", max_tokens=9, messages=ASK)
    assert (message.stop_reason, message.stop_sequence) == (reason, result.stop_text)


@pytest.mark.parametrize(
    ("refusal", "kind", "name"),
    [
        (overlong_prompt(600, 512), anthropic.BadRequestError, "invalid_request_error"),
        (TurnRefused(401, "no session has this key"), anthropic.AuthenticationError, "authentication_error"),
        (TurnRefused(404, "no such model"), anthropic.NotFoundError, "not_found_error"),
        (TurnRefused(409, "no replica serves version 9"), anthropic.ConflictError, "conflict_error"),
        (TurnRefused(410, "the session has ended"), anthropic.APIStatusError, "invalid_request_error"),
        (TurnRefused(413, "the body has 9 MiB"), anthropic.RequestTooLargeError, "request_too_large"),
        (TurnRefused(429, "64 turns are in hand"), anthropic.RateLimitError, "rate_limit_error"),
        (TurnRefused(503, "no replica serves"), anthropic.InternalServerError, "overloaded_error"),
    ],
    ids=lambda value: str(getattr(value, "status", "")),
)
async def test_a_refusal_is_the_clients_own_exception_and_is_not_tried_again_in_vain(server, client, refusal, kind, name) -> None:
    server.answers = [refusal]
    with pytest.raises(kind) as raised:
        await client.messages.create(model="tiny", max_tokens=9, messages=ASK)
    assert raised.value.status_code == refusal.status
    assert (raised.value.body["error"]["type"], raised.value.body["error"]["message"]) == (name, str(refusal))
    assert len(server.turns) == 1


@pytest.mark.parametrize("status", [409, 429, 503])
async def test_what_may_be_served_later_is_asked_again(server, client, status) -> None:
    server.answers = [TurnRefused(status, "not yet", retry_after_s=0.01), PLAIN]
    assert (await client.messages.create(model="tiny", max_tokens=9, messages=ASK)).content[0].text == PLAIN.content
    assert len(server.turns) == 2


async def test_a_turn_whose_session_ends_is_no_answer(server, client) -> None:
    server.answers = [TurnRefused(410, "the session has ended", code="session_ended")]
    with pytest.raises(anthropic.APIStatusError, match="session has ended"):
        await client.messages.create(model="tiny", max_tokens=9, messages=ASK)
    with pytest.raises(anthropic.APIError, match="session has ended"):
        async with client.messages.stream(model="tiny", max_tokens=9, messages=ASK) as stream:
            await stream.get_final_message()


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"tool_choice": {"type": "any"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "tools": TOOLS}, "tool_choice.disable_parallel_tool_use"),
        ({"extra_body": {"temperature": 1.5}}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"extra_body": {"mcp_servers": []}}, "mcp_servers"),
        ({"extra_body": {"output_config": {"format": {"type": "json_schema", "schema": {}}}}}, "output_config.format"),
        ({"messages": [*ASK, {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            "messages[0].content[0].source.type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "messages"),
    ],
)
async def test_what_is_not_served_is_refused_by_its_field(server, client, more, field) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        await client.messages.create(**{"model": "tiny", "max_tokens": 9, "messages": ASK} | more)
    assert raised.value.body["error"]["message"].startswith(f"{field}: ")
    assert not server.turns


async def test_a_result_stands_in_front_of_what_the_user_says(client) -> None:
    blocks: Any = [{"type": "text", "text": "So?"}, {"type": "tool_result", "tool_use_id": "x"}]
    with pytest.raises(anthropic.BadRequestError, match="tool_result"):
        await client.messages.create(model="tiny", max_tokens=9, messages=[{"role": "user", "content": blocks}])


async def test_tokens_are_counted_without_a_limit(server, client) -> None:
    more = {"top_k": 5, "min_version": 3}
    count = await client.messages.count_tokens(model="tiny", messages=ASK, system="Be brief.", tools=TOOLS, extra_body=more)
    assert server.turns[-1].ignored == ("cache_control", "min_version", "top_k"), "they change nothing of a count"
    assert count.input_tokens == 11
    assert list(server.turns[0].messages) == [{"role": "system", "content": "Be brief."}, *ASK]


async def test_models_tell_the_context_length(client) -> None:
    [model] = (await client.models.list()).data
    assert (model.id, model.type, model.max_input_tokens) == ("tiny", "model", 512)
