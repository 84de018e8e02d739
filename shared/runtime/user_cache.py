"""The user's cache directory, and what engines store in it: bytecode and compiled kernels.

SGLang's processes import some ten thousand modules, one process after the other. Without bytecode on disk each compiles all of them again,
and most of an engine's start is that (measured: 53 s of 73). Python writes none where PYTHONDONTWRITEBYTECODE is set or the packages are
read-only.
"""

import contextlib
import importlib.util
import os
import time
from collections.abc import Mapping
from pathlib import Path

from shared.runtime.safe_files import replace_file

KEEP_SECONDS = 30 * 86400.0  # Results that were not used for this long are removed


def directory() -> Path | None:
    """Returns where results are kept; None for a user without a home."""
    with contextlib.suppress(RuntimeError):
        return Path(os.environ.get("MYXO_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "myxo"))
    return None


def read(name: str) -> bytes | None:
    """Returns the result of that name, or None where there is none."""
    if (cache := directory()) is None:
        return None
    with contextlib.suppress(OSError):
        content = (cache / name).read_bytes()
        os.utime(cache / name)
        return content
    return None


def write(name: str, content: bytes) -> None:
    """Keeps a result, and removes those that were not used for long."""
    if (cache := directory()) is None:
        return
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        replace_file(cache / name, content)
        for path in cache.iterdir():
            if path.is_file() and path.stat().st_mtime < time.time() - KEEP_SECONDS:
                path.unlink()


PREFIX, OFF = "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"


def bytecode_variables(environment: Mapping[str, str], package: str = "sglang.srt") -> dict[str, str]:
    """Returns the variables by which a child keeps bytecode in the user's cache; none where it lies beside the sources, or will.

    Args:
        environment: the child's, otherwise. package: its largest one; one that is not installed has no directory.
    """
    parent, _, name = package.partition(".")
    spec, cache = importlib.util.find_spec(parent), directory()
    if spec is None or cache is None or environment.get(PREFIX):
        return {}
    folders = [Path(root, name) for root in spec.submodule_search_locations or ()]
    if any(any(folder.glob("__pycache__/*.pyc")) for folder in folders):
        return {}
    if not environment.get(OFF) and all(os.access(folder, os.W_OK) for folder in folders):
        return {}
    return {PREFIX: str(cache / "bytecode"), OFF: ""}


# The variable by which each library is told its directory, and that directory's name
VARIABLES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "SGLANG_JIT_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep-gemm",
    "CUDA_CACHE_PATH": "cuda",
}


def kernel_cache_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to set beside an environment: those that it does not have. None for a user without a home."""
    if (cache := directory()) is None:
        return {}
    return {name: str(cache / "kernels" / folder) for name, folder in VARIABLES.items() if name not in environment}
