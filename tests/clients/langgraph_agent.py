"""The packages langchain and langgraph, over langchain-openai."""

import play
from form import Sum
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from play import AGAIN, ASK


def llm_of(base_url, api_key, model):
    # page
    llm = ChatOpenAI(base_url=base_url, api_key=api_key, model=model)
    # /page
    return llm


def agent(where, feature):
    tools, llm = [play.add], llm_of(*where)
    # page
    graph = create_agent(llm, tools)
    # /page
    return [graph.invoke({"messages": [{"role": "user", "content": ASK[feature]}]})["messages"][-1].content]


def required(*where):
    message = llm_of(*where).bind_tools([play.add], tool_choice="any").invoke(ASK["required"])
    for call in message.tool_calls:
        play.add(**call["args"])
    return []


def structured(*where):
    return [llm_of(*where).with_structured_output(Sum).invoke(ASK["structured"]).model_dump_json()]


def turns(*where):
    graph, messages, seen = create_agent(llm_of(*where), []), [], []
    for question in (ASK["turns"], AGAIN):
        messages = graph.invoke({"messages": [*messages, {"role": "user", "content": question}]})["messages"]
        seen.append(messages[-1].content)
    return seen


play.play(
    {
        "chat": lambda *where: [llm_of(*where).invoke(ASK["chat"]).content],
        "stream": lambda *where: ["".join(part.content for part in llm_of(*where).stream(ASK["stream"]))],
        "tools": lambda *where: agent(where, "tools"),
        "parallel": lambda *where: agent(where, "parallel"),
        "required": required,
        "structured": structured,
        "reasoning": lambda *where: agent(where, "reasoning"),
        "turns": turns,
    }
)
