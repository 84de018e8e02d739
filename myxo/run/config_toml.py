"""The resolved config as TOML text, section by section; `tomllib` and `shared.config.config_reading.parse` read it back to the same."""

import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from shared.config.run_config import RunConfig, section_model
from shared.data.data_files import DataFile

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")


def dump(config: RunConfig) -> str:
    """Returns every field of every section. Fields without a value stand as comments, for TOML has no null; where they have one by default,
    as an empty text."""
    blocks = []
    for section in type(config).model_fields:
        lines, tables = [f"[{section}]"], list[str]()
        for field, value in getattr(config, section):
            if isinstance(value, list) and value and isinstance(value[0], BaseModel):  # these have the form that the field gives them
                value = getattr(config, section).model_dump(mode="json", include={field})[field]
            if isinstance(value, list) and value and isinstance(value[0], dict):
                rows = [[f"{_key(name)} = {_value(one)}" for name, one in item.items() if one is not None] for item in value]
                tables += ["\n".join([f"[[{section}.{field}]]", *row]) for row in rows]
                continue
            none = f"# {field} = none" if section_model(section).model_fields[field].default is None else f'{field} = ""'
            lines.append(none if value is None else f"{field} = {_value(value)}")
        blocks += ["\n".join(lines), *tables]
    return "\n\n".join(blocks) + "\n"


def _value(value: Any) -> str:
    match value:
        case float():
            return repr(value)
        case bool() | int() | str():
            # JSON's escapes are TOML's too, but for DEL, which JSON leaves as it is and TOML refuses
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case Path() | DataFile():
            return _value(str(value))
        case list():
            return "[" + ", ".join(_value(item) for item in value) + "]"
        case dict() if _holds_null(value):
            return _value(json.dumps(value))
        case dict():
            items = (f"{_key(key)} = {_value(item)}" for key, item in value.items())
            return "{ " + ", ".join(items) + " }" if value else "{}"
        case BaseModel():
            return _value(value.model_dump(mode="json", exclude_none=True))
        case _:
            raise TypeError(f"{type(value).__name__} has no form in TOML")


def _holds_null(value: Any) -> bool:
    return value is None or any(map(_holds_null, value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()))


def _key(key: str) -> str:
    return key if _BARE_KEY.match(key) else _value(key)
