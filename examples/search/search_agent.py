"""An agent that searches: the model asks an index on this machine, reads what is found, and answers in the end.

--agent examples.search.search_agent:run --agent-options '{"corpus": "documents.jsonl"}'

The model searches by calling the tool, or, where its chat template shows none, by writing ``<search>words</search>``.
"""

import json
import re
from typing import Any

from openai import AsyncOpenAI

from examples.search.local_index import index_of

TURNS, RESULTS = 3, 2
"""Defaults of the options ``turns``, the most answers of the model, and ``results``, the most documents of a search."""

RETRIES = 8
"""How often the client repeats a request while a gateway is away, or has no room."""

SEARCH_COSTS = 0.05
"""What a right answer's reward is less for each search."""

LONGEST_QUERY = 200
"""Characters of a query: what a model writes is not trusted."""

_QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
TOOLS: Any = [{"type": "function", "function": {"name": "search", "description": "Finds documents by words.", "parameters": _QUERY}}]


async def run(data: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Has the model search and answer. Returns the reward, whether the answer has the label, and the number of searches."""
    messages, options, searches, text = list(data["messages"]), data["options"], 0, ""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=RETRIES) as client:
        for _ in range(options.get("turns", TURNS)):
            completion = await client.chat.completions.create(model=data["model"], messages=messages, tools=TOOLS)
            answer = completion.choices[0].message
            text = answer.content or ""
            messages.append(answer.model_dump(exclude_none=True))
            found = [
                {"role": "tool", "tool_call_id": call.id, "content": searched(arguments_query(call.function.arguments), options)}
                for call in answer.tool_calls or []
            ]
            if not found and (written := re.search(r"<search>(.*?)</search>", text, re.DOTALL)):
                found = [{"role": "user", "content": searched(written[1], options)}]
            if not found:
                break
            searches += len(found)
            messages += found
    label = str(data["label"]).split()
    right = text.split()[-len(label) :] == label
    return {"reward": right * max(0.0, 1 - SEARCH_COSTS * searches), "right": float(right), "searches": float(searches)}


def arguments_query(arguments: str) -> str:
    """Returns the query in a call's arguments, JSON text; empty where there is none."""
    try:
        given = json.loads(arguments)
    except json.JSONDecodeError:
        return ""
    query = given.get("query") if isinstance(given, dict) else None
    return query if isinstance(query, str) else ""


def searched(query: str, options: dict[str, Any]) -> str:
    """Returns the documents that a query finds, a line each, for the model to read."""
    found = index_of(options["corpus"]).search(query[:LONGEST_QUERY], options.get("results", RESULTS))
    return "\n".join(found or ["nothing was found"]) + "\n"
