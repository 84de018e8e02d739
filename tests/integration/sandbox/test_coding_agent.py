"""The agents of a sandbox, with what the model says written here: tools of a coding agent, its example, and the one of kernels in C."""

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from examples.coding import coding_agent, kernel_agent
from examples.coding.kernels import KernelBench, bench_settings
from shared.rewards.unit_test_cases import cases_of
from shared.sandbox.coding_tools import LONGEST_ANSWER, TOOLS, CodingTools
from shared.sandbox.program import SandboxSettings
from tests.integration.sandbox.conftest import LIMITS
from tests.support.http_server import http_server
from tests.support.tables import rare

TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"


@pytest.fixture
async def tools(box: object) -> AsyncIterator[CodingTools]:
    async with CodingTools(SandboxSettings(limits=LIMITS), cases_of(TESTS)) as opened:
        yield opened


async def test_a_conversation_of_edits_and_tests(tools: CodingTools) -> None:
    async def call(name: str, **arguments: str) -> str:
        return await tools.call(name, json.dumps(arguments))

    assert (await call("run_tests")).startswith("0 of 2 tests passed")
    assert await tools.passed() == 0.0
    assert await call("write_file", path="solution.py", content="def add(a, b):\n    return a - b\n") == "wrote solution.py"
    assert await call("run_tests") == "0 of 2 tests passed\ntest 1 gave another result\ntest 2 gave another result"
    assert await call("edit_file", path="solution.py", old="a - b", new="a + c") == "wrote solution.py"
    assert "NameError: name 'c' is not defined" in await call("run_tests")
    assert await call("edit_file", path="solution.py", old="c", new="b") == "wrote solution.py"
    assert await call("read_file", path="solution.py") == "def add(a, b):\n    return a + b\n"
    assert await call("run_tests") == "2 of 2 tests passed"
    assert await tools.passed() == 1.0
    assert (
        await call("write_file", path="deep/try.py", content="import sys\nfrom solution import add\nprint(add(int(input()), 2))")
        == "wrote deep/try.py"
    )
    assert "No module named 'solution'" in await call("run_file", path="deep/try.py", stdin="1")
    assert await call("write_file", path="try.py", content="from solution import add\nprint(add(int(input()), 2))") == "wrote try.py"
    assert await call("run_file", path="try.py", stdin="1") == "ended with exit code 0\n3\n"


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("rm", "{}", "error: there is no tool 'rm'; use write_file, read_file, edit_file, run_file, run_tests"),
        rare("__class__", "{}", "error: there is no tool '__class__'"),
        ("write_file", "{", "error: the arguments are no JSON"),
        rare("write_file", "[]", "error: the arguments must be a JSON object"),
        rare("write_file", '{"path": "a"}', "error: content is missing"),
        rare("write_file", '{"path": 1, "content": ""}', "error: path has to be text"),
        rare("write_file", '{"path": "a", "content": "", "mode": "w"}', "error: expected an object with path, content"),
        rare("write_file", '{"path": "a\\u0000", "content": ""}', "error: a path holds no zero bytes"),
        ("write_file", '{"path": "/usr/a", "content": ""}', "error: /usr/a: "),
        ("read_file", '{"path": "../etc/shadow"}', "error: ../etc/shadow: No such file or directory"),
        rare("edit_file", '{"path": "none", "old": "a", "new": "b"}', "error: none: No such file or directory"),
        ("run_file", '{"path": "-c"}', "ended with exit code 2"),
        ("run_tests", "", "0 of 2 tests passed"),
    ],
)
async def test_what_the_model_gets_wrong_is_told(tools: CodingTools, name: str, arguments: str, answer: str) -> None:
    assert (await tools.call(name, arguments)).startswith(answer)


async def test_an_edit_has_to_be_of_one_place(tools: CodingTools) -> None:
    await tools.call("write_file", '{"path": "a", "content": "x x \\ud800"}')
    for old, count in (("x", 2), ("y", 0), ("", 0)):
        answer = await tools.call("edit_file", json.dumps({"path": "a", "old": old, "new": "z"}))
        assert answer == f"error: old occurs {count} times in a; it has to occur once"


async def test_a_long_answer_keeps_its_beginning_and_its_end(tools: CodingTools) -> None:
    await tools.call("write_file", json.dumps({"path": "a", "content": f"begin{'x' * 20000}end"}))
    answer = await tools.call("read_file", '{"path": "a"}')
    assert answer.startswith("begin") and answer.endswith("end") and len(answer) < LONGEST_ANSWER + 100


def test_the_schemas_are_openais() -> None:
    for tool in TOOLS:
        parameters = tool["function"]["parameters"]
        assert set(parameters["required"]) <= set(parameters["properties"]) and tool["type"] == "function"


def said(content: str | None = None, **call: Any) -> dict[str, Any]:
    calls = (
        [{"id": "c", "type": "function", "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])}}] if call else None
    )
    message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "message": message}
    return {"id": "r", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("def add(a, b): return a + b", 1.0),
        rare("def add(a, b): return 3", 0.5),
        ("import os; os._exit(0)", 0.0),
    ],
)
async def test_the_example_is_rewarded_by_what_its_file_does(box: object, code: str, reward: float) -> None:
    turns = [
        said(name="write_file", arguments={"path": "solution.py", "content": code}),
        said(name="run_tests", arguments={}),
        said("Done."),
    ]
    async with http_server(lambda _, number: turns[number]) as server:
        data = {"messages": [{"role": "user", "content": "Write add(a, b)."}], "label": TESTS, "model": "m"}
        found = await coding_agent.run(data, f"{server.url}/v1", "key")
    assert found == {"reward": reward, "solved": float(reward == 1.0), "turns": 3.0}
    answers = [message["content"] for message in server.asked[-1]["messages"] if message["role"] == "tool"]
    assert answers[0] == "wrote solution.py" and answers[1].startswith(f"{round(2 * reward)} of 2 tests passed")


HEAD = "void kernel(const float *x, float *out, long rows, long columns) {"
RELU = f"{HEAD} for (long i = 0; i < rows * columns; i++) out[i] = x[i] > 0 ? x[i] : 0; }}"


@pytest.fixture(scope="module")
def bench(box: object) -> Iterator[KernelBench]:
    opened = KernelBench("relu", gpu=False)
    yield opened
    opened.close()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("source", "compiled", "correct", "feedback"),
    [
        (RELU, True, True, "times the reference's speed"),
        rare(f"{HEAD} for (long i = 0; i < rows * columns; i++) out[i] = x[i]; }}", True, False, "the largest difference is"),
        rare(f"{HEAD} }}", True, False, "the largest difference is 1e+09"),
        (f"{HEAD} *(int *)0 = 1; }}", True, False, "ended by signal 11"),
        rare(f"{HEAD} for (;;) ; }}", True, False, "ran out of"),
        rare(f"{HEAD} __builtin_exit(0); }}", True, False, "ended with exit code 0"),
        ("#include <no.h>", False, False, "does not compile"),
    ],
)
def test_a_kernel_is_measured(
    bench: KernelBench, source: str, compiled: bool, correct: bool, feedback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "for (;;)" in source:
        settings = bench_settings(gpu=False)
        bench = KernelBench("relu", gpu=False, settings=replace(settings, limits=replace(settings.limits, cpu_s=1.0)))
        found = bench.measure(source)
        bench.close()
    else:
        found = bench.measure(source)
    assert (found.compiled, found.correct, found.speedup > 0) == (compiled, correct, correct), found.feedback
    assert feedback in found.feedback
    assert (found.reward > 0.2) == correct and (found.reward >= 0.1) == compiled


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
async def test_the_model_is_told_what_was_measured_and_the_best_try_counts(box: object) -> None:
    turns = [said("I begin."), said(f"```c\n{HEAD} }}\n```"), said(f"```c\n{RELU}\n```"), said("```c\nint kernel;;)\n```")]
    async with http_server(lambda _, number: turns[number]) as server:
        data = {"messages": [], "label": "relu", "model": "m"}
        found = await kernel_agent.run(data, f"{server.url}/v1", "key")
    assert found["correct"] == 1.0 and found["reward"] > 0.2 and found["speedup"] > 0
    words = [message["content"] for message in server.asked[-1]["messages"] if message["role"] == "user"]
    assert words[1] == kernel_agent.NO_CODE and "largest difference" in words[2] and "Make it faster" in words[3]
