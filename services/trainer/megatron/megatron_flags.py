"""Megatron's flags, sorted into its dataclasses and those that describe the architecture."""

import enum
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from shared.config import flag_table
from shared.config.trainer_section import OptimizerState, TrainerSection
from shared.model import architecture_flags
from shared.model.families import read_architecture
from shared.runtime.errors import ConfigError

# Kind of flag → the dataclasses whose fields flags of that kind are
GROUPS: dict[str, tuple[type, ...]] = {
    "transformer": (TransformerConfig, MLATransformerConfig),
    "optimizer": (OptimizerConfig,),
    "ddp": (DistributedDataParallelConfig,),
}


@dataclass(frozen=True)
class MegatronFlags:
    """The given flags by kind: fields of Megatron's dataclasses with values of their types, and the architecture's flags as given.

    Args:
        transformer: of TransformerConfig and MLATransformerConfig. optimizer: of OptimizerConfig. ddp: of DistributedDataParallelConfig.
        architecture: Megatron's flags, such as ``num_layers``; they change nothing and are compared with the checkpoint's.
    """

    transformer: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    architecture: dict[str, Any] = field(default_factory=dict)


def resolve(given: Mapping[str, Any]) -> MegatronFlags:
    """Sorts and types the flags of ``[trainer.megatron]``.

    Raises ConfigError: an unknown or refused flag, a wrong value, one that this machine lacks Transformer Engine for, or one that steers
    Megatron's own training loop.
    """
    flags = MegatronFlags()
    for name, value in flag_table.canonical(given).items():
        for problem in flag_table.missing_engine({name: value}):
            raise problem
        if any(flag_table.without_effect({name: value})):
            continue
        for group in flag_table.catalogue()[name].groups:
            getattr(flags, group)[name] = value if group == "architecture" else converted(group, name, value)
    return flags


@cache
def _hints(group: str) -> dict[str, Any]:
    return {name: hint for model in GROUPS[group] for name, hint in typing.get_type_hints(model).items()}


def converted(group: str, name: str, value: Any) -> Any:
    """Returns plain data as a field of a dataclass holds it: dtypes, enums, tuples. Raises ConfigError where there is no such field."""
    hint = _hints(group).get(name)
    if hint is None:
        raise ConfigError(f"trainer.megatron.{name}", value, "leave it out: the Megatron on the path has no such field")
    if value is None:
        return None
    kinds = [hint, *typing.get_args(hint)]
    if typing.get_origin(hint) is tuple or any(typing.get_origin(kind) is tuple for kind in kinds):
        return tuple(value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint[value]
    return value


def check_architecture(flags: MegatronFlags, hf_dir: Path) -> None:
    """Compares Megatron's flags that describe a model with the one that a role starts from. Raises ConfigError where they differ."""
    if flags.architecture:
        architecture_flags.check(flags.architecture, read_architecture(hf_dir))


def buffer_fields(flags: MegatronFlags) -> dict[str, Any]:
    """Returns Megatron's fields about the gradients' buffers."""
    keeping = OptimizerState.of(flags.optimizer)
    narrow = keeping is not None and keeping.main_grads != "fp32"
    return {**flags.ddp, **({"grad_reduce_in_fp32": False} if narrow else {})}


def recomputation(trainer: TrainerSection) -> dict[str, Any]:
    """Returns Megatron's fields about recomputation in the backward pass."""
    if trainer.recomputes_layers:
        method, layers = trainer.recompute_method or "uniform", trainer.recompute_num_layers or 1
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
    if trainer.recompute_granularity is None:
        return {}
    modules = {"recompute_modules": trainer.recompute_modules} if trainer.recompute_modules else {}
    return {"recompute_granularity": "selective", **modules}
