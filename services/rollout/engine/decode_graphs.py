"""Decides for how many requests at once an engine captures its decode steps as CUDA graphs. Pure.

A step of more requests than were captured is launched kernel by kernel, which halves a small model's speed: SGLang captures 256 at most by
itself. So an engine captures as many as its replica has slots, up to a bound, since each size takes time and memory at the start.
"""

from typing import Any

from shared.config.run_config import RunConfig
from shared.config.sglang_flags import plain_name

FEWEST, MOST_CAPTURED = 256, 512
"""The requests that are captured at least, as SGLang does by itself on large GPUs, and at most."""

FLAG = "cuda-graph-max-bs-decode"

SIZES = (FLAG, "cuda-graph-max-bs", "cuda-graph-bs-decode", "cuda-graph-bs")
"""Flags by which a run says itself how many: the most, or a list."""

OTHERWISE = ("disable-cuda-graph", "disable-decode-cuda-graph", "cuda-graph-config", "cuda-graph-backend-decode")
"""Flags after which nobody can tell."""


def captured_requests(config: RunConfig, device: str) -> int | None:
    """Returns for how many requests the engine's decode steps are captured; None where that bounds nothing, or is not known."""
    given = {plain_name(name): value for name, value in config.rollout.sglang.items()}
    if device != "cuda" or any(given.get(name) for name in OTHERWISE):
        return None
    for name in SIZES:
        if given.get(name) is not None:
            return _largest(given[name])
    if config.trainer.colocate:
        return FEWEST  # the trainer's memory is beside it
    return min(MOST_CAPTURED, max(FEWEST, config.rollout.rollout_concurrency or MOST_CAPTURED))


def graph_flags(config: RunConfig, device: str) -> dict[str, Any]:
    """Returns the engine's flags for it; none where the run has its own."""
    own = {plain_name(name) for name in config.rollout.sglang} & {*SIZES, *OTHERWISE}
    captured = captured_requests(config, device)
    return {} if own or captured is None or config.trainer.colocate else {FLAG: captured}


def _largest(given: Any) -> int | None:
    sizes = given if isinstance(given, list) else [given]
    return max((int(size) for size in sizes if str(size).isdecimal()), default=None)
