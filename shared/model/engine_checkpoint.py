"""The checkpoint that engines start from, where `rollout_precision` asks for fewer bits than ``hf_checkpoint`` has."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from shared.config.run_config import RunConfig
from shared.model.hf_checkpoint import weight_files
from shared.model.quantization import PRECISION, quantization_in_engines
from shared.process.child_process import with_parent
from shared.runtime import user_cache
from shared.runtime.errors import ConfigError, DeadlineExceeded
from shared.runtime.safe_files import locked

SECONDS = 3600.0  # the longest that a checkpoint may take to be quantized, by this process or by another
CONVERSIONS = {"fp8": "fp8-block", "int4": "int4"}  # `rollout_precision` → what `myxo convert --to` calls it


def with_engine_checkpoint(config: RunConfig) -> RunConfig:
    """Returns the config with the engines' own checkpoint as ``hf_checkpoint``; the config itself where they start from the run's.

    It is made by `myxo convert`, once for the same files (by path, size and time, and the config's content), in the user's cache, and
    appears complete or not at all. Raises ConfigError: see `quantization_in_engines`, or it cannot be made. DeadlineExceeded.
    """
    source, precision = config.model.hf_checkpoint, config.rollout.rollout_precision
    if precision == "checkpoint":
        return config
    found = quantization_in_engines(source, precision)
    stated = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in weight_files(source)[0]]
    text = json.dumps([stated, (source / "config.json").read_text(), found and found.entry], sort_keys=True)
    cache = (user_cache.directory() or config.run.root) / "quantized" / hashlib.sha256(text.encode()).hexdigest()[:32]
    target = cache / source.resolve().name
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / "lock", SECONDS, "the engines' checkpoint"):
        if not target.exists():
            quantized(source, target, precision)
    return config.with_fields(model={"hf_checkpoint": target})


def quantized(source: Path, target: Path, precision: str) -> Path:
    """Returns what engines get of a plain checkpoint: one of ``precision``, which is made at ``target``, or the checkpoint itself.

    Raises ConfigError where it cannot be made, DeadlineExceeded."""
    if precision == "checkpoint":
        return source
    command = [sys.executable, "-m", "services.trainer.convert_command", str(source), str(target), "--to", CONVERSIONS[precision]]
    try:
        done = subprocess.run(with_parent(command), capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded("a checkpoint", f"the conversion of {source}", SECONDS, "the service ends") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(PRECISION, precision, f"checkpoint, with a model that `myxo convert` has made; here that failed: {said[-1]}")
    return target
