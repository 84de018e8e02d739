"""A calculator: the tool that the agents of this directory offer, and by which they check an answer."""

import ast
import operator
import re

TURNS = 3
"""The most answers that an agent lets the model give."""

AGAIN = " no. "
"""Feedback on a wrong answer, before the problem is repeated."""

LATER_TURN_COSTS = 0.1
"""What an answer's reward is less for each turn before it."""

NAME, DESCRIPTION = "calculate", "Works out an expression of whole numbers with +, -, * and brackets."

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}

LONGEST = 200
"""Characters of an expression: what a model writes is not trusted."""

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> str:
    """Returns the value of an expression as text, or what is wrong with it, for the model to read."""
    try:
        if len(expression) > LONGEST:
            raise ValueError(f"more than {LONGEST} characters")
        return str(_value(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ValueError) as error:
        return f"error: {error}"


def is_right(answer: str, label: str | float) -> bool:
    """Whether the last number of an answer is the one that is wanted."""
    numbers = re.findall(r"-?(?:(?<!\.)\.)?\d+(?:\.\d+)?", answer)  # dots before it are none of a number
    return numbers[-1:] == [str(label)]


def reward(turns: int, right: bool) -> dict[str, float]:
    """The reward of an agent's rollout: less for each turn that it took beyond the first; ``right`` and ``turns`` stand beside it."""
    return {"reward": right * (1 - LATER_TURN_COSTS * (turns - 1)), "right": float(right), "turns": float(turns)}


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("expected whole numbers with +, -, * and brackets")
