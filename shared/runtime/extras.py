"""Refuses a config before anything starts where a package that only it needs is not installed."""

import importlib.util

from shared.config.run_config import RunConfig
from shared.runtime.errors import ConfigError


def check(config: RunConfig) -> None:
    """Raises ConfigError naming the field and the extra that brings what it needs."""
    if config.monitoring.use_wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("monitoring.use_wandb", True, "W&B is not installed: pip install 'myxo[wandb]', or leave it out")
    debug = config.debug
    if debug.record_memory_history and debug.memory_recorder == "memray" and importlib.util.find_spec("memray") is None:
        raise ConfigError("debug.memory_recorder", "memray", "memray is not installed: pip install memray, or take torch, for CUDA")
