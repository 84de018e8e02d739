"""What of the forward pass is run again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from shared.runtime.errors import ConfigError, nearest

MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
"""Of a layer, as Megatron-Core 0.16 names them."""


class Recomputation(Protocol):
    """The fields of ``[trainer]`` that say it."""

    @property
    def recompute(self) -> bool: ...
    @property
    def recompute_granularity(self) -> str | None: ...
    @property
    def recompute_method(self) -> str | None: ...
    @property
    def recompute_num_layers(self) -> int | None: ...
    @property
    def recompute_modules(self) -> Sequence[str]: ...


def megatron_fields(given: Recomputation) -> dict[str, Any]:
    """Returns Megatron's fields of what is run again. Raises ConfigError where the given ones contradict one another."""
    granularity, method, layers = given.recompute_granularity, given.recompute_method, given.recompute_num_layers
    if given.recompute and granularity == "selective":
        raise ConfigError("trainer.recompute", True, "false beside recompute_granularity = selective; it is short for full")
    if granularity is None and given.recompute:
        granularity = "full"
    if granularity != "full":
        for name, value in (("recompute_method", method), ("recompute_num_layers", layers)):
            if value is not None:
                raise ConfigError(f"trainer.{name}", value, "none, or recompute_granularity = full")
    if granularity != "selective" and given.recompute_modules:
        raise ConfigError("trainer.recompute_modules", given.recompute_modules, "none, or recompute_granularity = selective")
    if unknown := [name for name in given.recompute_modules if name not in MODULES]:
        raise ConfigError("trainer.recompute_modules", unknown[0], f"a module of a layer; {nearest(unknown[0], list(MODULES))}")
    if layers is not None and layers < 1:
        raise ConfigError("trainer.recompute_num_layers", layers, "at least 1")
    if granularity is None:
        return {}
    if granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": method or "uniform",
            "recompute_num_layers": layers or 1,
        }
    modules = {"recompute_modules": list(given.recompute_modules)} if given.recompute_modules else {}
    return {"recompute_granularity": "selective", **modules}
