"""Where the libraries of engines and trainers keep the GPU kernels that they compile: all in one directory of the user's, between runs.

A first start on a machine compiles for a minute or more. Some of these libraries keep what they made in the home directory, each in a place
of its own, torch in the directory for temporary files: a container, or a machine that is started anew, lacks them. Here they are below
`shared.runtime.user_cache.directory`, so that ``$MYXO_CACHE`` is all that has to be kept.
"""

from collections.abc import Mapping

from shared.runtime import user_cache

VARIABLES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "SGLANG_JIT_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep-gemm",
    "CUDA_CACHE_PATH": "cuda",
}
"""The variable by which each library is told its directory, and that directory's name."""


def kernel_cache_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to set beside an environment: those that it does not have. None for a user without a home."""
    if (cache := user_cache.directory()) is None:
        return {}
    return {name: str(cache / "kernels" / folder) for name, folder in VARIABLES.items() if name not in environment}
