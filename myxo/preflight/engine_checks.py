"""Whether the installed SGLang takes the flags of ``[rollout.sglang]``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from myxo.preflight.inspection import Inspection
from shared.config import sglang_flags
from shared.runtime import devices
from shared.runtime.errors import ConfigError

GPU_ATTENTION = ("flashinfer", "fa3", "fa4", "triton", "flashmla", "cutlass_mla", "trtllm_mla", "trtllm_mha")
"""Backends of scripts for GPUs."""

LATER = "[rollout.sglang] is checked where the rollout service starts"


def check_flags(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields the flags that it does not take; says on standard error where it cannot be asked."""
    if not (given := inspection.config.rollout.sglang):
        return
    try:
        flags = sglang_flags.of_installed()
    except sglang_flags.NoCatalogue as error:
        print(f"myxo: {error}; {LATER}", file=sys.stderr)
        return
    if flags is None:
        print(f"myxo: SGLang is not installed here; {LATER}", file=sys.stderr)
        return
    yield from flags.problems(given)


def check_cpu_backend(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields an attention backend that an engine on a CPU does not have: it would not start."""
    config = inspection.config
    if not inspection.starts or devices.resolve(config.rollout.rollout_device) != "cpu":
        return
    for key, value in config.rollout.sglang.items():
        if sglang_flags.plain_name(key) == "attention-backend" and value in GPU_ATTENTION:
            wanted = "torch_native, or leave it out: rollout_device is cpu here, and this backend needs a GPU"
            yield ConfigError(f"rollout.sglang.{key}", value, wanted)
