"""The package strands-agents."""

import play
from form import Sum
from play import AGAIN, ASK
from strands import Agent, tool
from strands.models.openai import OpenAIModel

add = tool(play.add)


def agent_of(base_url, api_key, model, tools=(), **options):
    # page
    llm = OpenAIModel(client_args={"base_url": base_url, "api_key": api_key}, model_id=model, **options)
    agent = Agent(llm, tools=list(tools))
    # /page
    return agent


def answered(feature, tools=(), **options):
    return lambda *where: [text_of(agent_of(*where, tools, **options)(ASK[feature]))]


def text_of(result):
    return "".join(part.get("text", "") for part in result.message["content"])


def turns(*where):
    agent = agent_of(*where)
    return [text_of(agent(ASK["turns"])), text_of(agent(AGAIN))]


def structured(*where):
    result = agent_of(*where)(ASK["structured"], structured_output_model=Sum)
    return [result.structured_output.model_dump_json()]


play.play(
    {
        "stream": answered("stream"),
        "tools": answered("tools", [add]),
        "parallel": answered("parallel", [add]),
        "required": answered("required", [add], params={"tool_choice": "required"}),
        "structured": structured,
        "reasoning": answered("reasoning", [add]),
        "turns": turns,
    }
)
