"""The catalogue of Megatron's flags, ``shared/config/megatron_flags.json``, made from its dataclasses and `docs.flag_tables`.

``python -m docs.flags`` writes it; at run time nothing but the JSON is read.
"""

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal, Union, get_args, get_origin

import torch

from docs import flag_tables as tables
from services.trainer.megatron.megatron_backend import GROUPS
from shared.config.flag_table import SLIME

_SCALARS = {bool: "switch", int: "int", float: "float", str: "text", torch.dtype: "dtype"}


def text() -> str:
    """The catalogue as JSON, one flag a line."""
    lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows())
    return f'{{"megatron_core": "{version("megatron-core")}", "flags": [\n{lines}\n]}}\n'


def rows() -> list[dict[str, Any]]:
    """Returns the fields of `shared.config.flag_table.Flag` that differ from its defaults, for each flag, by name."""
    found = {name: _architecture(name) for name in tables.ARCHITECTURE}
    spellings = dict(tables.SPELLINGS)
    for group, classes in GROUPS.items():
        for model in classes:
            _add_fields(model, group, found, spellings)
    for name, (flag_kind, value, reason) in tables.NOT_A_FIELD_FIXED.items():
        found[name] = {"name": name, "kind": flag_kind, "default": value, "fixed": value, "reason": reason}
    for name, (flag_kind, reason) in tables.NOT_A_FIELD_WITHOUT_EFFECT.items():
        found[name] = {"name": name, "kind": flag_kind, "ignored": True, "reason": reason}
    for name, reason in tables.WITHOUT_EFFECT.items():
        known = {key: value for key, value in found[name].items() if key != "groups"}
        found[name] = known | {"ignored": True, "reason": reason}
    for name, reason in tables.REFUSED.items():
        found[name] = {"name": name, "kind": found.get(name, {"kind": "text"})["kind"], "reason": reason}
    for spelled, (name, bare) in spellings.items():
        if spelled != name:
            found.pop(spelled, None)
            found[name].setdefault("spellings", {})[spelled] = bare
    return [found[name] for name in sorted(found)]


def _add_fields(model: type, group: str, found: dict[str, dict[str, Any]], spellings: dict[str, tuple[str, Any]]) -> None:
    """Adds the fields of one of Megatron's dataclasses to the rows, and their other spellings."""
    hints = typing.get_type_hints(model)
    for field in dataclasses.fields(model):
        name = field.name
        known = name.startswith("_") or name in SLIME or _is_architecture(name, spellings) or group in found.get(name, {}).get("groups", ())
        if known or (kind := kind_of(hints[name])) is None:
            continue  # no kind: a function or an object, which no flag can say
        if name in found:
            found[name]["groups"].append(group)
            continue
        found[name] = _field(name, kind, field, group)
        for spelled in field.metadata.get("argparse_meta", {}).get("arg_names", []):
            bare = not field.default if kind[0] == "switch" else None
            spellings.setdefault(spelled.removeprefix("--").replace("-", "_"), (name, bare))


def kind_of(hint: Any) -> tuple[str, bool, list[str]] | None:
    """Returns (kind, whether none is a value, choices) of a dataclass field's type; None where no text can say it."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _kind_of_union(get_args(hint))
    if origin is Literal:
        return "text", False, list(get_args(hint))
    if origin in (list, tuple):
        inner = kind_of(get_args(hint)[0])
        return (f"{inner[0]}s", False, []) if inner is not None and inner[0] in ("int", "float", "text") else None
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "text", False, [member.name for member in hint]
    return (_SCALARS[hint], False, []) if hint in _SCALARS else None


def _kind_of_union(arguments: tuple[Any, ...]) -> tuple[str, bool, list[str]] | None:
    parts = [part for part in arguments if part is not type(None)]
    known = [kind for part in parts if (kind := kind_of(part)) is not None]
    if not known or any(Callable in (part, get_origin(part)) for part in parts):
        return None
    kinds = list(dict.fromkeys(kind for kind, _, _ in known))
    if len(kinds) > 1:  # one value or several: those of the plain type
        scalar = next((kind for kind in kinds if not kind.endswith("s")), "")
        kinds = [f"{scalar} or {scalar}s" if f"{scalar}s" in kinds else scalar]
    return kinds[0], type(None) in arguments, known[0][2] if len(known) == 1 else []


def _field(name: str, kind: tuple[str, bool, list[str]], field: dataclasses.Field[Any], group: str) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "kind": kind[0], "default": tables.DEFAULTS.get(name, _default(field)), "groups": [group]}
    if kind[1] or row["default"] is None:
        row["optional"] = True
    if choices := tables.CHOICES.get(name, kind[2]):
        row["choices"] = choices
        row["kind"] = "text" if kind[0] == "dtype" else kind[0]
    if name in tables.FIXED:
        row["fixed"], row["reason"] = tables.FIXED[name]
        row["default"] = row["fixed"]
    if name in tables.TRANSFORMER_ENGINE:
        row["engine"] = True
    if name in tables.KERNELS:
        row["kernels"] = True
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
