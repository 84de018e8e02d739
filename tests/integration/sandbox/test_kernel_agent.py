"""The example that measures kernels: in C, compiled and timed in a real sandbox. What the model says is written here."""

import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest

from examples.coding import kernel_agent
from examples.coding.kernels import KernelBench, bench_settings
from tests.integration.sandbox.test_coding_agent import said
from tests.support.http_server import http_server

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

HEAD = "void kernel(const float *x, float *out, long rows, long columns) {"
RELU = f"{HEAD} for (long i = 0; i < rows * columns; i++) out[i] = x[i] > 0 ? x[i] : 0; }}"


@pytest.fixture(scope="module")
def bench(box: object) -> Iterator[KernelBench]:
    opened = KernelBench("relu", gpu=False)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("source", "compiled", "correct", "feedback"),
    [
        (RELU, True, True, "times the reference's speed"),
        pytest.param(
            f"{HEAD} for (long i = 0; i < rows * columns; i++) out[i] = x[i]; }}",
            True,
            False,
            "the largest difference is",
            marks=pytest.mark.extra,
        ),
        pytest.param(f"{HEAD} }}", True, False, "the largest difference is 1e+09", marks=pytest.mark.extra),
        (f"{HEAD} *(int *)0 = 1; }}", True, False, "ended by signal 11"),
        pytest.param(f"{HEAD} for (;;) ; }}", True, False, "ran out of", marks=pytest.mark.extra),
        pytest.param(f"{HEAD} __builtin_exit(0); }}", True, False, "ended with exit code 0", marks=pytest.mark.extra),
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


async def test_the_model_is_told_what_was_measured_and_the_best_try_counts(box: object) -> None:
    turns = [said("I begin."), said(f"```c\n{HEAD} }}\n```"), said(f"```c\n{RELU}\n```"), said("```c\nint kernel;;)\n```")]
    async with http_server(lambda _, number: turns[number]) as server:
        data = {"messages": [], "label": "relu", "model": "m"}
        found = await kernel_agent.run(data, f"{server.url}/v1", "key")
    assert found["correct"] == 1.0 and found["reward"] > 0.2 and found["speedup"] > 0
    words = [message["content"] for message in server.asked[-1]["messages"] if message["role"] == "user"]
    assert words[1] == kernel_agent.NO_CODE and "largest difference" in words[2] and "Make it faster" in words[3]
