"""The catalogue of Megatron's flags, from its dataclasses and the tables of `flag_tables`: what ``shared/config/megatron_flags.json``
holds."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal, Union, get_args, get_origin

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from services.trainer.megatron import flag_tables as tables

GROUPS: dict[str, tuple[type, ...]] = {
    "transformer": (TransformerConfig, MLATransformerConfig),
    "optimizer": (OptimizerConfig,),
    "ddp": (DistributedDataParallelConfig,),
}
"""Where a flag may go → the dataclasses whose fields those are."""

_SCALARS = {bool: "switch", int: "int", float: "float", str: "text", torch.dtype: "dtype"}


def text() -> str:
    """The catalogue as JSON, one flag a line."""
    lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows())
    return f'{{"megatron_core": "{version("megatron-core")}", "flags": [\n{lines}\n]}}\n'


def rows() -> list[dict[str, Any]]:
    """The fields of `shared.config.megatron_flags.Flag`, those that differ from its defaults; by name."""
    found = {name: _architecture(name) for name in tables.ARCHITECTURE}
    spellings = dict(tables.SPELLINGS)
    for group, classes in GROUPS.items():
        for model in classes:
            for field in dataclasses.fields(model):
                name = field.name
                seen = name in found and group in found[name].get("groups", ())
                if name.startswith("_") or seen or _is_architecture(name, spellings):
                    continue
                if (kind := kind_of(typing.get_type_hints(model)[name])) is None:
                    continue  # a function or an object: nothing that a flag can say
                if name in found:
                    found[name]["groups"].append(group)
                else:
                    found[name] = _field(name, kind, field, group)
                    for spelled in field.metadata.get("argparse_meta", {}).get("arg_names", []):
                        bare = not field.default if kind[0] == "switch" else None
                        spellings.setdefault(spelled.removeprefix("--").replace("-", "_"), (name, bare))
    for name, (flag_kind, value, reason) in tables.NOT_A_FIELD_FIXED.items():
        found[name] = {"name": name, "kind": flag_kind, "default": value, "fixed": value, "reason": reason}
    for name, reason in tables.REFUSED.items():
        found[name] = {"name": name, "kind": found.get(name, {"kind": "text"})["kind"], "reason": reason}
    for spelled, (name, bare) in spellings.items():
        if spelled != name:
            found.pop(spelled, None)
            found[name].setdefault("spellings", {})[spelled] = bare
    return [found[name] for name in sorted(found)]


def kind_of(hint: Any) -> tuple[str, bool, list[str]] | None:
    """(kind, whether none is a value, choices) of a dataclass field's type; None where no text can say it."""
    if get_origin(hint) in (Union, types.UnionType):
        parts = [part for part in get_args(hint) if part is not type(None)]
        known = [kind for part in parts if (kind := kind_of(part)) is not None]
        if not known or any(get_origin(part) is Callable or part is Callable for part in parts):
            return None
        kinds = dict.fromkeys(kind for kind, _, _ in known)
        if len(kinds) > 1:  # one value or several: those of the plain type
            scalar = next((kind for kind in kinds if not kind.endswith("s")), "")
            kinds = {f"{scalar} or {scalar}s": None} if f"{scalar}s" in kinds else {scalar: None}
        return next(iter(kinds)), type(None) in get_args(hint), known[0][2] if len(known) == 1 else []
    if get_origin(hint) is Literal:
        return "text", False, list(get_args(hint))
    if get_origin(hint) in (list, tuple):
        inner = kind_of(get_args(hint)[0])
        return None if inner is None or inner[0] not in ("int", "float", "text") else (f"{inner[0]}s", False, [])
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "text", False, [member.name for member in hint]
    if hint is list:
        return None
    return (_SCALARS[hint], False, []) if hint in _SCALARS else None


def _field(name: str, kind: tuple[str, bool, list[str]], field: dataclasses.Field[Any], group: str) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "kind": kind[0], "default": tables.DEFAULTS.get(name, _default(field)), "groups": [group]}
    if kind[1] or row["default"] is None:
        row["optional"] = True
    if choices := tables.CHOICES.get(name, kind[2]):
        row["choices"] = choices
    if name in tables.FIXED:
        row["fixed"], row["reason"] = tables.FIXED[name]
        row["default"] = row["fixed"]
    if name in tables.TRANSFORMER_ENGINE:
        row["engine"] = True
    return row


def _architecture(name: str) -> dict[str, Any]:
    kind, default = tables.ARCHITECTURE[name]
    row = {"name": name, "kind": kind, "default": default, "optional": True, "groups": ["architecture"]}
    return row | ({"choices": tables.CHOICES[name]} if name in tables.CHOICES else {})


def _is_architecture(name: str, spellings: dict[str, tuple[str, Any]]) -> bool:
    return name in tables.ARCHITECTURE or spellings.get(name, ("", None))[0] in tables.ARCHITECTURE


def plain(value: Any) -> Any:
    """A dataclass field's value as JSON has it."""
    match value:
        case torch.dtype():
            return str(value).removeprefix("torch.")
        case enum.Enum():
            return value.name
        case tuple():
            return list(value)
        case _:
            return value


def _default(field: dataclasses.Field[Any]) -> Any:
    return plain(field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default)
