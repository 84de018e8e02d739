"""Whether this machine has the GPUs and the packages that a run needs which is about to start on it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from myxo.preflight.inspection import Inspection
from shared.runtime import devices
from shared.runtime.errors import ConfigError

PACKAGES = {"torch": "the trainer and the engine", "megatron": "the trainer", "sglang": "the engine"}
"""Which service needs what; importing them would take seconds."""


def check_gpus(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields the devices that are asked for and not there."""
    if not inspection.starts:
        return
    config = inspection.config
    fields = {"trainer.train_device": config.trainer.train_device, "rollout.rollout_device": config.rollout.rollout_device}
    if not devices.gpus():
        for field, device in fields.items():
            if device == "cuda":
                yield ConfigError(field, device, "this machine shows no NVIDIA GPU (/dev/nvidia0); use cpu, or auto")
        return
    devices.share_out(config)  # raises ConfigError


def check_packages(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields the packages of the services that are not installed."""
    if not inspection.starts:
        return
    for package, needed_by in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            yield ConfigError("the environment", package, f"not installed, and {needed_by} cannot start without it")
