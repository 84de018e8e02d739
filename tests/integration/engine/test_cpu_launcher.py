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


STANDINS = """
import multiprocessing
print("sglang" in sys.modules, multiprocessing.get_start_method(allow_none=True))
try:
    import megatron.core
except ImportError:
    print("hidden")
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


ADAPTERS = """
import random, types
from services.rollout.engine import adapter_segments
launcher.pin_nothing()
import torch
from sglang.srt.lora.backend import chunked_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

adapter_segments.install()
chunked_backend.get_lora = lambda: types.SimpleNamespace(max_lora_chunk_size=16)
backend, rng = chunked_backend.ChunkedSgmvLoRABackend(8, torch.device("cpu"), None), random.Random(0)
backend.init_cuda_graph_batch_info(max_bs_in_cuda_graph=512, num_tokens_per_req=1)
for rows in (1, 2, 15, 17, 128, 505, 511, 512, 512):
    wanted = [rng.randrange(8) for _ in range(rows)]
    batch = types.SimpleNamespace(batch_size=rows, forward_mode=ForwardMode.DECODE, spec_info=None, return_logprob=False)
    backend.prepare_lora_batch(batch, wanted, [8] * 8, [1.0] * 8, True)
    info = backend.batch_info
    bounds = info.seg_indptr.tolist()
    assert bounds[-1] == rows and max(b - a for a, b in zip(bounds, bounds[1:])) <= 16, bounds
    found = {row: int(info.weight_indices[one]) for one in range(40) for row in info.permutation[bounds[one] : bounds[one + 1]].tolist()}
    assert found == dict(enumerate(wanted))
print(len(info.weight_indices), len(bounds))
"""
"""SGLang's bookkeeping of adapters in the graphs of decode steps."""


def test_stand_ins_and_adapters() -> None:
    """An import launches nothing and hides the trainer's library; kernels can be defined and not launched; one that is missing says so.
    Then every row of a decode graph keeps its adapter, in few segments: 512 rows by 16, and one more for each of 8 adapters."""
    at_import, hidden, launched, helpers, missing, cuda, *_, segments = child(STANDINS + ADAPTERS).splitlines()
    assert (at_import, hidden, launched) == ("False None", "hidden", "'function' object is not subscriptable")
    assert helpers == "4 8 True"
    assert missing.startswith("sgl_kernel.silu_and_mul_cpu: PyPI has no CPU build") and cuda == "CUDA names stay missing"
    assert segments == "40 41"
