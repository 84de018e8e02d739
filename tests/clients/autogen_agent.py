"""The packages autogen-agentchat and autogen-ext."""

import asyncio
import json

import play
from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken
from autogen_core.models import AssistantMessage, FunctionExecutionResult, FunctionExecutionResultMessage, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from form import Sum
from play import AGAIN, ASK, awaited


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


@awaited
async def stream(*where):
    parts = client_of(*where).create_stream([UserMessage(content=ASK["stream"], source="user")])
    return ["".join([part async for part in parts if isinstance(part, str)])]


@awaited
async def required(*where):
    client, tool = client_of(*where), FunctionTool(play.add, "Adds two numbers.")
    messages = [UserMessage(content=ASK["required"], source="user")]
    [call] = (await client.create(messages, tools=[tool], tool_choice="required")).content
    result = str(await tool.run_json(json.loads(call.arguments), CancellationToken()))
    messages.append(AssistantMessage(content=[call], source="solver"))
    results = [FunctionExecutionResult(call_id=call.id, name=call.name, content=result, is_error=False)]
    messages.append(FunctionExecutionResultMessage(content=results))
    return [(await client.create(messages, tools=[tool])).content]


@awaited
async def turns(*where):
    agent = agent_of(*where)
    results = [await agent.run(task=question) for question in (ASK["turns"], AGAIN)]
    return [result.messages[-1].to_text() for result in results]


tools = {"tools": [play.add], "reflect_on_tool_use": True}
play.play(
    {
        "chat": answered("chat"),
        "stream": stream,
        "tools": answered("tools", **tools),
        "parallel": answered("parallel", **tools),
        "required": required,
        "structured": answered("structured", output_content_type=Sum),
        "reasoning": answered("reasoning", **tools),
        "turns": turns,
    }
)
