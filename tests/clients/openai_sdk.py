"""The package openai: chat completions, and the Responses API for what streams."""

import json

from form import Sum
from openai import OpenAI
from play import AGAIN, ASK, CHAT_TOOL, add, play


def client_of(base_url, api_key):
    # page
    client = OpenAI(base_url=base_url, api_key=api_key)
    # /page
    return client


def chat(base_url, api_key, model):
    client = client_of(base_url, api_key)
    messages = [{"role": "user", "content": ASK["chat"]}]
    # page
    answer = client.chat.completions.create(model=model, messages=messages)
    # /page
    return [answer.choices[0].message.content]


def stream(base_url, api_key, model):
    asked = {"model": model, "messages": [{"role": "user", "content": ASK["stream"]}], "stream": True}
    parts = client_of(base_url, api_key).chat.completions.create(**asked, stream_options={"include_usage": True})
    return ["".join(part.choices[0].delta.content or "" for part in parts if part.choices)]


def loop(base_url, api_key, model, question, **options):
    client, messages, seen = client_of(base_url, api_key), [{"role": "user", "content": question}], []
    while True:
        message = client.chat.completions.create(model=model, messages=messages, tools=[CHAT_TOOL], **options).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        seen += [text for text in (message.content, getattr(message, "reasoning_content", None)) if text]
        if not message.tool_calls:
            return seen
        for call in message.tool_calls:
            result = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        options.pop("tool_choice", None)


def structured(base_url, api_key, model):
    messages = [{"role": "user", "content": ASK["structured"]}]
    answer = client_of(base_url, api_key).chat.completions.parse(model=model, messages=messages, response_format=Sum)
    assert answer.choices[0].message.parsed.sum == 3
    return [answer.choices[0].message.content]


def turns(base_url, api_key, model):
    client, messages, seen = client_of(base_url, api_key), [], []
    for question in (ASK["turns"], AGAIN):
        messages.append({"role": "user", "content": question})
        messages.append(client.chat.completions.create(model=model, messages=messages).choices[0].message.model_dump(exclude_none=True))
        seen.append(messages[-1]["content"])
    return seen


play(
    {
        "chat": chat,
        "stream": stream,
        "tools": lambda *where: loop(*where, ASK["tools"]),
        "parallel": lambda *where: loop(*where, ASK["parallel"]),
        "required": lambda *where: loop(*where, ASK["required"], tool_choice="required"),
        "structured": structured,
        "reasoning": lambda *where: loop(*where, ASK["reasoning"]),
        "turns": turns,
    }
)
