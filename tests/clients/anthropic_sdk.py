"""The package anthropic."""

from anthropic import Anthropic
from play import AGAIN, ANSWER, ASK, SCHEMA, add, play

TOOL = {"name": "add", "description": "Adds two numbers.", "input_schema": SCHEMA}


def client_of(base_url, api_key):
    # page
    client = Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    # /page
    return client


def chat(base_url, api_key, model):
    client = client_of(base_url, api_key)
    messages = [{"role": "user", "content": ASK["chat"]}]
    # page
    answer = client.messages.create(model=model, max_tokens=1000, messages=messages)
    # /page
    return [answer.content[0].text]


def stream(base_url, api_key, model):
    asked = {"model": model, "max_tokens": 1000, "messages": [{"role": "user", "content": ASK["stream"]}]}
    with client_of(base_url, api_key).messages.stream(**asked) as parts:
        return ["".join(parts.text_stream)]


def loop(base_url, api_key, model, question, **options):
    client, messages, seen = client_of(base_url, api_key), [{"role": "user", "content": question}], []
    while True:
        answer = client.messages.create(model=model, max_tokens=4000, messages=messages, tools=[TOOL], **options)
        messages.append({"role": "assistant", "content": answer.content})
        seen += [block.text for block in answer.content if block.type == "text"]
        seen += [block.thinking for block in answer.content if block.type == "thinking"]
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return seen
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": str(add(**call.input))} for call in calls]
        messages.append({"role": "user", "content": results})
        options.pop("tool_choice", None)


def structured(base_url, api_key, model):
    asked = {"model": model, "max_tokens": 1000, "messages": [{"role": "user", "content": ASK["structured"]}]}
    form = {"format": {"type": "json_schema", "schema": ANSWER}}
    return [client_of(base_url, api_key).messages.create(**asked, output_config=form).content[0].text]


def turns(base_url, api_key, model):
    client, messages, seen = client_of(base_url, api_key), [], []
    for question in (ASK["turns"], AGAIN):
        messages.append({"role": "user", "content": question})
        answer = client.messages.create(model=model, max_tokens=1000, messages=messages)
        messages.append({"role": "assistant", "content": answer.content})
        seen.append(answer.content[0].text)
    return seen


play(
    {
        "chat": chat,
        "stream": stream,
        "tools": lambda *where: loop(*where, ASK["tools"]),
        "parallel": lambda *where: loop(*where, ASK["parallel"]),
        "required": lambda *where: loop(*where, ASK["required"], tool_choice={"type": "any"}),
        "structured": structured,
        "reasoning": lambda *where: loop(*where, ASK["reasoning"], thinking={"type": "enabled", "budget_tokens": 2000}),
        "turns": turns,
    }
)
