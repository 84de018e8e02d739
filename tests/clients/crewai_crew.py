"""The package crewai."""

import os

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

import play
from crewai import LLM, Agent
from crewai.tools import tool
from form import Sum
from play import AGAIN, ASK


@tool("add")
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return play.add(a, b)


def agent_of(base_url, api_key, model, tools=()):
    # page
    llm = LLM(model=f"openai/{model}", base_url=base_url, api_key=api_key)
    agent = Agent(role="solver", goal="Solve it.", backstory="A solver.", llm=llm, tools=list(tools))
    # /page
    return agent


def answered(feature, tools=()):
    return lambda *where: [agent_of(*where, tools).kickoff(ASK[feature]).raw]


def structured(*where):
    return [agent_of(*where).kickoff(ASK["structured"], response_format=Sum).pydantic.model_dump_json()]


def turns(*where):
    agent, messages = agent_of(*where), []
    for question in (ASK["turns"], AGAIN):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": agent.kickoff(messages).raw})
    return [message["content"] for message in messages[1::2]]


play.play(
    {
        "chat": answered("chat"),
        "tools": answered("tools", [add]),
        "parallel": answered("parallel", [add]),
        "structured": structured,
        "reasoning": answered("reasoning", [add]),
        "turns": turns,
    }
)
