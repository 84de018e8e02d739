"""The package litellm."""

import json

import litellm
from form import Sum
from play import AGAIN, ASK, CHAT_TOOL, add, play


def completion(where, messages, **options):
    base_url, api_key, model = where
    # page
    answer = litellm.completion(f"openai/{model}", messages, base_url=base_url, api_key=api_key, **options)
    # /page
    return answer


def user(text):
    return {"role": "user", "content": text}


def loop(where, question, **options):
    messages, seen = [user(question)], []
    while True:
        message = completion(where, messages, tools=[CHAT_TOOL], **options).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        seen += [text for text in (message.content, getattr(message, "reasoning_content", None)) if text]
        if not message.tool_calls:
            return seen
        for call in message.tool_calls:
            result = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        options.pop("tool_choice", None)


def turns(*where):
    messages, seen = [], []
    for question in (ASK["turns"], AGAIN):
        messages.append(user(question))
        messages.append(completion(where, messages).choices[0].message.model_dump(exclude_none=True))
        seen.append(messages[-1]["content"])
    return seen


def stream(*where):
    parts = completion(where, [user(ASK["stream"])], stream=True)
    return ["".join(part.choices[0].delta.content or "" for part in parts if part.choices)]


play(
    {
        "chat": lambda *where: [completion(where, [user(ASK["chat"])]).choices[0].message.content],
        "stream": stream,
        "tools": lambda *where: loop(where, ASK["tools"]),
        "parallel": lambda *where: loop(where, ASK["parallel"]),
        "required": lambda *where: loop(where, ASK["required"], tool_choice="required"),
        "structured": lambda *where: [completion(where, [user(ASK["structured"])], response_format=Sum).choices[0].message.content],
        "reasoning": lambda *where: loop(where, ASK["reasoning"]),
        "turns": turns,
    }
)
