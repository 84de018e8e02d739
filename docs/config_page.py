"""Writes ``docs/config.md`` from the sections of the config: ``python -m docs.config_page [--check]``."""

import argparse
import json
import re
import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.catalogue import limits, settle
from shared.config.flags import is_switch
from shared.config.run_config import RunConfig, section_model
from shared.config.section import HOOK, Section

PAGE = Path(__file__).with_name("config.md")

TOP = """# Config reference

Written by `python -m docs.config_page` from the sections in `shared/config`; do not edit.

A run is described by one TOML file. Every field is also a flag, with dashes for underscores: `rollout_batch_size = 32` in `[rollout]` is
`--rollout-batch-size 32`; a switch is `--colocate` or `--no-colocate`, a list takes the words up to the next flag, a mapping is JSON. Flags
stand over the file. Flags of [slime](coming-from-slime.md), [Megatron](megatron-flags.md) and SGLang (`--sglang-…`) are taken as they are.

A file may build on others: `base = "other.toml"`, or a list, relative to it. An unknown key or a value that does not fit is refused with
the field, the value and what would be right; `myxo up CONFIG --print-config` prints every field with the value that it comes to.

*Resume*: whether the value may differ when a run continues. A run is frozen with its config; another value of any other field is refused:
`--fresh`, or another name, begins anew. *Recorded*: it may differ, and
[the ledger records it](reliability.md#continuing-with-other-values). Nothing is read again while a run is at work.

*Unit*: of numbers that have one. A share is from 0 to 1, a rate or a weight has none.
"""

UNITS = (
    *("bytes", "demonstrations", "GPUs", "groups", "levels", "messages", "nats", "passes", "processes", "prompts", "ranks"),
    *("requests", "rollouts", "samples", "seconds", "sessions", "share", "steps", "tokens", "turns", "versions"),
)
"""The units of numbers: a word among the first of a field's description."""

ENDINGS = {
    "_bytes": "bytes",
    "_timeout": "seconds",
    "_wait": "seconds",
    "_tokens": "tokens",
    "_len": "tokens",
    "logprob_alarm": "nats",
    "_threshold": "",
}
"""The end of a field's name → its unit, whatever its description begins with."""

WORDS = {
    "str": "text",
    "Path": "path",
    "bool": "true or false",
    "Any": "any value",
    "int": "integer",
    "float": "number",
    "DataFile": "path",
}
"""Python's types in TOML's words."""

FIRST_WORDS = 4
"""How far into a description its unit may stand: `optimizer steps`, `training steps`, `mean difference in nats`."""


def main() -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.config_page", description="docs/config.md from the config's sections")
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1 where the page is out of date")
    return settle(PAGE, render(), parser.parse_args().check)


def render() -> str:
    """The whole page."""
    lines = [TOP]
    for section in RunConfig.model_fields:
        lines += _section(section, section_model(section))
    return "\n".join(lines).rstrip() + "\n"


def _section(name: str, model: type[Section]) -> list[str]:
    lines = [f"## [{name}]", "", _cell((model.__doc__ or "").split("\n\n")[0]), ""]
    lines += ["| field | value | unit | default | resume | meaning |", "|---|---|---|---|---|---|"]
    hints = get_type_hints(model)
    for field, info in model.model_fields.items():
        shown = [
            f"`{field}`",
            value_words(field, info),
            unit(field, info, hints[field]),
            _default(info),
            "recorded" if mutable(info, "recorded") else "may change" if mutable(info) else "",
        ]
        lines.append(f"| {' | '.join([*shown, _cell(info.description or '')])} |")
    return [*lines, ""]


def mutable(info: FieldInfo, mark: str = "mutable") -> bool:
    """Whether a field may have another value when a run is resumed; ``mark``: with which mark of `shared.config.section`."""
    return isinstance(info.json_schema_extra, dict) and bool(info.json_schema_extra.get(mark))


def unit(field: str, info: FieldInfo, annotation: Any) -> str:
    """The unit of a number's field, or nothing."""
    if not {"integer", "number"} & set(re.findall(r"\w+", _kind(annotation))):
        return ""
    words = re.findall(r"\w+", re.split("[;:.(]", info.description or "")[0])[:FIRST_WORDS]
    named = next((word for word in words if word in UNITS), "")
    return next((text for ending, text in ENDINGS.items() if field.endswith(ending)), named)


def value_words(field: str, info: FieldInfo) -> str:
    """What a field takes, in words: its type and its bounds."""
    if HOOK in [getattr(item, "pattern", None) for item in info.metadata]:
        return "path of a function"
    kind = "true or false" if is_switch(field) else _kind(info.annotation)
    bounds = [bound for bound in limits(info) if not bound.startswith("matches")]
    return _cell(", ".join([kind, *bounds]))


def _kind(annotation: Any) -> str:
    """A type in TOML's words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kind(argument) for argument in arguments if argument is not types.NoneType))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return f"table of {_kind(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    name = str(getattr(annotation, "__name__", annotation))
    return WORDS.get(name, name)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    return "" if value is None else _cell(f"`{json.dumps(value, ensure_ascii=False, default=str)}`")


def _cell(text: str) -> str:
    """A text as a cell of a table. Python's marks of code become Markdown's; what would begin an HTML tag outside of one does not."""
    line = " ".join(text.replace("``", "`").split()).replace("|", "\\|")
    # braces at the end of a cell are attributes for the website's Markdown
    return line if "`" in line else re.sub(r"\{([^{}]*)\}$", r"&#123;\1&#125;", line.replace("<", "&lt;"))


if __name__ == "__main__":
    sys.exit(main())
