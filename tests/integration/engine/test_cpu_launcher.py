"""The stand-ins of the CPU launcher, in a process that imports it as a spawned child of the engine does."""

from __future__ import annotations

import subprocess
import sys

from services.rollout.engine.command import CPU_LAUNCHER, engine_site

AS_SPAWNED = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("__mp_main__", {launcher!r})
launcher = importlib.util.module_from_spec(spec)
sys.modules["__mp_main__"] = launcher
spec.loader.exec_module(launcher)
"""


def child(code: str) -> str:
    """What a fresh process prints that has imported the launcher."""
    environment = {"PYTHONPATH": str(engine_site()), "PATH": "/usr/bin:/bin"}
    script = AS_SPAWNED.format(launcher=str(CPU_LAUNCHER)) + code
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_is_launched_by_an_import() -> None:
    code = "import multiprocessing\nprint('sglang' in sys.modules, multiprocessing.get_start_method(allow_none=True))"
    assert child(code) == "False None"


def test_torchvision_is_whole() -> None:
    """transformers' image classes are imported through it."""
    code = "import torch, torchvision\nfrom torchvision.transforms.v2 import functional\nprint(torch.ops.torchvision.nms.__name__)"
    assert child(code) == "nms"


def test_kernels_can_be_defined_but_not_launched() -> None:
    code = """
import triton, triton.language as tl
from triton.runtime.autotuner import OutOfResources
from triton.runtime.jit import KernelInterface

@triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_warps=4)], key=["n"])
@triton.jit
def kernel(x, BLOCK: tl.constexpr):
    return tl.load(x)

class Mine(KernelInterface[int]):
    pass

try:
    kernel[(1,)](3)
except TypeError as error:
    print(error)
print(triton.cdiv(7, 2), triton.next_power_of_2(5), issubclass(OutOfResources, Exception))
"""
    assert child(code).splitlines() == ["'function' object is not subscriptable", "4 8 True"]


def test_a_missing_kernel_says_what_is_missing() -> None:
    code = """
from sgl_kernel import silu_and_mul_cpu
try:
    silu_and_mul_cpu()
except NotImplementedError as error:
    print(error)
try:
    from sgl_kernel import silu_and_mul
except ImportError:
    print("CUDA names stay missing")
"""
    first, second = child(code).splitlines()
    assert first.startswith("sgl_kernel.silu_and_mul_cpu: PyPI has no CPU build")
    assert second == "CUDA names stay missing"


def test_the_trainers_library_is_hidden() -> None:
    assert child("try:\n    import megatron.core\nexcept ImportError:\n    print('hidden')") == "hidden"
