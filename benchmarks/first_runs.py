"""Seconds from an empty folder to the first risen reward, on each of the ways to a first run of one's own.

``python -m benchmarks.first_runs [--flows NAME …] [--json FILE] [--write]`` makes an empty folder for each of `FLOWS`, writes there what
its user would, starts the run, and stops it once the reward has risen: four steps' mean lies `RISEN` above that of the first four. The
model is the quick start's tiny one, which needs a supervised warm start; a model that can do its task already does not. ``compose`` needs a
Docker engine. ``--write`` puts the table of `RESULT` into docs/quickstart.md.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command_line import machine, write
from benchmarks.example_run import END_SECONDS, EXAMPLE, ROOT
from benchmarks.page_table import markdown_table, put_table

RESULT = ROOT / "benchmarks" / "results" / "first_runs.json"
PAGE = ROOT / "docs" / "quickstart.md"
RISEN, STEPS = 0.1, 4
"""How far the mean reward of the newest so many steps lies above that of the first so many."""

FLOW_SECONDS = 1800.0
WARM_START = ["--sft-data", "data/sft.jsonl", "--sft-steps", "400", "--sft-batch-size", "128", "--sft-lr", "4e-3", "--lr", "1e-4"]
ON_CPU = ["--train-dtype", "float32", "--train-device", "cpu", "--rollout-device", "cpu", "--in-flight-on-push", "retract"]
SIZES = ["--rollout-batch-size", "32", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "20", "--num-rollout", "100"]
NUMBER = ["--answer-pattern", r"\d+(?=\.?\s*$)"]

REWARD = r"""
import re


def reward(args, sample):
    numbers = re.findall(r"\d+", sample.response)
    return float(numbers[-1:] == [sample.label])
"""
AGENT = """
from openai import AsyncOpenAI


async def play(data, base_url, api_key):
    client, messages = AsyncOpenAI(base_url=base_url, api_key=api_key), list(data["messages"])
    for turn in (1, 2):
        answer = (await client.chat.completions.create(model=data["model"], messages=messages)).choices[0].message.content or ""
        if answer.rstrip(". \\n").endswith(str(data["label"])):
            return 1.0 / turn
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Wrong. " + data["messages"][-1]["content"]}]
    return 0.0
"""


def myxo(*words: str) -> list[str]:
    """Returns a command of ``myxo``."""
    return [sys.executable, "-m", "myxo.main", *words]


@dataclass(frozen=True)
class Flow:
    """A way to a first run. ``about``: what the user has; ``files``: name → text of what they write; ``before``: commands that end;
    ``start``: the run's command; ``metrics``: the file of its metrics, in the folder."""

    about: str
    start: list[str]
    metrics: str
    files: dict[str, str]
    before: Sequence[list[str]] = ()


INIT = myxo("init", "data/model", "data/train.jsonl", "--output", "first.toml", "--name", "first")
UP = myxo("up", "first.toml", *WARM_START, *SIZES)
METRICS = "runs/first/tensorboard/metrics.jsonl"
SLIME = [*("--hf-checkpoint", "data/model", "--prompt-data", "data/train.jsonl", "--input-key", "prompt", "--label-key", "label")]
SLIME += [
    "--apply-chat-template",
    "--rollout-shuffle",
    "--custom-rm-path",
    "mine:reward",
    "--advantage-estimator",
    "grpo",
    "--eps-clip",
    "0.2",
]
FLOWS = {
    "model": Flow("my model and data: `myxo init`, `myxo up`", [*UP, *NUMBER], METRICS, {}, [INIT]),
    "reward": Flow("my reward function", [*UP, "--custom-rm-path", "mine:reward"], METRICS, {"mine.py": REWARD}, [INIT]),
    "agent": Flow("my agent, over OpenAI's client", [*UP, "--agent", "mine:play"], METRICS, {"mine.py": AGENT}, [INIT]),
    "slime": Flow(
        "a script of slime's: `myxo train`",
        myxo("train", "--run-name", "first", *SLIME, *WARM_START, *SIZES, *ON_CPU),
        METRICS,
        {"mine.py": REWARD},
    ),
}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flows", nargs="+", choices=[*FLOWS, "compose"], default=[*FLOWS, "compose"], metavar="NAME", help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"write the figures there; the repository's are in {RESULT}")
    parser.add_argument("--write", action="store_true", help="put the figures of RESULT into the docs; nothing is measured")
    given = parser.parse_args()
    if given.write:
        put_table(PAGE, "first_runs", table(json.loads(RESULT.read_text())))
        return 0
    figures: dict[str, Any] = {"machine": machine(), "flows": {}}
    for name in given.flows:
        with tempfile.TemporaryDirectory(prefix=f"myxo-{name}-") as place:
            figures["flows"][name] = compose(Path(place)) if name == "compose" else measured(FLOWS[name], Path(place))
        print(json.dumps({name: figures["flows"][name]}), flush=True)
        write(given.json, figures)
    return 0


def measured(flow: Flow, folder: Path) -> dict[str, Any]:
    """Returns the seconds to the first step and to the risen reward, model and data being there. Raises AssertionError with the output."""
    subprocess.run([sys.executable, str(EXAMPLE / "prepare.py"), "data"], cwd=folder, check=True, capture_output=True)
    began = time.monotonic()
    for name, text in flow.files.items():
        (folder / name).write_text(text)
    for command in flow.before:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=FLOW_SECONDS)
    log = folder / "up.log"
    with log.open("wb") as file, subprocess.Popen(flow.start, cwd=folder, stdout=file, stderr=file) as process:
        try:
            return until_risen(began, lambda: rewards(folder / flow.metrics), lambda: process.poll() is None, log)
        finally:
            ended(process)


def compose(folder: Path) -> dict[str, Any]:
    """As `measured`, of ``docker compose up`` in a copy of deploy/compose."""
    stack = ["docker", "compose", "-f", str(ROOT / "deploy" / "compose" / "compose.yaml"), "-p", "myxo-first-run"]
    began, log = time.monotonic(), folder / "up.log"
    with log.open("wb") as file, subprocess.Popen([*stack, "up"], stdout=file, stderr=file) as process:
        try:
            return until_risen(began, lambda: compose_rewards(stack), lambda: process.poll() is None, log)
        finally:
            ended(process)
            subprocess.run([*stack, "down", "--volumes", "--timeout", "10"], check=False, capture_output=True, timeout=300)


def compose_rewards(stack: Sequence[str]) -> list[float]:
    """Returns the reward of each step so far, as the trainer's container has them."""
    command = [*stack, "exec", "-T", "trainer", "sh", "-c", "cat /myxo/trained/*/tensorboard/metrics.jsonl"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    return rewards_in(done.stdout)


def rewards(path: Path) -> list[float]:
    """Returns the reward of each step so far."""
    return rewards_in(path.read_text()) if path.exists() else []


def rewards_in(text: str) -> list[float]:
    """Returns the mean reward of each step, in order, of the lines that `shared.data.metric_files` describes."""
    read = [json.loads(line) for line in text.splitlines() if line.endswith("]")]
    found = {step: values["rollout/raw_reward"] for _, step, values in read if "rollout/raw_reward" in values}
    return [found[step] for step in sorted(found)]


def until_risen(began: float, read: Callable[[], list[float]], lives: Callable[[], bool], log: Path) -> dict[str, Any]:
    """Returns what was measured once the reward has risen. Raises AssertionError with the log's end where the run ends before."""
    first = None
    while True:
        alive, seen, now = lives(), read(), time.monotonic()
        first = first or (now if seen else None)
        if first and len(seen) >= 2 * STEPS and sum(seen[-STEPS:]) - sum(seen[:STEPS]) > RISEN * STEPS:
            after = {"first_step": round(first - began, 1), "risen": round(now - began, 1)}
            return {"seconds": after, "steps": len(seen), "reward": [round(sum(part) / STEPS, 3) for part in (seen[:STEPS], seen[-STEPS:])]}
        assert alive and now - began < FLOW_SECONDS, f"{len(seen)} steps, the reward has not risen: {log.read_text()[-3000:]}"
        time.sleep(0.5)


def ended(process: "subprocess.Popen[bytes]") -> None:
    """Ends a run as Ctrl-C does."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(4 * END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def table(figures: dict[str, Any]) -> str:
    """Returns the figures as a table and what they were measured on."""
    rows = []
    for name, found in figures["flows"].items():
        about = FLOWS[name].about if name in FLOWS else "`docker compose up`, the quick start"
        seconds, (low, high) = found["seconds"], found["reward"]
        rows.append([about, f"{seconds['first_step']:.0f}", f"{seconds['risen']:.0f}", f"{low:.2f} → {high:.2f} in {found['steps']}"])
    head = ["I have", "seconds to the first step", "to the risen reward", "mean reward, and steps"]
    beside = f"; `docker compose up`: {figures['compose_machine']}, images built" if "compose_machine" in figures else ""
    return f"{markdown_table(head, rows)}\n\n{figures['machine']}{beside}."


if __name__ == "__main__":
    sys.exit(main())
