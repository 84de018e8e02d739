"""Plays a client's features in its own environment: standard input says where the gateway is, a line of output what each feature showed.

A feature is a function of (base_url, api_key, model) that returns the texts that the client showed, of answers and of reasoning; calls of
`add` are noted beside them. What it asks is `ASK`, by which the scripted model knows what it has to say.
"""

import asyncio
import functools
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

ASK = {
    "chat": "[chat] What is 1 + 2?",
    "stream": "[stream] What is 1 + 2?",
    "tools": "[tools] What is 1 + 2? Use the tool.",
    "parallel": "[parallel] What are 1 + 2 and 3 + 4? Use the tool for both at once.",
    "structured": "[structured] What is 1 + 2? Answer in the form that is asked for.",
    "required": "[required] What is 1 + 2? You have to use the tool.",
    "reasoning": "[reasoning] Think, then use the tool: what is 1 + 2?",
    "turns": "[turns] What is 1 + 2?",
}
SUM = "The sum is 3."
"""The last answer to all of these."""

AGAIN = "[turns] And what is 3 + 4?"
"""The second question of a conversation."""

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds two numbers.", "parameters": SCHEMA}}
ANSWER = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"], "additionalProperties": False}

calls: list[str] = []


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    calls.append(f"add({a}, {b})")
    return a + b


def awaited(feature: Callable[..., Any]) -> Callable[..., Any]:
    """A feature that is a coroutine, as one that can be called."""
    return lambda *where: asyncio.run(feature(*where))


@functools.cache
def asked() -> dict[str, Any]:
    """Returns what standard input says: base_url, model, the directory model_path, and a key for each feature."""
    return json.load(sys.stdin)


def play(features: Mapping[str, Callable[[str, str, str], list[str]]]) -> None:
    """Plays the features that are asked for, one after the other."""
    given = asked()
    for name, key in given["keys"].items():
        if name not in features:
            continue
        calls.clear()
        error = ""
        seen: list[str] = []
        try:
            seen = [str(text) for text in features[name](given["base_url"], key, given["model"])]
        except BaseException as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}"
        print("\n" + json.dumps({"feature": name, "seen": [*seen, *calls], "error": error[:2000]}), flush=True)
