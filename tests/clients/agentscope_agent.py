"""The package agentscope."""

import asyncio

import play
from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, ToolChoice, Toolkit
from form import Sum
from play import AGAIN, ASK, awaited


def agent_of(base_url, api_key, model, **options):
    # page
    llm = OpenAIChatModel(OpenAICredential(base_url=base_url, api_key=api_key), model, stream=False)
    agent = Agent("solver", "Solve it.", llm, **options)
    # /page
    return agent


def toolkit():
    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")
    return Toolkit([FunctionTool(play.add, is_read_only=True, permission=allowed)])


def said(message):
    return [getattr(block, "text", None) or getattr(block, "thinking", "") for block in message.content]


def answered(feature, tools=False, **options):
    def played(*where):
        agent = agent_of(*where, **({"toolkit": toolkit()} if tools else {}))
        return said(asyncio.run(agent.reply(UserMsg("user", ASK[feature]), **options)))

    return played


def stream(*where):
    agent = agent_of(*where)
    agent.model.stream = True
    return said(asyncio.run(agent.reply(UserMsg("user", ASK["stream"]))))


@awaited
async def required(*where):
    agent = agent_of(*where, toolkit=toolkit())
    model = agent.model

    class Required(type(model)):
        async def __call__(self, messages, tools=None, tool_choice=None, **more):
            first = not any(message.get_content_blocks("tool_result") for message in messages)
            return await super().__call__(messages, tools, ToolChoice(mode="required") if first else tool_choice, **more)

    model.__class__ = Required
    return said(await agent.reply(UserMsg("user", ASK["required"])))


@awaited
async def turns(*where):
    agent = agent_of(*where)
    return [text for question in (ASK["turns"], AGAIN) for text in said(await agent.reply(UserMsg("user", question)))]


play.play(
    {
        "chat": answered("chat"),
        "stream": stream,
        "tools": answered("tools", True),
        "parallel": answered("parallel", True),
        "required": required,
        "structured": answered("structured", structured_schema=Sum),
        "reasoning": answered("reasoning", True),
        "turns": turns,
    }
)
