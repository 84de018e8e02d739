"""Kernels: which ones an engine needs, and that they are built beside its start."""

import ast
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.rollout.engine.early_processes import engine_flags
from services.rollout.engine.kernel_builds import (
    FLASHINFER_CACHE,
    TVM_FFI_CACHE,
    Argument,
    JitKernel,
    begin_kernel_builds,
    build_all,
    build_of,
    compiler,
    jit_kernels,
    missing_kernels,
)
from tests.support.tables import table
from tests.support.waiting import wait_until

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
        wait_until((libraries / FLASHINFER_CACHE / "norm").exists, "a build")
        assert Path(f"/proc/{pid}").exists()
    finally:
        engine.send_signal(signal.SIGKILL)
        engine.wait(SECONDS)
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text(), "its end")


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


# --- an engine's kernels are told by its model and its flags, as SGLang's own code chooses them

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
"""Of Qwen3-0.6B."""
SMOLLM2 = {"model_type": "llama", "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "torch_dtype": "bfloat16"}
DENSE = ["norm", "clamp_position", "activation", "fused_rope", "qknorm", "kvcache"]


def arguments_of(config: dict[str, Any], *flags: str) -> dict[str, tuple[Argument, ...]]:
    """Kernel → the arguments of SGLang 0.5.16's function, or of the only one."""
    return {kernel.name: kernel.ways[-1][1] for kernel in jit_kernels(config, flags)}


def test_a_dense_model_has_its_sizes_in_its_kernels() -> None:
    found = arguments_of(QWEN3, "--sampling-backend", "pytorch")
    assert list(found) == DENSE
    assert found["qknorm"] == (128, "torch.bfloat16")
    assert found["fused_rope"] == (True, 128, "torch.bfloat16")
    assert found["kvcache"] == (8 * 128 * 2,)
    assert found["clamp_position"] == ("torch.int64",)


def test_sampling_is_flashinfers_where_no_flag_says_otherwise() -> None:
    assert list(arguments_of(QWEN3)) == [*DENSE, "sampling"]


def test_4_bit_weights_are_multiplied_by_kernels_that_are_compiled_first() -> None:
    model = {**QWEN3, "num_experts": 8, "quantization_config": {"quant_method": "compressed-tensors"}}
    assert list(arguments_of(model))[:3] == ["gptq_marlin", "moe_wna16_marlin", "gptq_marlin_repack"]
    assert arguments_of(model)["gptq_marlin"] == ("torch.bfloat16",)
    assert list(arguments_of({**QWEN3, "quantization_config": {"quant_method": "awq"}}))[:2] == ["gptq_marlin", "awq_marlin_repack"]


def test_a_model_without_norms_of_queries_and_keys_has_no_kernel_of_them() -> None:
    found = arguments_of(SMOLLM2, "--sampling-backend", "pytorch")
    assert "qknorm" not in found
    assert found["fused_rope"] == (True, 64, "torch.bfloat16") and found["kvcache"] == (3 * 64 * 2,)


@table(
    ("flags", "row"),
    [
        (["--tp-size", "4"], 2 * 128 * 2),
        (["--tensor-parallel-size=16"], 128 * 2),
        (["--tp-size", "4", "--dp-size", "4", "--enable-dp-attention"], 8 * 128 * 2),
        (["--kv-cache-dtype", "fp8_e4m3"], 8 * 128),
        (["--dtype", "float"], 8 * 128 * 4),
    ],
)
def test_the_rows_of_the_cache_are_those_of_one_rank(flags: list[str], row: int) -> None:
    found = {kernel.name: kernel.ways for kernel in jit_kernels(QWEN3, flags)}
    assert [arguments for _, arguments in found["kvcache"]] == [(row, row), (row,)]


def test_ranks_of_one_node_sum_by_kernels_of_their_own() -> None:
    found = arguments_of(QWEN3, "--tp-size", "2")
    assert found["custom_all_reduce"] == ("torch.bfloat16", 2) and found["communicator"] == found["ipc_manager"] == ()
    assert "custom_all_reduce" not in arguments_of(QWEN3) | arguments_of(QWEN3, "--tp-size", "2", "--nnodes", "2")


def test_a_checkpoint_in_float32_is_computed_in_float16() -> None:
    assert arguments_of(QWEN3 | {"torch_dtype": "float32"})["activation"] == ("torch.float16",)
    assert arguments_of(QWEN3 | {"torch_dtype": "float32"}, "--dtype", "half")["activation"] == ("torch.float16",)
    assert "norm" not in arguments_of(QWEN3, "--dtype", "float32"), "FlashInfer's are of half precision"


def test_heads_of_unusual_sizes_and_parts_of_heads_are_rotated_otherwise() -> None:
    assert arguments_of(QWEN3 | {"head_dim": 80})["rotary_embedding"] == ()
    assert arguments_of(QWEN3 | {"rope_parameters": {"partial_rotary_factor": 0.5}})["fused_rope"][1] == 64


def test_text_is_part_of_larger_models_and_latent_attention_has_other_kernels() -> None:
    assert arguments_of({"model_type": "qwen3_vl", "text_config": QWEN3})["kvcache"] == (2048,)
    assert list(arguments_of(QWEN3 | {"kv_lora_rank": 512}, "--sampling-backend", "pytorch")) == DENSE[:3]


def test_of_an_unknown_model_only_what_all_models_have_is_built() -> None:
    assert list(arguments_of({})) == ["norm", "clamp_position", "sampling"]


def test_flags_have_their_first_value() -> None:
    assert engine_flags(["--port", "1", "--bare", "--many", "2", "3", "--with_line=x"]) == {
        "port": "1",
        "bare": "",
        "many": "2",
        "with-line": "x",
    }


@table("kernel", [k for k in jit_kernels(QWEN3, ["--tp", "2"]) + jit_kernels(QWEN3 | {"head_dim": 80}, []) if k.cache == TVM_FFI_CACHE])
def test_the_installed_release_has_the_function(kernel: JitKernel) -> None:
    """It is read, not imported: that takes seconds and a GPU."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    places = [
        (root.parent / f"{name.partition(':')[0].replace('.', '/')}.py", name.partition(":")[2], len(given)) for name, given in kernel.ways
    ]
    file, function, count = next(place for place in places if place[0].is_file())
    (found,) = [one for one in ast.parse(file.read_text()).body if isinstance(one, ast.FunctionDef) and one.name == function]
    assert len(found.args.args) == count
