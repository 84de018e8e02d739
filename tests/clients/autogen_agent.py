"""The packages autogen-agentchat and autogen-ext."""

import asyncio

import play
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from play import AGAIN, ASK
from pydantic import BaseModel


class Sum(BaseModel):
    sum: int


def client_of(base_url, api_key, model):
    # page
    info = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}
    client = OpenAIChatCompletionClient(model=model, base_url=base_url, api_key=api_key, model_info=info)
    # /page
    return client


def agent_of(*where, **options):
    client = client_of(*where)
    # page
    agent = AssistantAgent("solver", model_client=client, **options)
    # /page
    return agent


def answered(feature, **options):
    def played(*where):
        messages = asyncio.run(agent_of(*where, **options).run(task=ASK[feature])).messages
        return [message.to_text() for message in messages[1:]]

    return played


def stream(*where):
    async def played():
        parts = client_of(*where).create_stream([UserMessage(content=ASK["stream"], source="user")])
        return ["".join([part async for part in parts if isinstance(part, str)])]

    return asyncio.run(played())


def turns(*where):
    async def played():
        agent = agent_of(*where)
        results = [await agent.run(task=question) for question in (ASK["turns"], AGAIN)]
        return [result.messages[-1].to_text() for result in results]

    return asyncio.run(played())


tools = {"tools": [play.add], "reflect_on_tool_use": True}
play.play(
    {
        "chat": answered("chat"),
        "stream": stream,
        "tools": answered("tools", **tools),
        "parallel": answered("parallel", **tools),
        "structured": answered("structured", output_content_type=Sum),
        "reasoning": answered("reasoning", **tools),
        "turns": turns,
    }
)
