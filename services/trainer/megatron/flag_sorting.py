"""Megatron's flags as the trainer takes them: what goes into which of Megatron's dataclasses, and what describes the architecture.

``python -m services.trainer.megatron.flag_sorting --write`` writes the catalogue ``shared/config/megatron_flags.json`` anew, ``--check``
exits 1 where it is not what this Megatron's dataclasses give.
"""

from __future__ import annotations

import argparse
import enum
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from services.trainer.megatron import megatron_catalogue
from shared.config import megatron_flags
from shared.config.megatron_flags import Flag
from shared.runtime.errors import ConfigError

CATALOGUE = Path(megatron_flags.__file__).with_name("megatron_flags.json")


@dataclass(frozen=True)
class MegatronFlags:
    """Given flags, by where they go: fields of Megatron's dataclasses with values of their types, and the architecture's flags as given.

    Args:
        transformer: of TransformerConfig and MLATransformerConfig. optimizer: of OptimizerConfig. ddp: of DistributedDataParallelConfig.
        architecture: Megatron's flags, such as ``num_layers``; they change nothing and are compared with the checkpoint's.
    """

    transformer: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    architecture: dict[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, dict[str, Any]]:
        """Those that are laid over what Myxo sets, by dataclass: ``ActorConfig.megatron``."""
        parts = {"transformer": self.transformer, "optimizer": self.optimizer, "ddp": self.ddp}
        return {name: part for name, part in parts.items() if part}


def resolve(given: Mapping[str, Any]) -> MegatronFlags:
    """Sorts and types the flags of ``[trainer.megatron]``.

    Raises ConfigError: an unknown or refused flag, a wrong value, one that this machine lacks Transformer Engine for, or one that steers
    Megatron's own training loop.
    """
    flags = MegatronFlags()
    for name, value in megatron_flags.canonical(given).items():
        _place(flags, megatron_flags.catalogue()[name], value)
    return flags


def _place(flags: MegatronFlags, flag: Flag, value: Any) -> None:
    for problem in megatron_flags.missing_engine({flag.name: value}):
        raise problem
    for group in flag.groups:
        part: dict[str, Any] = getattr(flags, group)
        part[flag.name] = value if group == "architecture" else _converted(group, flag.name, value)


def _hints(group: str) -> dict[str, Any]:
    return {name: hint for model in megatron_catalogue.GROUPS[group] for name, hint in typing.get_type_hints(model).items()}


def _converted(group: str, name: str, value: Any) -> Any:
    """Plain data as the dataclass field has it: dtypes, enums, tuples."""
    hint = _hints(group).get(name)
    if hint is None:
        raise ConfigError(f"trainer.megatron.{name}", value, "leave it out: the Megatron on the path has no such field")
    if value is None:
        return None
    kinds = [hint, *typing.get_args(hint)]
    if torch.dtype in kinds:
        return getattr(torch, value)
    if typing.get_origin(hint) is tuple or any(typing.get_origin(kind) is tuple for kind in kinds):
        return tuple(value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint[value]
    return value


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m services.trainer.megatron.flag_sorting", description=__doc__.split("\n\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help=f"write {CATALOGUE.name}")
    what.add_argument("--check", action="store_true", help="exit 1 where it is not current")
    given = parser.parse_args(arguments)
    text = megatron_catalogue.text()
    if given.write:
        CATALOGUE.write_text(text)
        return 0
    if not CATALOGUE.is_file() or CATALOGUE.read_text() != text:
        print(f"{CATALOGUE.name} is not what Megatron's dataclasses give; run `make docs`", file=sys.stderr)
        return 1
    print(f"{CATALOGUE.name} is current")
    return 0


if __name__ == "__main__":
    sys.exit(main())
