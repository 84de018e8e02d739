"""Compiles the kernels of a starting engine all at once, in a process of their own, beside the engine's imports.

    python -P -m services.rollout.engine.kernel_builds --model-path MODEL ...    (the engine's flags)

An engine with empty caches otherwise compiles one kernel after the other while it captures its CUDA graphs: 51 of 70 s with one core at
work. Which kernels, and for which sizes, follows from the checkpoint's config.json and from flags, as SGLang has them (``srt/models``,
``srt/layers``, ``srt/mem_cache/memory_pool.py``); a kernel too many costs a few seconds of one core. Left out: FlashInfer's kernels of
attention, whose generated sources are written outside of its lock, and those of Triton and FlashAttention 3, which need no nvcc.

This process asks the libraries themselves for the kernels, which makes their directories, holds their locks and leaves what the engine then
finds; the engine knows nothing of it. What comes too late, fails or was not foreseen, the engine compiles itself, and where a build is
under way it waits for its lock rather than to begin again:

- FlashInfer holds one lock for building and loading.
- SGLang up to 0.5.16 holds tvm_ffi's lock for building, but first loads without it a library that is there. GNU ld writes the ELF header
  last (lld and mold rename a finished file): a library that is being linked is refused by the loader, and SGLang then goes for the lock.
- Later releases build in another directory, and rename it.

All of these locks are the kernel's (flock): they end with their process. This one is killed with the engine, and ends by a deadline.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.rollout.engine.early_processes import DATA, NODES, TENSOR, engine_flags, flag_number
from shared.process.child_process import ChildProcess
from shared.process.parent_watchdog import kill_descendants
from shared.runtime import quick_imports

Argument = int | bool | str

TVM_FFI_CACHE, FLASHINFER_CACHE = "TVM_FFI_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
_OTHER_NAMES = {"half": "float16", "float": "float32"}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# The sizes of a head for which there is a fused kernel of the rotary embedding, and of the norms of queries and keys.
_FUSED_ROTARY, _FUSED_NORMS = (64, 128, 256, 512), (64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class JitKernel:
    """One kernel that is compiled when a Python function asks for it.

    ``name``: for the log. ``cache``: the variable that names the directory where it is kept. ``ways``: ``module:function`` and its
    arguments in one release and another of its library; the first whose function exists is taken. An argument that begins with ``torch.``
    is a data type. ``unless_false``: ``module:attribute`` that is false where the library does without this kernel."""

    name: str
    cache: str
    ways: tuple[tuple[str, tuple[Argument, ...]], ...]
    unless_false: str = ""


def jit_kernels(config: Mapping[str, Any], arguments: Sequence[str]) -> list[JitKernel]:
    """Returns the kernels for a model, those that take longest first.

    ``config``: the checkpoint's config.json; empty where it is not known: what depends on it is left out. ``arguments``: the engine's, as
    on its command line. Raises KeyError, ValueError or TypeError where sizes are missing or no numbers."""
    flags = engine_flags(arguments)
    found = []
    model = config.get("text_config") or config
    dtype = _dtype(flags.get("dtype") or "auto", model)
    if dtype != "float32":
        found.append(JitKernel("norm", FLASHINFER_CACHE, (("flashinfer.norm:get_norm_module", ()),), "flashinfer.norm:_USE_CUDA_NORM"))
    ranks = flag_number(flags, TENSOR)
    if ranks > 1 and flag_number(flags, NODES) == 1:
        found.append(_sglang("custom_all_reduce", "communication", "get_all_reduce_module", (f"torch.{dtype}", ranks), module="all_reduce"))
        found += [_sglang(name, "communication", f"_init_{name}", (), module="all_reduce") for name in ("communicator", "ipc_manager")]
    found.append(_sglang("clamp_position", "attention", "_jit_clamp_position_module", ("torch.int64",)))
    if model:
        element = f"torch.{dtype}"
        newer = ("sglang.kernels.ops.activation.activation:activation_module", (element,))
        older = ("sglang.jit_kernel.activation:_jit_activation_module", (element,))
        found.append(JitKernel("activation", TVM_FFI_CACHE, (newer, older)))
        if "kv_lora_rank" not in model:  # latent attention has kernels of its own
            found += _attention(model, flags, dtype)
        found = _of_integers(model.get("quantization_config") or config.get("quantization_config") or {}, model, element) + found
    if flags.get("sampling-backend", "flashinfer") == "flashinfer":
        found.append(JitKernel("sampling", FLASHINFER_CACHE, (("flashinfer.sampling:get_sampling_module", ()),)))
    return found


def _of_integers(entry: Mapping[str, Any], model: Mapping[str, Any], element: str) -> list[JitKernel]:
    """Returns the kernels for 4-bit weights; products take by far the longest of all: 300 s on one core."""
    method = entry.get("quant_method")
    if method not in ("awq", "compressed-tensors"):
        return []
    repack = "awq_marlin_repack" if method == "awq" else "gptq_marlin_repack"
    products = ["gptq_marlin", *(["moe_wna16_marlin"] if any(model.get(name) for name in _EXPERTS) else [])]
    named = [*((name, (element,)) for name in products), (repack, ())]
    return [_sglang(name, "quantization", f"_jit_{name}_module", arguments) for name, arguments in named]


def _attention(model: Mapping[str, Any], flags: Mapping[str, str], dtype: str) -> list[JitKernel]:
    heads = int(model["num_attention_heads"])
    size = int(model.get("head_dim") or model["hidden_size"] // heads)
    element = f"torch.{dtype}"
    found: list[JitKernel] = []
    if size in _FUSED_ROTARY:
        further = model.get("rope_parameters") or {}
        width = int(size * float(model.get("partial_rotary_factor") or further.get("partial_rotary_factor") or 1.0))
        newer = ("sglang.kernels.ops.attention.rope:_jit_fused_rope_module", (True, width, element, element))
        older = ("sglang.jit_kernel.rope:_jit_fused_rope_module", (True, width, element))
        found.append(JitKernel("fused_rope", TVM_FFI_CACHE, (newer, older)))
    else:
        found.append(_sglang("rotary_embedding", "attention", "_jit_rotary_embedding_module", (), module="rope"))
    if size in _FUSED_NORMS and (str(model.get("model_type")).startswith("qwen3") or model.get("use_qk_norm")):
        found.append(_sglang("qknorm", "layernorm", "_jit_qknorm_module", (size, element), module="norm"))
    ranks = flag_number(flags, TENSOR) // (flag_number(flags, DATA) if "enable-dp-attention" in flags else 1)
    own = max(1, int(model.get("num_key_value_heads") or heads) // max(1, ranks))
    row = own * size * _BYTES.get(flags.get("kv-cache-dtype", "auto"), _BYTES[dtype])
    both = ("sglang.kernels.ops.kvcache.kvcache:_jit_kvcache_module", (row, row))  # of keys and of values
    one = ("sglang.jit_kernel.kvcache:_jit_kvcache_module", (row,))
    return [*found, JitKernel("kvcache", TVM_FFI_CACHE, (both, one))]


def _sglang(name: str, folder: str, function: str, arguments: tuple[Argument, ...], *, module: str = "") -> JitKernel:
    """Returns a kernel of SGLang's whose function takes the same arguments in the releases that have it here and there."""
    places = (f"sglang.kernels.ops.{folder}.{module or name}", f"sglang.jit_kernel.{module or name}")
    return JitKernel(name, TVM_FFI_CACHE, tuple((f"{place}:{function}", arguments) for place in places))


def _dtype(flag: str, model: Mapping[str, Any]) -> str:
    """Returns the data type in which an engine computes: its ``auto`` is the checkpoint's own, but float16 for float32."""
    if (chosen := _OTHER_NAMES.get(flag, flag)) != "auto":
        return chosen
    own = str(model.get("dtype") or model.get("torch_dtype") or ("float32" if model else "bfloat16")).removeprefix("torch.")
    return "float16" if own == "float32" else own


BUILD_SECONDS = 600.0  # when this process gives up, and lets go of the locks on which an engine may wait

# nvcc's variable, and what is in it unless it is set: the kernels of one file are optimised side by side. FlashInfer's norms, which all
# others are done before, took 24 s with it and 30 s without, on the same H200's host.
COMPILER_FLAGS = ("NVCC_APPEND_FLAGS", "--split-compile=0")

NICENESS = 5  # an engine may wait for what is built here: not so low that it would never be done on busy cores
PACKAGES = ("sglang", "flashinfer-python", "apache-tvm-ffi", "torch")  # those whose versions say whether kernels are still the same
_SGLANG = "sglang."
_ARCHITECTURES = ("sglang.kernels.jit.utils", "sglang.jit_kernel.utils")
_NAME = "services.rollout.engine.kernel_builds"
_GPUS = Path("/proc/driver/nvidia/gpus")


def begin_kernel_builds(arguments: Sequence[str]) -> ChildProcess | None:
    """Starts the builds of an engine, whose log they share; None where there is nothing to build, or no compiler. Raises nothing. To be
    called in the main thread of the engine's launcher: they end with it. ``arguments``: the engine's, as on its command line."""
    try:
        if compiler(os.environ) is None or not missing_kernels(arguments, os.environ):
            return None
        return ChildProcess("kernel builds", [sys.executable, "-P", "-m", _NAME, *arguments], None, inherit=True)
    except Exception as error:  # an engine that starts later is better than none
        say(f"not begun: {error!r}")
        return None


def compiler(environment: Mapping[str, str]) -> Path | None:
    """Returns where the libraries find nvcc, None without one."""
    if home := environment.get("CUDA_HOME") or environment.get("CUDA_PATH"):
        return found if (found := Path(home, "bin", "nvcc")).is_file() else None
    on_path, usual = shutil.which("nvcc", path=environment.get("PATH")), Path("/usr/local/cuda/bin/nvcc")
    return Path(on_path) if on_path else usual if usual.is_file() else None


def missing_kernels(arguments: Sequence[str], environment: Mapping[str, str]) -> list[JitKernel]:
    """Returns the kernels of an engine in whose cache no mark says that it has them. A cache that no one has named is no one's to fill."""
    file = Path(engine_flags(arguments).get("model-path") or ".", "config.json")
    config: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    kernels = [kernel for kernel in jit_kernels(config, arguments) if environment.get(kernel.cache)]
    caches = {kernel.cache for kernel in kernels}
    marked = {cache for cache in caches if mark(kernels, cache, environment).is_file()}
    return [kernel for kernel in kernels if kernel.cache not in marked]


def mark(kernels: Sequence[JitKernel], cache: str, environment: Mapping[str, str]) -> Path:
    """Returns the file that says that a cache has these kernels, for these GPUs and by these versions of the libraries."""
    versions = dict[str, str]()
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    gpus = sorted({line for file in _GPUS.glob("*/information") for line in file.read_text().splitlines() if line.startswith("Model")})
    reported = repr(([kernel for kernel in kernels if kernel.cache == cache], versions, gpus))
    return Path(environment[cache], f"myxo-{hashlib.sha256(reported.encode()).hexdigest()[:16]}.built")


def build_of(kernel: JitKernel) -> Callable[[], object] | None:
    """Imports what compiles a kernel, and returns the call; None where the library is not there, or does without it. Raises LookupError
    where this release has no such function, and what the import raises otherwise."""
    library = kernel.ways[0][0].partition(":")[0].partition(".")[0]
    if importlib.util.find_spec(library) is None:
        return None
    if kernel.unless_false and getattr(*_place(kernel.unless_false), True) is False:
        return None
    refused = []
    for name, arguments in kernel.ways:
        try:
            function = getattr(*_place(name))
        except (ImportError, AttributeError) as error:
            refused.append(str(error))
            continue
        if name.startswith(_SGLANG):
            _tell_architecture()
        return functools.partial(function, *map(_value, arguments))
    raise LookupError(f"this release has no such function: {'; '.join(refused)}")


def build_all(kernels: Sequence[JitKernel], environment: Mapping[str, str], seconds: float) -> dict[str, str]:
    """Builds kernels side by side, on half of the cores at most, and marks the caches that have all of theirs. Returns what went wrong, by
    kernel. Those that have not ended after ``seconds`` still run then."""
    begun, failed, took = time.monotonic(), dict[str, str](), dict[str, float]()
    pool = concurrent.futures.ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2))
    builds: dict[concurrent.futures.Future[float], str] = {}
    for kernel in kernels:  # what threads import side by side may be seen half made
        try:
            if (call := build_of(kernel)) is not None:
                builds[pool.submit(_seconds_of, call)] = kernel.name
        except Exception as error:
            failed[kernel.name] = f"{type(error).__name__}: {error}"
    done, late = concurrent.futures.wait(builds, max(0.0, begun + seconds - time.monotonic()))
    for one in done:
        try:
            took[builds[one]] = one.result()
        except Exception as error:
            failed[builds[one]] = f"{type(error).__name__}: {error}"
    failed |= {builds[one]: f"not built after {seconds:g} s" for one in late}
    for cache in {kernel.cache for kernel in kernels} - {kernel.cache for kernel in kernels if kernel.name in failed}:
        Path(environment[cache]).mkdir(parents=True, exist_ok=True)
        mark(kernels, cache, environment).touch()
    built = ", ".join(f"{name} in {took[name]:.1f} s" for name in sorted(took, key=took.__getitem__, reverse=True))
    say(f"{time.monotonic() - begun:.1f} s beside the engine's start, {built or 'nothing to build'}")
    pool.shutdown(wait=False, cancel_futures=True)
    return failed


def say(words: str) -> None:
    """Writes a line to the engine's log, which begins as SGLang's lines do."""
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] Kernel builds: {words}", file=sys.stderr, flush=True)


def _seconds_of(call: Callable[[], object]) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


def _place(name: str) -> tuple[Any, str]:
    module, _, attribute = name.partition(":")
    return importlib.import_module(module), attribute


def _value(argument: int | bool | str) -> Any:
    if isinstance(argument, str) and argument.startswith("torch."):
        return getattr(importlib.import_module("torch"), argument.removeprefix("torch."))
    return argument


@functools.cache
def _tell_architecture() -> None:
    """Tells tvm_ffi for which GPUs to compile, once for all threads. SGLang 0.5.16 sets this variable for the time of each build, and takes
    it away afterwards, from those that still need it."""
    for name in _ARCHITECTURES:
        with contextlib.suppress(ImportError):
            os.environ["TVM_FFI_CUDA_ARCH_LIST"] = importlib.import_module(name).get_jit_cuda_arch().target_name
            return


def main(arguments: Sequence[str]) -> None:
    """Builds what the caches lack, and ends, with whatever it has started."""
    os.nice(NICENESS)
    os.environ.setdefault("MAX_JOBS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    os.environ.setdefault(*COMPILER_FLAGS)
    with quick_imports():
        failed = build_all(missing_kernels(arguments, os.environ), os.environ, BUILD_SECONDS)
    for name, reason in failed.items():
        say(f"{name} is left to the engine: {' '.join(reason.split())[-1000:]}")
    kill_descendants(os.getpid())  # compilers that are late would continue after the end of their locks
    os._exit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
