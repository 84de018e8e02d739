"""The package pydantic-ai."""

import play
from form import Sum
from play import AGAIN, ASK, awaited
from pydantic_ai import Agent
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class RequiredAtFirst(AbstractCapability):
    def get_model_settings(self):
        return lambda context: {"tool_choice": "required"} if context.run_step == 1 else {}


def agent_of(base_url, api_key, model, **options):
    # page
    llm = OpenAIChatModel(model, provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    agent = Agent(llm, **options)
    # /page
    return agent


def answered(feature, **options):
    return lambda *where: [agent_of(*where, **options).run_sync(ASK[feature]).output]


@awaited
async def stream(*where):
    async with agent_of(*where).run_stream(ASK["stream"]) as result:
        return ["".join([part async for part in result.stream_text(delta=True)])]


def reasoning(*where):
    result = agent_of(*where, tools=[play.add]).run_sync(ASK["reasoning"])
    parts = [part for message in result.all_messages() for part in message.parts]
    return [result.output, *(part.content for part in parts if part.part_kind == "thinking")]


def turns(*where):
    agent = agent_of(*where)
    first = agent.run_sync(ASK["turns"])
    return [first.output, agent.run_sync(AGAIN, message_history=first.all_messages()).output]


play.play(
    {
        "chat": answered("chat"),
        "stream": stream,
        "tools": answered("tools", tools=[play.add]),
        "parallel": answered("parallel", tools=[play.add]),
        "required": answered("required", tools=[play.add], capabilities=[RequiredAtFirst()]),
        "structured": lambda *where: [agent_of(*where, output_type=Sum).run_sync(ASK["structured"]).output.model_dump_json()],
        "reasoning": reasoning,
        "turns": turns,
    }
)
