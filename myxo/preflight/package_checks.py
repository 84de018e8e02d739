"""Checks of the packages that single flags ask for: a service would find out only once it has started, and long after the others."""

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from myxo.preflight.inspection import Findings, Inspection
from shared.config.sglang_flags import plain_name
from shared.runtime.errors import ConfigError

OF_SGLANG: Mapping[str, Mapping[str, str]] = {
    "attention-backend": {"flashinfer": "flashinfer", "aiter": "aiter", "tokenspeed_mla": "tokenspeed_mla"},
    "sampling-backend": {"flashinfer": "flashinfer"},
    "grammar-backend": {"xgrammar": "xgrammar", "outlines": "outlines", "llguidance": "llguidance"},
    "moe-a2a-backend": {
        **{"deepep": "deep_ep", "deepep_v2": "deep_ep", "mooncake": "mooncake", "mori": "mori", "nixl": "nixl"},
        **{"pplx": "pplx_kernels", "flashinfer": "flashinfer", "flashinfer_megamoe": "flashinfer"},
    },
    "moe-runner-backend": {"deep_gemm": "deep_gemm", "triton_kernel": "triton_kernels", "aiter": "aiter"},
    "fp8-gemm-backend": {"deep_gemm": "deep_gemm", "aiter": "aiter"},
    "load-format": {
        **{"bitsandbytes": "bitsandbytes", "gguf": "gguf", "fastsafetensors": "fastsafetensors"},
        **{"runai_streamer": "runai_model_streamer"},
    },
    "quantization": {"bitsandbytes": "bitsandbytes", "gguf": "gguf", "auto-round": "auto_round", "quark": "quark"},
    "disaggregation-transfer-backend": {"mooncake": "mooncake", "mooncake_tcp": "mooncake", "nixl": "nixl", "mori": "mori"},
    "hicache-storage-backend": {"mooncake": "mooncake", "nixl": "nixl", "mori": "mori", "aibrix": "aibrix_kvcache"},
    "enable-lmcache": {"True": "lmcache"},
}
"""Flag of SGLang's → value → the package that it imports for it."""

SAME_VALUES = {"prefill-attention-backend": "attention-backend", "decode-attention-backend": "attention-backend"}
BEGINNINGS = {"flashinfer_": "flashinfer"}
"""Beginnings of the names of kernels, in `KERNELS`, and the package that has them."""

KERNELS = ("moe-runner-backend", "fp8-gemm-backend", "fp4-gemm-backend")

OF_MEGATRON: Mapping[tuple[str, Any], tuple[str, str]] = {
    ("gradient_accumulation_fusion", True): ("fused_weight_gradient_mlp_cuda", "apex, built with --cuda_ext, has it"),
    ("use_kitchen", True): ("nvidia_kitchen", "install it"),
    ("use_kitchen_attention", True): ("nvidia_kitchen", "install it"),
}
"""Flag of Megatron's and its value → the module that Megatron's own layers import for it, and where that comes from."""


def check_engine_packages(inspection: Inspection) -> Findings:
    """Yields the flags of SGLang's whose packages are not installed, where the engines start on this machine."""
    if inspection.starts and importlib.util.find_spec("sglang") is not None:  # without SGLang the check of the packages says so
        yield from missing_of_sglang(inspection.config.rollout.sglang)


def missing_of_sglang(given: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yields an error for each flag of ``[rollout.sglang]`` with the package that it needs and that is not installed."""
    for key, value in given.items():
        package = _package(plain_name(key), str(value))
        if package is not None and importlib.util.find_spec(package) is None:
            yield ConfigError(f"rollout.sglang.{key}", value, f"leave it out, or install the package {package}, which SGLang needs for it")


def _package(name: str, value: str) -> str | None:
    name = SAME_VALUES.get(name, name)
    if name in KERNELS and (begun := next((BEGINNINGS[part] for part in BEGINNINGS if value.startswith(part)), None)) is not None:
        return begun
    return OF_SGLANG.get(name, {}).get(value)


def check_trainer_packages(inspection: Inspection) -> Findings:
    """Yields the flags of Megatron's whose modules are not installed; Transformer Engine is `check_megatron_flags`' own."""
    given = inspection.config.trainer.megatron
    if not inspection.starts or given.get("transformer_impl") == "transformer_engine":  # which brings kernels of its own
        return
    for (name, value), (module, origin) in OF_MEGATRON.items():
        if given.get(name) == value and importlib.util.find_spec(module) is None:
            yield ConfigError(f"trainer.megatron.{name}", value, f"leave it out; Megatron needs {module} for it, not installed: {origin}")
