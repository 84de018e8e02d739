"""Kernels are built beside an engine's start, by a process that ends with it, fails alone, and is not begun for nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.rollout.engine.kernel_builds import (
    FLASHINFER_CACHE,
    TVM_FFI_CACHE,
    JitKernel,
    begin_kernel_builds,
    build_all,
    build_of,
    compiler,
    missing_kernels,
)

ROOT = Path(__file__).parents[3]
SECONDS = 60.0

NORM = """
import os, pathlib
_USE_CUDA_NORM = True
def get_norm_module():
    pathlib.Path(os.environ["FLASHINFER_WORKSPACE_BASE"], "norm").write_text(str(os.nice(0)))
"""
SLOW_NORM = """
import os, pathlib, time
def get_norm_module():
    pathlib.Path(os.environ["FLASHINFER_WORKSPACE_BASE"], "norm").touch()
    time.sleep(600)
"""
CLAMP = """
import os, pathlib
def _jit_clamp_position_module(dtype):
    pathlib.Path(os.environ["TVM_FFI_CACHE_DIR"], "clamp").write_text(f"{dtype} {os.environ['TVM_FFI_CUDA_ARCH_LIST']}")
"""
ARCHITECTURE = """
import types
def get_jit_cuda_arch():
    return types.SimpleNamespace(target_name="9.0a")
"""
SERVER = """
import os, pathlib, time
end = time.monotonic() + 60
while not all(any(pathlib.Path(os.environ[name]).glob("*.built")) for name in ("TVM_FFI_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")):
    assert time.monotonic() < end
    time.sleep(0.02)
"""
PARENT = """
import sys, time
from services.rollout.engine.kernel_builds import begin_kernel_builds
print(begin_kernel_builds(sys.argv[1:]).pid, flush=True)
time.sleep(600)
"""


def wait_until(met: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not met():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """FlashInfer and SGLang that write a line where they would compile, and a compiler, which nobody runs; caches are empty."""
    files = {
        "flashinfer/norm.py": NORM,
        "flashinfer/__init__.py": "",
        "torch/__init__.py": "int64 = 'int64'",
        "torch/distributed/__init__.py": "class TCPStore: ...\nclass HashStore: ...\nclass Store: ...\nclass DistStoreError: ...",
        "torch/distributed/rendezvous.py": "",
        "sglang/__init__.py": "",
        "sglang/launch_server.py": SERVER,
        "sglang/srt/__init__.py": "",
        "sglang/srt/entrypoints/__init__.py": "",
        "sglang/srt/entrypoints/http_server.py": "",
        "sglang/jit_kernel/__init__.py": "",
        "sglang/jit_kernel/clamp_position.py": CLAMP,
        "sglang/jit_kernel/utils.py": ARCHITECTURE,
        "cuda/bin/nvcc": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for variable in (FLASHINFER_CACHE, TVM_FFI_CACHE):
        (tmp_path / variable).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    return tmp_path


ARGUMENTS = ["--model-path", "someone/somewhere", "--sampling-backend", "pytorch"]
"""Of a model that is not there: its kernels are the norm and the positions."""


def test_what_a_cache_lacks_is_built_by_a_process_of_its_own_and_only_once(libraries: Path, capfd: pytest.CaptureFixture[str]) -> None:
    builds = begin_kernel_builds(ARGUMENTS)
    assert builds is not None
    assert builds.wait(SECONDS) == 0
    assert int((libraries / FLASHINFER_CACHE / "norm").read_text()) == min(19, os.nice(0) + 5)
    assert (libraries / TVM_FFI_CACHE / "clamp").read_text() == "int64 9.0a"
    said = capfd.readouterr().err
    assert "Kernel builds: " in said and "norm in " in said and "clamp_position in " in said and "left to the engine" not in said
    assert begin_kernel_builds(ARGUMENTS) is None, "both caches are marked"
    (libraries / "config.json").write_text(json.dumps({"hidden_size": 256, "num_attention_heads": 4}))
    missing = missing_kernels(["--model-path", str(libraries), *ARGUMENTS[2:]], os.environ)
    assert "kvcache" in [kernel.name for kernel in missing], "another model has others"


def test_an_engines_launcher_begins_them(libraries: Path) -> None:
    launcher = ROOT / "services/rollout/engine/gpu_launcher.py"
    ended = subprocess.run([sys.executable, str(launcher), *ARGUMENTS], capture_output=True, text=True, timeout=2 * SECONDS)
    assert ended.returncode == 0, ended.stderr  # its server waits for both marks
    assert "Kernel builds: " in ended.stderr


def test_a_build_that_fails_is_left_to_the_engine_and_tried_again(libraries: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (libraries / "flashinfer/norm.py").write_text("def get_norm_module():\n    raise RuntimeError('ninja: build stopped')")
    builds = begin_kernel_builds(ARGUMENTS)
    assert builds is not None
    assert builds.wait(SECONDS) == 1
    assert "norm is left to the engine: RuntimeError: ninja: build stopped" in capfd.readouterr().err
    assert (libraries / TVM_FFI_CACHE / "clamp").exists()
    assert [kernel.name for kernel in missing_kernels(ARGUMENTS, os.environ)] == ["norm"]


def test_nothing_is_begun_without_a_compiler_or_a_cache(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler(os.environ) == libraries / "cuda/bin/nvcc"
    (libraries / "cuda/bin/nvcc").unlink()
    assert compiler(os.environ) is None and begin_kernel_builds(ARGUMENTS) is None
    (libraries / "cuda/bin/nvcc").touch()
    for variable in (FLASHINFER_CACHE, TVM_FFI_CACHE):
        monkeypatch.delenv(variable)
    assert begin_kernel_builds(ARGUMENTS) is None


def test_an_engine_starts_also_where_the_kernels_cannot_be_told(libraries: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (libraries / "config.json").write_text("{")
    assert begin_kernel_builds(["--model-path", str(libraries)]) is None
    assert "Kernel builds: not begun: JSONDecodeError" in capfd.readouterr().err


def test_the_builds_end_with_their_engine(libraries: Path) -> None:
    (libraries / "flashinfer/norm.py").write_text(SLOW_NORM)
    engine = subprocess.Popen([sys.executable, "-c", PARENT, *ARGUMENTS], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        wait_until((libraries / FLASHINFER_CACHE / "norm").exists)
        assert Path(f"/proc/{pid}").exists()
    finally:
        engine.send_signal(signal.SIGKILL)
        engine.wait(SECONDS)
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text())


def test_a_late_build_is_not_waited_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    late = JitKernel("late", TVM_FFI_CACHE, (("time:sleep", (2,)),))
    assert build_all([late], {TVM_FFI_CACHE: str(tmp_path)}, 0.0) == {"late": "not built after 0 s"}
    assert "nothing to build" in capfd.readouterr().err and not list(tmp_path.iterdir())


def test_a_library_may_be_missing_or_do_without_a_kernel_but_not_without_its_function(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "compiled_elsewhere.py").write_text("JIT = False\nSOME = None\ndef module(): ...")
    monkeypatch.syspath_prepend(tmp_path)
    assert build_of(JitKernel("a", TVM_FFI_CACHE, (("not_installed.norm:module", ()),))) is None
    assert build_of(JitKernel("b", TVM_FFI_CACHE, (("compiled_elsewhere:module", ()),), "compiled_elsewhere:JIT")) is None
    assert build_of(JitKernel("c", TVM_FFI_CACHE, (("compiled_elsewhere:module", ()),), "compiled_elsewhere:SOME")) is not None
    with pytest.raises(LookupError, match="no such function"):
        build_of(JitKernel("d", TVM_FFI_CACHE, (("compiled_elsewhere:other", ()), ("compiled_elsewhere.new:module", ()))))
