"""The package openai-agents, by its own default: the Responses API."""

import play
from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, Runner, function_tool, set_tracing_disabled
from form import Sum
from openai import AsyncOpenAI
from play import AGAIN, ASK, awaited

set_tracing_disabled(True)
add = function_tool(play.add)


def agent_of(base_url, api_key, model, **options):
    # page
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    agent = Agent(name="solver", model=OpenAIResponsesModel(model, client), **options)
    # /page
    return agent


def run(where, question, **options):
    agent = agent_of(*where, **options)
    # page
    result = Runner.run_sync(agent, question, run_config=RunConfig(tracing_disabled=True))
    # /page
    return result


def answered(feature, **options):
    return lambda *where: [run(where, ASK[feature], **options).final_output]


@awaited
async def stream(*where):
    result, seen = Runner.run_streamed(agent_of(*where), ASK["stream"]), []
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            seen.append(event.data.delta)
    return ["".join(seen)]


def reasoning(*where):
    result = run(where, ASK["reasoning"], tools=[add])
    thoughts = [item.raw_item for item in result.new_items if item.type == "reasoning_item"]
    return [result.final_output, *(part.text for thought in thoughts for part in thought.content or [])]


def turns(*where):
    agent = agent_of(*where)
    first = Runner.run_sync(agent, ASK["turns"])
    second = Runner.run_sync(agent, [*first.to_input_list(), {"role": "user", "content": AGAIN}])
    return [first.final_output, second.final_output]


play.play(
    {
        "chat": answered("chat"),
        "stream": stream,
        "tools": answered("tools", tools=[add]),
        "parallel": answered("parallel", tools=[add]),
        "required": answered("required", tools=[add], model_settings=ModelSettings(tool_choice="required")),
        "structured": lambda *where: [run(where, ASK["structured"], output_type=Sum).final_output.model_dump_json()],
        "reasoning": reasoning,
        "turns": turns,
    }
)
