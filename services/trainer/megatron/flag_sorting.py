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

from services.trainer.megatron import checkout, megatron_catalogue
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


def resolve(given: Mapping[str, Any]) -> MegatronFlags:
    """Sorts and types the flags of ``[trainer.megatron]``.

    Where a Megatron-LM checkout is on the path its own parser checks them too, and those that it alone knows go to the dataclass that has
    a field of that name.

    Raises ConfigError: an unknown or refused flag, a wrong value, one that this machine lacks Transformer Engine for, or one that steers
    Megatron's own training loop.
    """
    flags = MegatronFlags()
    plain = megatron_flags.canonical(given)
    parsed = checkout.parsed(plain) if megatron_flags.own_parser() else {}
    for name, value in plain.items():
        flag = megatron_flags.catalogue().get(name)
        if flag is None:
            _place_unlisted(flags, name, value, *parsed[name])
        else:
            _place(flags, flag, value)
    return flags


def _place(flags: MegatronFlags, flag: Flag, value: Any) -> None:
    for problem in megatron_flags.missing_engine({flag.name: value}):
        raise problem
    for group in flag.groups:
        part: dict[str, Any] = getattr(flags, group)
        part[flag.name] = value if group == "architecture" else _converted(group, flag.name, value)


def _place_unlisted(flags: MegatronFlags, name: str, value: Any, field_name: str, typed: Any) -> None:
    """A flag that only the checkout's parser knows: what it sets must be a flag of the catalogue, or a field of a dataclass, or nobody
    would look at it."""
    if (known := megatron_flags.find(field_name)) is not None:
        try:
            return _place(flags, known[0], known[0].typed(megatron_catalogue.plain(typed)))
        except ValueError as error:
            raise ConfigError(f"trainer.megatron.{name}", value, str(error)) from None
    groups = [group for group in megatron_catalogue.GROUPS if field_name in _hints(group)]
    if not groups:
        expected = "leave it out: it steers Megatron's own training loop, which does not run here"
        raise ConfigError(f"trainer.megatron.{name}", value, expected)
    for group in groups:
        getattr(flags, group)[field_name] = typed


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
