"""An environment of verifiers 0.1 whose rows are the features of `play`, with its tool."""

import verifiers as vf
from datasets import Dataset
from play import ASK, SUM, add

FEATURES = ("chat", "tools", "parallel", "reasoning", "required")


def load_environment() -> vf.Environment:
    rows = [{"prompt": [{"role": "user", "content": ASK[name]}], "answer": SUM} for name in FEATURES]

    def right(completion, answer, **_) -> float:
        return float(completion[-1]["content"] == answer)

    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[add], rubric=vf.Rubric(funcs=[right]), max_turns=4)
