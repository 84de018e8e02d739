"""An inspect-ai task for each feature of `play`; its scorer prints what was said and called."""

import json

import play
from form import Sum
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, GenerateConfig, ResponseSchema
from inspect_ai.scorer import Score, accuracy, scorer
from inspect_ai.solver import generate, solver, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import json_schema
from play import AGAIN, ASK


@tool
def add():
    async def execute(a: int, b: int) -> str:
        """Adds two numbers.

        Args:
            a: the first number.
            b: the second number.
        """
        return str(play.add(a, b))

    return execute


@solver
def asked_again():
    async def solve(state, generate):
        state = await generate(state)
        state.messages.append(ChatMessageUser(content=AGAIN))
        return await generate(state)

    return solve


@scorer(metrics=[accuracy()])
def right():
    async def score(state, target):
        answers = [message for message in state.messages if message.role == "assistant"]
        parts = [part for answer in answers if isinstance(answer.content, list) for part in answer.content]
        thoughts = [part.reasoning for part in parts if part.type == "reasoning"]
        print(json.dumps({"said": [*(answer.text for answer in answers), *thoughts], "calls": play.calls}))
        return Score(value=float(bool(state.output.completion)))

    return score


@task
def feature(name):
    tools = name in ("tools", "parallel", "required", "reasoning")
    solvers = [use_tools([add()], tool_choice="any" if name == "required" else "auto")] if tools else []
    form = ResponseSchema(name="sum", json_schema=json_schema(Sum))
    config = GenerateConfig(response_schema=form) if name == "structured" else GenerateConfig()
    solvers.append(asked_again() if name == "turns" else generate())
    return Task([Sample(ASK[name], target=play.SUM)], solver=solvers, scorer=right(), config=config)
