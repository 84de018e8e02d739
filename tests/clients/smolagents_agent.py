"""The package smolagents: `ToolCallingAgent`, whose tools are required, and `CodeAgent`, which writes code as text."""

import play
from play import ASK
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

add = tool(play.add)


def llm_of(base_url, api_key, model):
    # page
    llm = OpenAIModel(model, api_base=base_url, api_key=api_key)
    # /page
    return llm


def code(where, feature, **options):
    llm, tools = llm_of(*where), [add]
    # page
    agent = CodeAgent(tools=tools, model=llm)
    # /page
    agent.stream_outputs = options.get("stream", False)
    return [agent.run(ASK[feature]), *said(agent)]


def said(agent):
    return [step.model_output for step in agent.memory.steps if getattr(step, "model_output", None)]


def turns(*where):
    agent = CodeAgent(tools=[add], model=llm_of(*where))
    return [agent.run(ASK["turns"]), agent.run(play.AGAIN, reset=False), *said(agent)]


def calling(feature):
    return lambda *where: [ToolCallingAgent(tools=[add], model=llm_of(*where), max_steps=4).run(ASK[feature])]


play.play(
    {
        "chat": lambda *where: code(where, "chat"),
        "stream": lambda *where: code(where, "stream", stream=True),
        "tools": lambda *where: code(where, "tools"),
        "required": calling("required"),
        "parallel": calling("parallel"),
        "turns": turns,
    }
)
