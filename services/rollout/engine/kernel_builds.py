"""Compiles the kernels of a starting engine all at once, in a process of their own, beside the engine's imports.

    python -P -m services.rollout.engine.kernel_builds --model-path MODEL ...    (the engine's flags)

An engine with empty caches otherwise compiles one kernel after the other while it captures its CUDA graphs: 51 of 70 s with one core at
work. This process asks the libraries themselves for the kernels that the model will need (`services.rollout.engine.jit_kernels`), which
makes their directories, holds their locks and leaves what the engine then finds; the engine knows nothing of it. What comes too late, fails
or was not foreseen, the engine compiles itself, and where a build is under way it waits for its lock rather than to begin again:

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
from pathlib import Path
from typing import Any

from services.rollout.engine.flag_values import engine_flags
from services.rollout.engine.jit_kernels import JitKernel, jit_kernels
from shared.process.child_process import ChildProcess
from shared.process.parent_watchdog import kill_descendants
from shared.runtime.quick_imports import quick_imports

BUILD_SECONDS = 300.0
"""When this process gives up, and lets go of the locks on which an engine may wait."""

COMPILER_FLAGS = ("NVCC_APPEND_FLAGS", "--split-compile=0")
"""nvcc's variable, and what is in it unless it is set: the kernels of one file are optimised side by side. FlashInfer's norms, which all
others are done before, took 24 s with it and 30 s without, on the same H200's host."""

NICENESS = 5
"""An engine may wait for what is built here: not so low that it would never be done on busy cores."""

PACKAGES = ("sglang", "flashinfer-python", "apache-tvm-ffi", "torch")
"""Those whose versions say whether kernels are still the same."""

_SGLANG = "sglang."
_ARCHITECTURES = ("sglang.kernels.jit.utils", "sglang.jit_kernel.utils")
_NAME = "services.rollout.engine.kernel_builds"
_GPUS = Path("/proc/driver/nvidia/gpus")


def begin_kernel_builds(arguments: Sequence[str]) -> ChildProcess | None:
    """Starts the builds of an engine, whose log they share; None where there is nothing to build, or no compiler. Raises nothing.

    To be called in the main thread of the engine's launcher: they end with it.

    Args:
        arguments: the engine's, as on its command line.
    """
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
    """Returns the kernels of an engine in whose cache no mark says that it has them. A cache that nobody has named is nobody's to fill."""
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
    told = repr(([kernel for kernel in kernels if kernel.cache == cache], versions, gpus))
    return Path(environment[cache], f"myxo-{hashlib.sha256(told.encode()).hexdigest()[:16]}.built")


def build_of(kernel: JitKernel) -> Callable[[], object] | None:
    """Imports what compiles a kernel, and returns the call; None where the library is not there, or does without it.

    Raises LookupError where this release has no such function, and what the import raises otherwise.
    """
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
    """Builds kernels side by side, on half of the cores at most, and marks the caches that have all of theirs.

    Returns what went wrong, by kernel. Those that have not ended after ``seconds`` still run then.
    """
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
    """Returns the module of ``module:attribute``, imported, and the attribute's name."""
    module, _, attribute = name.partition(":")
    return importlib.import_module(module), attribute


def _value(argument: int | bool | str) -> Any:
    """Returns an argument as a library takes it."""
    if isinstance(argument, str) and argument.startswith("torch."):
        return getattr(importlib.import_module("torch"), argument.removeprefix("torch."))
    return argument


@functools.cache
def _tell_architecture() -> None:
    """Tells tvm_ffi for which GPUs to compile, once for all threads.

    SGLang 0.5.16 sets this variable for the time of each build, and takes it away afterwards, from those that still need it.
    """
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
    kill_descendants(os.getpid())  # compilers that are late would go on after the end of their locks
    os._exit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
