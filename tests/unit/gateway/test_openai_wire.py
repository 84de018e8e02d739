"""OpenAI's own client against the formats of chat completions and responses."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from shared.formats import openai_chat
from shared.formats.request import MalformedCall, RequestedSampling, TurnRefused, assistant_message, overlong_prompt, unknown_model
from tests.support.wire_server import CALLS, PLAIN, TOKENS, WireServer

ASK: Any = [{"role": "user", "content": "What is 2 + 2?"}]
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS: Any = [{"type": "function", "function": ADD}]
STRICT_TOOLS: Any = [{"type": "function", "function": {**ADD, "strict": True}}]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def connected(served: WireServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="sk-myxo-1-secret") as connected:
        yield connected


@pytest.fixture
def client(server: WireServer, connected: openai.AsyncOpenAI) -> openai.AsyncOpenAI:
    return connected


async def test_an_answer_with_its_usage_its_logprobs_and_the_weights_versions(server, client) -> None:
    completion = await client.chat.completions.create(
        model="tiny",
        messages=ASK,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        stop="END",
        max_completion_tokens=9,
        max_tokens=11,
        logprobs=True,
        top_logprobs=2,
        user="me",
        extra_body={"min_version": 3, "top_k": 5, "return_token_ids": True, "stop_token_ids": [1]},
    )
    [choice] = completion.choices
    assert (choice.message.role, choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
        "assistant",
        PLAIN.content,
        None,
        "stop",
    )
    assert [(one.token, one.logprob, one.bytes) for one in choice.logprobs.content] == [
        ("The ", -0.5, list(b"The ")),
        ("sum\ufffd", -1.25, list(b"sum\xe2\x82")),
        ("é", 0.0, [195, 169]),
    ]
    likeliest = [[(bytes(one.bytes), one.logprob) for one in place.top_logprobs] for place in choice.logprobs.content]
    assert likeliest == [list(place) for place in TOKENS.top] and choice.logprobs.content[1].top_logprobs[0].token == "\ufffd"
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens, completion.usage.total_tokens) == (5, 3, 8)
    assert completion.usage.prompt_tokens_details.cached_tokens == 2
    assert completion.model_extra["weight_versions"] == {"oldest": 3, "newest": 4}
    assert completion.model_extra["prompt_token_ids"] == TOKENS.prompt.tolist()
    assert choice.model_extra["token_ids"] == TOKENS.completion.tolist()
    [turn] = server.turns
    assert turn.sampling == RequestedSampling(temperature=0.5, top_p=0.9, top_k=5, max_tokens=9, seed=7, stop=("END",), stop_token_ids=(1,))
    assert (turn.model, turn.min_version, turn.ignored, list(turn.messages)) == ("tiny", 3, ("user",), ASK)
    assert turn.top_logprobs == 2


async def test_parallel_tool_calls_come_back_as_the_message_that_they_were(server, client) -> None:
    server.answers = [CALLS, PLAIN]
    completion = await client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
    message = completion.choices[0].message
    assert [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls] == [
        (call.id, call.name, call.arguments) for call in CALLS.tool_calls
    ]
    results = [{"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "13"}]} for call in message.tool_calls]
    await client.chat.completions.create(model="tiny", messages=[*ASK, message, *results], tools=TOOLS)
    first, second = server.turns
    assert list(first.tools) == TOOLS
    assert list(second.messages) == [*ASK, assistant_message(CALLS), *({**result, "content": "13"} for result in results)]


async def test_a_streamed_answer_is_the_whole_one_in_pieces(server, client) -> None:
    for result in (PLAIN, CALLS):
        server.answers = [result]
        async with client.chat.completions.stream(
            model="tiny", messages=ASK, tools=STRICT_TOOLS, stream_options={"include_usage": True}, logprobs=True
        ) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_completion()
        whole = await client.chat.completions.create(model="tiny", messages=ASK, logprobs=True)
        assert "chunk" in kinds
        [choice], [expected] = streamed.choices, whole.choices
        assert choice.message.content == expected.message.content
        assert choice.message.model_extra.get("reasoning_content") == expected.message.model_extra.get("reasoning_content")
        calls = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        assert calls == [(call.id, call.name, call.arguments) for call in result.tool_calls]
        assert (choice.finish_reason, streamed.usage) == (expected.finish_reason, whole.usage)
        assert choice.logprobs.content == expected.logprobs.content


async def test_several_answers_are_of_the_versions_of_all_of_them() -> None:
    turn = openai_chat.parse(json.dumps({"model": "m", "messages": ASK, "n": 2}).encode(), "r")
    for versions in ((1, 3), (4, 9), (3, 4)):
        found = openai_chat.answer(turn, PLAIN, replace(PLAIN, versions=versions))["weight_versions"]
        assert found == {"oldest": min(3, versions[0]), "newest": max(4, versions[1])}


async def test_chunks_have_no_usage_where_it_is_not_asked_for(client) -> None:
    stream = await client.chat.completions.create(model="tiny", messages=ASK, stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == PLAIN.content


async def test_a_malformed_call_is_text_with_its_status(server, client) -> None:
    text = '<tool_call>{"name": add}</tool_call>'
    server.answers = [replace(PLAIN, content=text, malformed_calls=[MalformedCall(text=text, status="invalid_json")])]
    message = (await client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)).choices[0].message
    assert (message.content, message.tool_calls) == (text, None)
    assert message.model_extra["malformed_tool_calls"] == [{"text": text, "status": "invalid_json"}]
    await client.chat.completions.create(model="tiny", messages=[*ASK, message, *ASK])
    assert server.turns[-1].messages[1] == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (overlong_prompt(600, 512), openai.BadRequestError),
        (TurnRefused(401, "no session has this key", code="invalid_api_key"), openai.AuthenticationError),
        (unknown_model("gpt-5", "tiny"), openai.NotFoundError),
        (TurnRefused(409, "no replica serves version 9", code="version_behind"), openai.ConflictError),
        (TurnRefused(410, "the session has ended", code="session_ended"), openai.APIStatusError),
        (TurnRefused(413, "the body has 9 MiB"), openai.APIStatusError),
        (TurnRefused(429, "64 turns are in hand"), openai.RateLimitError),
        (TurnRefused(503, "no replica serves"), openai.InternalServerError),
    ],
    ids=lambda value: str(getattr(value, "status", "")),
)
async def test_a_refusal_is_the_clients_own_exception_and_is_not_tried_again_in_vain(server, client, refusal, kind) -> None:
    server.answers = [refusal]
    with pytest.raises(kind) as raised:
        await client.chat.completions.create(model="tiny", messages=ASK)
    error = raised.value
    assert (error.status_code, error.code, error.param) == (refusal.status, refusal.code, refusal.field)
    assert refusal.message in error.body["message"]
    assert len(server.turns) == 1


@pytest.mark.parametrize("status", [409, 429, 503])
async def test_what_may_be_served_later_is_asked_again(server, client, status) -> None:
    server.answers = [TurnRefused(status, "not yet", retry_after_s=0.01), PLAIN]
    completion = await client.chat.completions.create(model="tiny", messages=ASK)
    assert completion.choices[0].message.content == PLAIN.content
    assert len(server.turns) == 2


async def test_a_turn_whose_session_ends_is_no_answer(server, client) -> None:
    server.answers = [TurnRefused(410, "the session has ended", code="session_ended")]
    for create in (
        lambda **more: client.chat.completions.create(model="tiny", messages=ASK, **more),
        lambda **more: client.responses.create(model="tiny", input=ASK, **more),
    ):
        with pytest.raises(openai.APIStatusError) as raised:
            await create()
        assert raised.value.status_code == 410
    with pytest.raises(openai.APIError, match="session has ended"):
        async for _ in await client.chat.completions.create(model="tiny", messages=ASK, stream=True):
            pass
    events = [event async for event in await client.responses.create(model="tiny", input=ASK, stream=True)]
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-1].response.status == "failed"


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"n": 0}, "n", "invalid_value"),
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice", "unsupported_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": TOOLS}, "tool_choice", "invalid_value"),
        ({"parallel_tool_calls": False, "tools": TOOLS}, "parallel_tool_calls", "unsupported_value"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": TOOLS}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "any", "tools": [ADD]}, "tools": TOOLS}, "tool_choice", "invalid_value"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "missing_parameter"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "unsupported_value"),
        ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_value"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias", "unsupported_value"),
        ({"temperature": 3.0}, "temperature", "invalid_value"),
        ({"extra_body": {"min_versoin": 3}}, "min_versoin", "unknown_parameter"),
        ({"extra_body": {"stream_options": {"include_usage": True}}}, "stream_options", "unsupported_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None, "invalid_value"),
        ({"messages": [{"role": "tool", "content": "4", "tool_call_id": "call_9"}]}, "messages", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_parameter"),
    ],
)
async def test_what_is_not_served_is_refused_by_its_field(server, client, more, param, code) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(**{"model": "tiny", "messages": ASK} | more)
    assert raised.value.code == code
    assert raised.value.param == (param or raised.value.param)
    assert not server.turns


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": ["a", "b"], "n": 33}, "n"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [["a"], [1]]}, "prompt[0][0]"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
async def test_what_text_completions_cannot_do_is_refused_by_its_field(server, client, more, param) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await client.completions.create(**{"model": "tiny", "prompt": "x"} | more)
    assert raised.value.param == (param or raised.value.param) and not server.turns


async def test_an_unanswered_call_is_refused(client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    with pytest.raises(openai.BadRequestError, match="call_1"):
        await client.chat.completions.create(model="tiny", messages=[*ASK, {"role": "assistant", "tool_calls": [call]}, *ASK])


# --- responses


async def test_a_response_and_its_items_come_back_as_the_conversation(server, client) -> None:
    server.answers = [CALLS, PLAIN]
    tools: Any = [{"type": "function", "strict": True, **ADD}]
    response = await client.responses.create(
        model="tiny", input="What is 2 + 2?", instructions="Be brief.", tools=tools, max_output_tokens=50, reasoning={"effort": "low"}
    )
    assert (response.status, response.output_text, response.model) == ("completed", CALLS.content, "tiny")
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.input_tokens_details.cached_tokens) == (5, 3, 2)
    assert response.usage.output_tokens_details.reasoning_tokens == 1
    calls = [item for item in response.output if item.type == "function_call"]
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "13"} for call in calls]
    question: Any = [{"role": "user", "content": "What is 2 + 2?"}]
    again = await client.responses.create(
        model="tiny", input=[*question, *response.output, *results], include=["message.output_text.logprobs"], store=False, top_logprobs=2
    )
    logprobs = again.output[0].content[0].logprobs
    assert [one.logprob for one in logprobs] == [-0.5, -1.25, 0.0] and server.turns[1].top_logprobs == 2
    assert [[one.logprob for one in place.top_logprobs] for place in logprobs] == [[number for _, number in place] for place in TOKENS.top]
    first, second = server.turns
    assert list(first.messages) == [{"role": "system", "content": "Be brief."}, *question]
    assert (list(first.tools), first.ignored, first.sampling.max_tokens) == (TOOLS, ("reasoning", "strict"), 50)
    tool_messages = [{"role": "tool", "tool_call_id": call.id, "content": "13"} for call in CALLS.tool_calls]
    assert list(second.messages) == [*question, assistant_message(CALLS), *tool_messages]


@pytest.mark.parametrize("result", [PLAIN, CALLS, replace(PLAIN, content=""), replace(CALLS, content=""), replace(PLAIN, finish="length")])
async def test_a_streamed_response_is_the_whole_one_event_by_event(server, client, result) -> None:
    server.answers = [result]
    events = [event async for event in await client.responses.create(model="tiny", input=ASK, stream=True)]
    whole = await client.responses.create(model="tiny", input=ASK)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == ("response.incomplete" if result.finish == "length" else "response.completed")
    assert events[-1].response == whole
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in whole.output]
    assert [event.output_index for event in events if event.type == "response.output_item.added"] == list(range(len(done)))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == result.content
    arguments = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert arguments == [call.arguments for call in result.tool_calls]
    if result.finish == "length":
        return  # the client accumulates completed responses alone
    async with client.responses.stream(model="tiny", input=ASK) as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_response()).output_text == result.content


async def test_the_answer_tells_which_fields_had_no_effect(client) -> None:
    raw = await client.chat.completions.with_raw_response.create(model="tiny", messages=ASK, user="me", service_tier="auto")
    assert raw.headers["x-myxo-ignored"] == "service_tier, user"


async def test_tools_that_are_no_functions_are_named_and_those_in_namespaces_keep_both_names(server, client) -> None:
    """As Codex gives them."""
    inner = {"type": "function", "strict": False, **ADD}
    tools: Any = [
        {"type": "namespace", "name": "mcp__calc", "description": "Sums.", "tools": [inner]},
        {"type": "custom", "name": "apply_patch"},
    ]
    server.answers = [replace(CALLS, content="", tool_calls=[replace(CALLS.tool_calls[0], name="mcp__calc::add")]), PLAIN]
    raw = await client.responses.with_raw_response.create(model="tiny", input="x", tools=[*tools, {"type": "中文" * 50}], store=False)
    assert raw.headers["x-myxo-ignored"] == f"strict, tools.{'_' * 40}, tools.custom"
    response = raw.parse()
    [call] = [item for item in response.output if item.type == "function_call"]
    assert (call.name, call.namespace) == ("add", "mcp__calc")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    await client.responses.create(model="tiny", input=[{"role": "user", "content": "x"}, *response.output, output], tools=tools)
    first, second = server.turns
    assert [tool["function"]["name"] for tool in first.tools] == ["mcp__calc::add"] and not first.kept and second.kept
    assert second.messages[1]["tool_calls"][0]["function"]["name"] == "mcp__calc::add"


async def test_a_conversation_is_named_by_its_id_or_by_an_object(server, client) -> None:
    for named in ("conv_1", {"id": "conv_1"}):
        response = await client.responses.create(model="tiny", input="And now?", conversation=named)
        assert (response.conversation.id, server.turns[-1].thread) == ("conv_1", "conv_1")
    with pytest.raises(openai.BadRequestError) as raised:
        await client.responses.create(model="tiny", input="And now?", conversation="conv_1", previous_response_id="resp_1")
    assert raised.value.param == "conversation"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"previous_response_id": ""}, "previous_response_id"),
        ({"tools": {"type": "function", **ADD}}, "tools"),
        ({"tools": [{"type": f"kind-{number}"} for number in range(17)]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "calc", "tools": [{"type": "function"}]}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "calc", "tools": [5]}]}, "tools[0]"),
        ({"tools": [{"type": "namespace", "tools": [{"type": "function", **ADD}]}]}, "tools[0].type"),
    ],
)
async def test_what_responses_cannot_do_is_refused_by_its_field(client, more, param) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await client.responses.create(**{"model": "tiny", "input": "x"} | more)
    assert raised.value.param == param


SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
NOTE = f"Answer with nothing but JSON that fits this schema: {json.dumps(SCHEMA)}"


async def test_constraints_that_are_ignored_are_named_and_told_to_the_model(server, client) -> None:
    server.constraints = "ignore"
    chat = client.chat.completions.with_raw_response.create
    named: Any = {"type": "function", "function": {"name": "add"}}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    rows: list[tuple[Any, dict[str, Any], str, str]] = [
        (chat, {"tool_choice": "required", "tools": TOOLS}, "tool_choice", "Answer with a call of a tool."),
        (chat, {"tool_choice": named, "tools": TOOLS}, "tool_choice", "Answer with a call of add."),
        (chat, {"tool_choice": allowed, "tools": TOOLS}, "tool_choice", "Make no calls but of add."),
        (chat, {"parallel_tool_calls": False, "tools": TOOLS}, "parallel_tool_calls", "Make at most one tool call in an answer."),
        (chat, {"response_format": schema}, "response_format", NOTE),
        (chat, {"response_format": {"type": "json_object"}}, "response_format", "Answer with nothing but a JSON object"),
        (
            client.responses.with_raw_response.create,
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, "instructions": "Be brief.", "input": ASK},
            "text.format",
            f"Be brief.\n{NOTE}",
        ),
    ]
    for create, more, field, note in rows:
        raw = await create(**{"model": "tiny"} | ({} if "input" in more else {"messages": ASK}) | more)
        assert raw.headers["x-myxo-ignored"] == field
        turn = server.turns[-1]
        assert (list(turn.messages), turn.constraints) == ([{"role": "system", "content": note}, *ASK], ())
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        await client.chat.completions.create(model="tiny", messages=ASK, parallel_tool_calls=False, **more)
        assert (server.turns[-1].ignored, list(server.turns[-1].messages)) == ((), ASK), "where none are made it says nothing"


# --- the rest


async def test_models_tell_the_context_length(client) -> None:
    [model] = (await client.models.list()).data
    assert (model.id, model.owned_by, model.model_extra["max_model_len"]) == ("tiny", "myxo", 512)


async def test_tokens_in_tokens_out(server) -> None:
    async with httpx.AsyncClient(base_url=server.url) as client:
        body = {
            "model": "tiny",
            "token_ids": TOKENS.prompt.tolist(),
            "sampling_params": {"temperature": 0.7, "stop_token_ids": [2], "logprobs": 1, "skip_special_tokens": False, "max_tokens": 4},
            "cache_salt": "3",
            "priority": 0,
        }
        answer = (await client.post("/inference/v1/generate", json=body)).json()
        assert answer["choices"][0]["token_ids"] == TOKENS.completion.tolist()
        assert answer["choices"][0]["logprobs"]["content"] == [
            {"token": "token_id:7", "logprob": -0.5},
            {"token": "token_id:8", "logprob": -1.25},
            {"token": "token_id:9", "logprob": 0.0},
        ]
        [turn] = server.turns
        assert turn.prompt.tolist() == TOKENS.prompt.tolist()
        assert turn.sampling == RequestedSampling(temperature=0.7, max_tokens=4, stop_token_ids=(2,))
        refused = await client.post("/inference/v1/generate", json=body | {"token_ids": [1, -1]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "token_ids[1]")
