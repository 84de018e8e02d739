"""The stand-ins of the CPU launcher, in a process that imports it as a spawned child of the engine does."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.rollout.engine.engine_process import CPU_LAUNCHER, engine_site

AS_SPAWNED = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("__mp_main__", {launcher!r})
launcher = importlib.util.module_from_spec(spec)
sys.modules["__mp_main__"] = launcher
spec.loader.exec_module(launcher)
"""


def child(code: str, site: Path | None = None, before: str = "") -> str:
    """What a fresh process prints that has imported the launcher, with ``site`` for the engine site, after ``before``."""
    environment = {"PYTHONPATH": str(site or engine_site()), "PATH": "/usr/bin:/bin"}
    script = before + AS_SPAWNED.format(launcher=str(CPU_LAUNCHER)) + code
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_is_launched_by_an_import() -> None:
    code = "import multiprocessing\nprint('sglang' in sys.modules, multiprocessing.get_start_method(allow_none=True))"
    assert child(code) == "False None"


@pytest.mark.extra  # an engine that starts has imported it so
def test_torchvision_is_whole() -> None:
    """transformers' image classes are imported through it."""
    code = "import torch, torchvision\nfrom torchvision.transforms.v2 import functional\nprint(torch.ops.torchvision.nms.__name__)"
    assert child(code) == "nms"


TORCHVISION = """
import contextlib, pathlib, torch
with contextlib.suppress(OSError):
    torch.ops.load_library(str(pathlib.Path(__file__).with_name("_C.so")))
for name in ("nms", "qnms"):
    torch.library.register_fake("torchvision::" + name)(lambda *tensors: None)
"""
"""What torchvision's import does with its operators."""

REGISTERS = """
import functools, pathlib, torch

@functools.cache
def load_library(path):
    assert pathlib.Path(path).name == "_C.so", path
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return operators

torch.ops.load_library = load_library
"""
"""A loader of an extension that registers operators when it is first loaded; the dispatcher refuses them a second time."""

IMPORTED = "import torch, torchvision\nprint(torch.ops.torchvision.nms.__name__, torch.ops.torchvision.qnms.__name__)"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An engine site with a torchvision whose extension is not a library."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(TORCHVISION)
    (package / "_C.so").write_text("no library\n")
    return tmp_path


def test_operators_that_torchvision_registers_itself_are_left_to_it(site: Path) -> None:
    """As beside torch for CUDA, where a second registration aborts the engine."""
    assert child(IMPORTED, site, REGISTERS) == "nms qnms"


def test_operators_are_declared_where_the_extension_does_not_load(site: Path) -> None:
    assert child(IMPORTED, site) == "nms qnms"


@pytest.mark.extra
def test_operators_are_declared_where_there_is_no_extension(site: Path) -> None:
    (site / "torchvision" / "_C.so").unlink()
    assert child(IMPORTED, site) == "nms qnms"


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
