"""Plays the samples of an inspect-ai task as an agent that is a command. It runs in that package's own virtual environment.

    VENV/bin/python task_agent.py tasks --task my_package:my_task > my_task.jsonl
    agent_command = ["VENV/bin/python", "examples/environments/inspect/task_agent.py", "play", "--task", "my_package:my_task"]

The task's own code runs unchanged: its solver asks the gateway by OpenAI's chat completions, its scorers give the reward.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from inspect_ai import Task, eval
from inspect_ai.model import get_model
from inspect_ai.scorer import value_to_float

PROVIDER = "openai-api/myxo"  # not `openai`, which first asks reasoning models to say "hello, world": that would be a turn of the session


def task_of(path: str, arguments: Mapping[str, Any]) -> Task:
    """Returns the task that a function makes. ``path``: ``module:function``."""
    module, _, function = path.partition(":")
    if not function:
        raise SystemExit(f"--task {path}: expected module:function, such as inspect_evals.gsm8k:gsm8k")
    sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), function)(**arguments)


def rows(task: Task, count: int) -> None:
    """Prints the task's first samples as prompts."""
    for index, sample in enumerate(list(task.dataset)[:count]):
        prompt = sample.input
        if not isinstance(prompt, str):
            prompt = [{"role": message.role, "content": message.text} for message in prompt]
        label = sample.target if isinstance(sample.target, str) else json.dumps(sample.target, ensure_ascii=False)
        print(json.dumps({"prompt": prompt, "label": label, "metadata": {"inspect": {"index": index}}}, ensure_ascii=False))


def played(task: Task, data: Mapping[str, Any], model_arguments: Mapping[str, Any]) -> dict[str, float]:
    """Returns the rewards of the sample that the prompt's metadata names: the first scorer's, and those of all by their names."""
    index = data["metadata"]["inspect"]["index"]
    where = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    model = get_model(f"{PROVIDER}/{data['model']}", memoize=False, **where, **model_arguments)
    with tempfile.TemporaryDirectory() as logs:
        [log] = eval(task, model=model, limit=(index, index + 1), epochs=1, display="none", log_dir=logs, fail_on_error=True)
        samples = list(log.samples or [])  # which it reads from its file only now
    if log.status != "success" or not samples:
        raise SystemExit(f"the sample {index} ended as {log.status}: {log.error.message if log.error else 'it is not there'}")
    found, number = {}, value_to_float()
    for scorer, score in (samples[0].scores or {}).items():
        parts = score.value if isinstance(score.value, Mapping) else {"": score.value}
        found |= {f"{scorer}/{part}" if part else scorer: number(value) for part, value in parts.items()}
    if not found:
        raise SystemExit(f"the task {task.name} has no scorer")
    return {**found, "reward": next(iter(found.values()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["tasks", "play"])
    parser.add_argument("--task", required=True, metavar="MODULE:FUNCTION", help="a function that returns a Task, importable")
    parser.add_argument("--arguments", type=json.loads, default={}, help="of that function, as JSON")
    parser.add_argument("--count", type=int, default=1000, help="tasks: how many samples")
    parser.add_argument(
        "--model-arguments", type=json.loads, default={}, help='play: of the provider openai-api, as JSON: {"stream": true}'
    )
    given = parser.parse_args()
    task = task_of(given.task, given.arguments)
    if given.command == "tasks":
        rows(task, given.count)
    else:
        print(json.dumps(played(task, json.load(sys.stdin), given.model_arguments)))


if __name__ == "__main__":
    main()
