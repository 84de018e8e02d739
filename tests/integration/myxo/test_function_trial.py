"""`myxo try`: the table of mistakes in functions of one's own, each told with file, line and remedy; and those that are right."""

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from myxo.main import main
from tests.integration.myxo.command import ROOT, Myxo
from tests.integration.myxo.mistakes import Input, grade
from tests.support.run_config import write_jsonl

GENERATE = """
import aiohttp

async def f(args, sample, sampling_params):
    body = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    async with aiohttp.request("POST", f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", json=body) as response:
        output = await response.json()
    drawn = output["meta_info"]["output_token_logprobs"]
    tokens, logs = [entry[1] for entry in drawn], [entry[0] for entry in drawn]
    sample.append_response_tokens(tokens=tokens, log_probs=logs, meta_info=output["meta_info"], text=output["text"])
    CHANGE
    return sample
"""


@dataclass(frozen=True)
class Wrong:
    """A function ``f`` with a mistake. flag: that names it. source: its file. says: words of its line. result: of the call. grade: of what
    ``myxo try`` says of it. in_run: of what plain ``myxo up`` says, which calls no function before."""

    name: str
    flag: str
    source: str
    says: tuple[str, ...]
    result: str = "FAILED"
    flags: tuple[str, ...] = ()
    grade: str = "A"
    in_run: str = ""


IN_RUNS = ("raises", "the same for everything")
SELDOM = (
    "a coroutine is not awaited",
    "an answer is not awaited",
    "too few log-probs",
    "a loss of another shape",
    "a loss that is not finite",
)
"""Of the table: what another row of the same hook stands for."""

RM, LOSS = "--custom-rm-path", ("--loss-type", "custom_loss")
CALLED = "a run calls f(args, sample), which gives a number or a dict"
WRONG = [
    Wrong("wrong signature", RM, "def f(sample):\n    return 1.0", ("own.py:1", "takes 1 positional argument but 2", CALLED), in_run="B"),
    Wrong("raises", RM, "def f(args, sample):\n    return sample.nothing", ("own.py:2", "no attribute 'nothing'", CALLED), in_run="B"),
    Wrong("gives text", RM, "def f(args, sample):\n    return 'much'", ("own.py:1", "expected a finite number", CALLED)),
    Wrong(
        "a hook of samples gives text",
        "--rollout-sample-hook-path",
        "def f(args, sample):\n    return sample.response",
        ("own:f: gave a str; expected a sample or None", "a run calls async f(args, sample, sampling_params)"),
    ),
    Wrong("gives nothing", RM, "def f(args, sample):\n    pass", ("own.py:1", "expected a finite number", CALLED)),
    Wrong("no reward among the names", RM, "def f(args, sample):\n    return {'right': 1}", ("own.py:1", "reward_key says", CALLED)),
    Wrong(
        "a coroutine is not awaited",
        RM,
        "async def judged(text):\n    return 1.0\n\ndef f(args, sample):\n    return {'reward': judged(sample.response)}",
        ("own.py:4", "reward", CALLED),
    ),
    Wrong(
        "too few rewards of a group",
        RM,
        "def f(args, samples):\n    return [1.0]",
        ("own.py:1", "1 rewards for 2 samples"),
        flags=("--group-rm",),
        in_run="B",
    ),
    Wrong(
        "the same for everything",
        RM,
        "def f(args, sample):\n    return 0",
        ("right and wrong answers alike", "breakpoint()"),
        "warning",
        in_run="B",
    ),
    Wrong(
        "never comes back",
        RM,
        "import time\n\ndef f(args, sample):\n    time.sleep(3600)",
        ("did not answer within 2 s", "--timeout S", CALLED),
        flags=("--timeout", "2"),
    ),
    Wrong(
        "no verdict of a filter",
        "--dynamic-sampling-filter-path",
        "def f(args, group):\n    any(sample.reward for sample in group)",
        ("own.py:1", "gave None; expected shared.hooks.DynamicFilterOutput", "a run calls f(args, group)"),
        in_run="B",
    ),
    Wrong(
        "nothing is generated",
        "--custom-generate-function-path",
        "async def f(args, sample, sampling_params):\n    return sample",
        ("no response token", "sample.tokens", "a run calls async f("),
    ),
    Wrong(
        "token out of the vocabulary",
        "--custom-generate-function-path",
        GENERATE.replace("CHANGE", "sample.tokens[-1] = 10**6"),
        ("own.py:3", "token 1000000", "is not in [0,", "a run calls async f(args, sample, sampling_params)"),
    ),
    Wrong(
        "an answer is not awaited",
        "--custom-generate-function-path",
        GENERATE.replace("await response.json()", "response.json()"),
        ("own.py:7", "'coroutine' object is not subscriptable", "a run calls async f("),
    ),
    Wrong(
        "too few log-probs",
        "--custom-generate-function-path",
        GENERATE.replace("CHANGE", "sample.rollout_log_probs.pop()"),
        ("own.py:3", "rollout_log_probs has", "a run calls async f("),
    ),
    Wrong(
        "log-probs of other tokens",
        "--custom-generate-function-path",
        GENERATE.replace("CHANGE", "sample.rollout_log_probs = sample.rollout_log_probs[1:] + [-0.9]"),
        ("own.py:3", "not what the engine gave for token"),
    ),
    Wrong(
        "gives text in the place of a sample",
        "--custom-generate-function-path",
        "async def f(args, sample, sampling_params):\n    return 'words'",
        ("own.py:1", "gave a str; expected", "a run calls async f("),
    ),
    Wrong(
        "the model is never asked",
        "--agent",
        "def f(data, base_url, api_key):\n    return 1.0",
        ("the model was never asked", "use base_url and api_key", "a run calls f(data, base_url, api_key)"),
    ),
    Wrong(
        "an agent raises",
        "--agent",
        "async def f(data, base_url, api_key):\n    raise KeyError(data['metadata']['tool'])",
        ("own.py:2", "KeyError: 'tool'", "a run calls f(data, base_url, api_key)"),
    ),
    Wrong(
        "a source without prompts",
        "--data-source",
        "class f:\n    def __init__(self, config):\n        pass",
        ("own.py:2", "no get_samples(n)", "a run calls make(config)"),
    ),
    Wrong(
        "a loss of another shape",
        "--custom-loss-function-path",
        "def f(args, batch, logits, sum_of_sample_mean):\n    return logits[0].sum(-1), {}",
        ("own.py:1", "expected (loss, metrics)", "a run calls f(args, batch, logits"),
        flags=LOSS,
    ),
    Wrong(
        "a loss that is not finite",
        "--custom-loss-function-path",
        "def f(args, batch, logits, sum_of_sample_mean):\n    return logits.sum() / 0, {}",
        ("own.py:1", "expected finite numbers"),
        flags=LOSS,
    ),
    Wrong(
        "advantages of another length",
        "--custom-advantage-function-path",
        "import torch\n\ndef f(args, rollout_data):\n    rollout_data['advantages'] = [torch.zeros(1)] * len(rollout_data['rewards'])",
        ("own.py:3", "shape (1,) for", "a run calls f(args, rollout_data)"),
    ),
]

WRONG_IN_RUNS = [row for row in WRONG if row.in_run]


def rows(seldom: Callable[[Wrong], bool], table: list[Wrong] = WRONG) -> list[Any]:
    return [pytest.param(row, marks=pytest.mark.extra if seldom(row) else ()) for row in table]


@pytest.fixture
def given(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Input:
    made = Input.make(tmp_path, tiny_model)
    made.sections["eval"] = {}
    made.sections["rollout"]["rollout_max_response_len"] = 100
    monkeypatch.chdir(tmp_path)  # where the user's functions lie
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return made


def tried(given: Input, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    """Exit code and lines of ``myxo try``."""
    code = main(["try", str(given.write()), *words])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out.splitlines()


@pytest.mark.parametrize("row", rows(lambda row: row.name in SELDOM), ids=lambda row: row.name)
def test_a_mistake_is_told(row: Wrong, given: Input, capsys: pytest.CaptureFixture[str]) -> None:
    (given.directory / "own.py").write_text(row.source.removeprefix("\n"))
    if row.flag in (RM, "--data-source"):
        given.sections["reward"] = {}
    if row.flag == "--data-source":
        given.sections["data"] = {}
        given.sections["reward"] = {"rm_type": "random"}
    sys.modules.pop("own", None)
    code, lines = tried(given, capsys, row.flag, "own:f", *row.flags)
    [line] = [line for line in lines if "own:f" in line]
    assert line.startswith(row.result), line
    assert [word for word in row.says if word not in line] == [], line
    assert code == (2 if row.result == "FAILED" else 0)
    assert not (given.directory / "runs").exists()
    assert grade(line, given, [row.flag]) == row.grade


@pytest.mark.parametrize("row", rows(lambda row: row.name not in IN_RUNS, WRONG_IN_RUNS), ids=lambda row: row.name)
def test_a_run_that_was_not_tried_says_it_within_seconds(row: Wrong, given: Input, myxo: Myxo) -> None:
    (given.directory / "own.py").write_text(row.source.removeprefix("\n"))
    given.sections["reward"] = {} if row.flag == RM else given.sections["reward"]
    words = ["up", given.write(), row.flag, "own:f", *row.flags]
    started = time.monotonic()
    code, out, err = myxo.run(*words, standins=True, environment={"PYTHONPATH": os.environ["PYTHONPATH"]})
    told_after = time.monotonic() - started
    told = [line for line in f"{out}\n{err}".splitlines() if line.startswith(("▲", "  ", "myxo:"))]
    assert code == (3 if row.result == "FAILED" else 0), told
    assert row.result == "warning" or row.says[0] in err, err
    assert (given.directory / "runs" / "test" / "logs" / "rollout-0.log").exists()
    assert grade("\n".join(told), given, [row.flag], told_after) == row.in_run, told


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "localhost:30000"])
def test_an_engine_that_is_not_there_is_refused(url: str, given: Input, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", str(given.write()), "--engine", url]) == 2
    assert f"--engine = {url!r}: http://host:port of a running SGLang server; no reply: " in capsys.readouterr().err


RIGHT = f"""{GENERATE.replace("CHANGE", "")}
async def score(args, sample):
    return {{"reward": float(sample.label in sample.response), "length": sample.response_length}}

def keep(args, group):
    return len({{sample.get_reward_value(args) for sample in group}}) > 1

class Source:
    def __init__(self, config):
        self.drawn = 0

    def get_samples(self, n):
        self.drawn += n
        return [[{{"prompt": f"{{self.drawn}}+1=", "label": str(self.drawn + 1)}}] for _ in range(n)]

def loss(args, batch, logits, sum_of_sample_mean):
    import torch
    log_probs = torch.log_softmax(logits[0], -1).gather(-1, batch["labels"][:, None])[:, 0]
    return sum_of_sample_mean(-log_probs), {{}}
"""
OWN = {
    "--custom-generate-function-path": "own:f",
    "--custom-rm-path": "own:score",
    "--dynamic-sampling-filter-path": "own:keep",
    "--data-source": "own:Source",
    "--loss-type": "custom_loss",
    "--custom-loss-function-path": "own:loss",
}
FLAGS = [word for pair in OWN.items() for word in pair]


def test_functions_that_are_right_pass_in_the_order_of_a_run(given: Input, capsys: pytest.CaptureFixture[str]) -> None:
    (given.directory / "own.py").write_text(RIGHT)
    given.sections["reward"] = given.sections["data"] = {}
    code, lines = tried(given, capsys, *FLAGS, "--json")
    checks = json.loads("\n".join(lines))["checks"]
    assert (code, [check["result"] for check in checks]) == (0, ["ok"] * 5), checks
    assert [check["name"].partition(" = ")[2] for check in checks] == ["own:Source", "own:f", "own:score", "own:keep", "own:loss"]
    assert "'1+1=' with label '2'" in checks[0]["detail"]
    assert main(["up", str(given.write()), *FLAGS, "--dry-run"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "functions called: 5, each as it should be" in printed
    assert len(printed) <= 10


def test_a_dry_run_calls_them_unless_it_is_not_to(given: Input, capsys: pytest.CaptureFixture[str]) -> None:
    (given.directory / "own.py").write_text("def f(args, sample):\n    return sample.nothing")
    words = ["up", str(given.write()), RM, "own:f", "--print-config"]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "reward.custom_rm_path = 'own:f': own.py:2, in f: AttributeError" in err.replace("custom_rm_path (reward.", "")
    assert main([*words, "--no-try"]) == 0
    assert "[reward]" in capsys.readouterr().out


@pytest.mark.parametrize(("body", "words"), [("return sample.nothing", "no attribute 'nothing'"), ("return 1.0", ": gave 1, 1, ")])
def test_a_function_among_weighted_rewards_is_called(body: str, words: str, given: Input, capsys: pytest.CaptureFixture[str]) -> None:
    (given.directory / "own.py").write_text(f"def f(args, sample):\n    {body}")
    weighted = ("--rm-type", "weighted", "--reward-weights", '{"custom_rm": 0.1, "exact": 1}', "--custom-rm-path", "own:f")
    _, lines = tried(given, capsys, *weighted)
    assert words in " ".join(" ".join(lines).split()) and "alike" not in " ".join(lines), lines


def test_a_label_that_no_answer_matches_is_told(given: Input, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(given.directory / "prompts.jsonl", [{"prompt": "4+5=", "label": "the answer is nine apples"}] * 4)
    main(["try", str(given.write()), "--rm-type", "math_verify"])
    err = capsys.readouterr().err
    assert [word for word in ("prompts.jsonl:1", "can hardly be matched", "give the final answer alone") if word not in err] == [], err


def test_the_debugger_opens_on_the_terminal_and_no_deadline_runs(given: Input) -> None:
    (given.directory / "own.py").write_text("def f(args, sample):\n    breakpoint()\n    return len(sample.response)")
    terminal, end = pty.openpty()
    words = [sys.executable, "-m", "myxo.main", "try", str(given.write()), RM, "own:f", "--timeout", "3"]
    process = subprocess.Popen(words, stdin=end, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        seen = b""
        while b"(Pdb)" not in seen:
            seen += os.read(terminal, 1024)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(5)  # beyond the deadline
        os.write(terminal, b"import builtins; builtins.breakpoint = lambda: None\nc\n")
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        os.close(terminal)
        os.close(end)
    assert (process.returncode, "ok" in out) == (0, True), out + err
