"""Kernels that a model writes: what each computes, how one is compiled and measured in a sandbox, and what it is worth.

In C where there is no GPU, compiled by ``cc`` and compared with numpy, in turns, by the quickest of several calls, which other work on the
machine has not held up; in Triton where there is one, compared with PyTorch, by the median on the GPU's own clock. Inputs are drawn anew
for each call that is timed, outputs are spoilt before it, and all of them are checked after it. The kernel runs in the process that
measures it: what is measured is honest as long as the kernel does not attack that process.
"""

import importlib.util
import json
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from shared.sandbox.program import REPORT, Program, SandboxLimits, SandboxSettings
from shared.sandbox.sandbox import Sandbox

ROWS, COLUMNS = 256, 1000
CALLS = 15
MOST_SPEEDUP = 4.0
"""The speed-up over the reference beyond which no more is earned."""

REFERENCES = {
    "relu": "lib.maximum(x, zero)",
    "row_sum": "x.sum(-1, keepdims=True) + zero * x",
    "softmax": "(lambda e: e / e.sum(-1, keepdims=True))(lib.exp(x - lib.amax(x, -1, keepdims=True)))",
}
"""What the kernels compute, row by row, of ``x`` [rows, columns]; ``lib`` is numpy or torch."""

C_TASK = """Write a C function that computes {name} of every row:

void kernel(const float *x, float *out, long rows, long columns);

Both arrays are row-major and have rows * columns elements. Answer with the whole file in a block ```c."""

TRITON_TASK = """Write a Python module that computes {name} of every row of a float32 CUDA tensor by a Triton kernel:

def kernel(x: torch.Tensor) -> torch.Tensor

The result has the shape of x. Answer with the whole file in a block ```python."""

_SHARED = f"""
import json, os, statistics
def report(**found):
    os.write({REPORT}, (word + json.dumps(found)).encode())
    os._exit(0)
"""

_C = """
import ctypes, time
import numpy as lib
library = ctypes.CDLL("./kernel.so")
library.kernel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long]
draws, zero = lib.random.default_rng(), lib.float32(0)
reference = eval(f"lambda x: {expression}")
taken, expected, found = ([], []), [], []
for call in range(calls + 2):
    x = draws.standard_normal((rows, columns), dtype=lib.float32)
    out = lib.full_like(x, lib.nan)
    began = time.perf_counter_ns()
    library.kernel(x.ctypes.data, out.ctypes.data, rows, columns)
    between = time.perf_counter_ns()
    right = reference(x)
    ended = time.perf_counter_ns()
    if call >= 2:
        taken[0].append(between - began), taken[1].append(ended - between)
    expected.append(right), found.append(out)
error = max(float(lib.max(lib.abs(lib.nan_to_num(one, nan=1e9) - two))) for one, two in zip(found, expected))
report(error=error, seconds=min(taken[0]) / 1e9, reference_seconds=min(taken[1]) / 1e9)
"""

_TRITON = """
import sys
import torch as lib
sys.path.insert(0, ".")
import kernel as written
zero = lib.zeros((), device="cuda")
reference = eval(f"lambda x: {expression}".replace("keepdims", "keepdim"))
taken, expected, found = ([], []), [], []
for call in range(calls + 5):
    x = lib.randn(rows, columns, device="cuda")
    marks = [lib.cuda.Event(enable_timing=True) for _ in range(3)]
    marks[0].record()
    out = written.kernel(x)
    marks[1].record()
    right = reference(x)
    marks[2].record()
    lib.cuda.synchronize()
    if call >= 5:
        taken[0].append(marks[0].elapsed_time(marks[1])), taken[1].append(marks[1].elapsed_time(marks[2]))
    expected.append(right), found.append(out)
error = max(float((lib.nan_to_num(one.expand_as(two), nan=1e9) - two).abs().max()) for one, two in zip(found, expected))
report(error=error, seconds=statistics.median(taken[0]) / 1e3, reference_seconds=statistics.median(taken[1]) / 1e3)
"""

TOLERANCE = 1e-3


@dataclass(frozen=True)
class Measurement:
    """What came of a kernel. feedback: in words for the model. speedup: over the reference; 0 where the results are wrong."""

    compiled: bool
    correct: bool
    speedup: float
    feedback: str

    @property
    def reward(self) -> float:
        """Returns 0 where it does not compile, 0.1 where it is wrong, else from 0.2 on with its speed-up, up to 1."""
        if not self.correct:
            return 0.1 if self.compiled else 0.0
        return 0.2 + 0.8 * min(self.speedup, MOST_SPEEDUP) / MOST_SPEEDUP


class KernelBench:
    """Measures kernels in one sandbox.

    Args:
        name: a key of `REFERENCES`. gpu: whether kernels are Triton's. settings: of the sandbox; default: `bench_settings`.
    """

    def __init__(self, name: str, gpu: bool, settings: SandboxSettings | None = None) -> None:
        self.name, self.gpu = name, gpu
        self._sandbox = Sandbox(settings or bench_settings(gpu))

    @property
    def task(self) -> str:
        """Returns what the model is asked for."""
        return (TRITON_TASK if self.gpu else C_TASK).format(name=self.name)

    @property
    def languages(self) -> tuple[str, ...]:
        """Returns the languages of a code block that holds a kernel."""
        return ("python", "py") if self.gpu else ("c",)

    def close(self) -> None:
        self._sandbox.close()

    def measure(self, source: str) -> Measurement:
        """Returns what came of a kernel's source. Raises SandboxUnavailable and SandboxGone."""
        self._sandbox.write_file("kernel.py" if self.gpu else "kernel.c", source.encode(errors="replace"))
        if not self.gpu:
            command = ("cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", "kernel.so", "kernel.c", "-lm")
            built = self._sandbox.run(Program(command=command))
            if not built.ok:
                return Measurement(False, False, 0.0, f"It does not compile:\n{built.stderr.decode(errors='replace')[-2000:]}")
        word = secrets.token_hex(16)
        fields = {"word": word, "expression": REFERENCES[self.name], "rows": ROWS, "columns": COLUMNS, "calls": CALLS}
        given = "\n".join(f"{name} = {value!r}" for name, value in fields.items())
        result = self._sandbox.run(Program(sources=(f"{given}\n{_SHARED}", _TRITON if self.gpu else _C)))
        text = result.report.decode(errors="replace")
        if not text.startswith(word):
            said = result.stderr.decode(errors="replace")[-2000:]
            return Measurement(not self.gpu, False, 0.0, f"The program that calls it {result.words()}.\n{said}".strip())
        return _judged(json.loads(text.removeprefix(word)))


def _judged(found: dict[str, float]) -> Measurement:
    if not found["error"] <= TOLERANCE:
        return Measurement(True, False, 0.0, f"It computes something else: the largest difference is {found['error']:.3g}.")
    speedup = found["reference_seconds"] / max(found["seconds"], 1e-9)
    feedback = f"It is right, and takes {1e6 * found['seconds']:.0f} µs: {speedup:.2f} times the reference's speed. Make it faster."
    return Measurement(True, True, speedup, feedback)


def has_gpu() -> bool:
    """Returns whether kernels can be Triton's here."""
    return Path("/dev/nvidia0").exists() and all(importlib.util.find_spec(name) is not None for name in ("torch", "triton"))


def bench_settings(gpu: bool) -> SandboxSettings:
    """Returns the sandbox of a bench. CUDA maps far more memory than it uses, starts many threads, and compiles for a while."""
    limits = SandboxLimits(wall_s=60.0, cpu_s=20.0, memory_bytes=1 << 30)
    if not gpu:
        return SandboxSettings(limits=limits, packages=True, lease_s=600.0)
    limits = replace(limits, wall_s=300.0, cpu_s=240.0, memory_bytes=32 << 30, processes=512, disk_bytes=512 << 20, open_files=4096)
    devices = tuple(path for path in sorted(Path("/dev").glob("nvidia*")) if path.is_char_device())
    return SandboxSettings(limits=limits, packages=True, devices=devices, lease_s=600.0)
