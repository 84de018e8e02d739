"""Flags for every config field, under slime's and Megatron's names: ``--rollout-batch-size 32``; ``--sglang-…`` goes to the engine.

Megatron's own flags are taken as they are, where no field of the config has their name; see `shared.config.megatron_flags`. slime's that
there is no field for are refused with what stands in their place (`shared.config.slime_flags`), unknown flags with the nearest valid one.
"""

from __future__ import annotations

import ast
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from shared.config import megatron_flags, slime_flags
from shared.config.run_config import RunConfig, field_sections, section_model
from shared.runtime.errors import BadInput, ConfigError, near, nearest, raise_problems

SGLANG = "--sglang-"

Overrides = dict[str, dict[str, Any]]
"""Section → field → value."""


def parse(arguments: list[str]) -> Overrides:
    """Returns what `read` finds. Raises ConfigError for a flag that cannot be taken, or Problems of several."""
    overrides, problems = read(arguments)
    raise_problems(problems)
    return overrides


def read(arguments: list[str]) -> tuple[Overrides, list[BadInput]]:
    """Reads ``--name value``, ``--name=value``, ``--switch``, ``--no-switch`` into section → field → value.

    Values stay text where pydantic converts them; lists take the following words up to the next flag.
    Returns the overrides, and a ConfigError for each unknown flag and each missing value; a refused flag takes its values with it.
    """
    owners = field_sections()
    overrides: Overrides = {}
    problems: list[BadInput] = []
    rest = list(arguments)
    while rest:
        try:
            _read_flag(rest, owners, overrides)
        except ConfigError as error:
            problems.append(error)
            _following(rest)
    return overrides, problems


def _read_flag(rest: list[str], owners: dict[str, str], overrides: Overrides) -> None:
    """Takes one flag and its values off ``rest``. Raises ConfigError."""
    word = rest.pop(0)
    if not word.startswith("--"):
        raise ConfigError(word, word, "expected a flag that starts with --")
    flag, equals, inline = word.partition("=")
    if flag.startswith(SGLANG):
        # engine flags pass through verbatim: value if one follows, switch otherwise
        value = inline if equals else (rest.pop(0) if rest and not rest[0].startswith("--") else True)
        overrides.setdefault("rollout", {}).setdefault("sglang", {})[flag.removeprefix(SGLANG)] = value
        return
    name = flag.removeprefix("--").replace("-", "_")
    negated = name.startswith("no_") and name.removeprefix("no_") in owners
    name = name.removeprefix("no_") if negated else name
    if name not in owners:
        given, value = _megatron(flag, flag.removeprefix("--").replace("-", "_"), equals, inline, rest)
        overrides.setdefault("trainer", {}).setdefault("megatron", {})[given] = value
        return
    info = section_model(owners[name]).model_fields[name]
    if negated and bool not in _kinds(info.annotation):
        raise ConfigError(flag, inline or "", f"unknown flag; {nearest(flag.replace('--no-', '--', 1), flags())}")
    value = _value(flag, info, equals, inline, negated, rest)
    section = overrides.setdefault(owners[name], {})
    section[name] = {**section[name], **value} if isinstance(value, dict) and isinstance(section.get(name), dict) else value


def flags() -> list[str]:
    """Every flag that a config field answers to."""
    return ["--" + field.replace("_", "-") for field in field_sections()]


def help_lines() -> list[str]:
    """One line a flag: name, default, meaning; section by section."""
    lines = []
    for section in RunConfig.model_fields:
        model = section_model(section)
        lines.append(f"[{section}] {(model.__doc__ or '').strip()}")
        for field, info in model.model_fields.items():
            value = str(info.default) if isinstance(info.default, Path) else info.default
            default = "required" if info.is_required() else f"default {value!r}"
            lines.append(f"  --{field.replace('_', '-'):34} {info.description} ({default})")
    lines.append("  --sglang-…                           any flag of SGLang's server, verbatim")
    lines.append("  and Megatron's own flags as they are, such as --moe-router-dtype fp32; `myxo flags [PATTERN]` lists them")
    return lines


def _megatron(flag: str, name: str, equals: str, inline: str, rest: list[str]) -> tuple[str, Any]:
    """One of Megatron's flags: its name and its value."""
    known = megatron_flags.find(name)
    if known is None and (advice := slime_flags.advice(name)):
        raise ConfigError(flag, inline, advice)
    if known is None:
        meant = near(flag, flags()) or near(flag, [f"--{other.replace('_', '-')}" for other in megatron_flags.names()])
        hint = f"did you mean {meant}?" if meant else "`myxo up --help` lists all, `myxo flags` Megatron's"
        raise ConfigError(flag, inline, f"unknown flag; {hint}")
    words = [inline] if equals else []
    found, bare = known
    if not equals and (bare is None or (rest and rest[0].lower() in ("true", "false"))):
        words = _following(rest) if found.takes_several else _following(rest, 1)
    return found.name, megatron_flags.from_words(flag, found, bare, words)


def _following(rest: list[str], most: int | None = None) -> list[str]:
    """Takes the words up to the next flag off ``rest``."""
    words: list[str] = []
    while rest and not (rest[0].startswith("--") and len(rest[0]) > 2) and (most is None or len(words) < most):
        words.append(rest.pop(0))
    return words


def _value(flag: str, info: FieldInfo, equals: str, inline: str, negated: bool, rest: list[str]) -> Any:
    kinds = _kinds(info.annotation)
    if bool in kinds:
        if negated:
            return False
        known = {"true", "false"} | ({"none"} if type(None) in kinds else set())
        if not equals and not (rest and rest[0].lower() in known):
            return True
        text = inline if equals else rest.pop(0)
        return None if text.lower() == "none" and type(None) in kinds else text
    if list in kinds:
        words = [inline] if equals else []
        while rest and not rest[0].startswith("--"):
            words.append(rest.pop(0))
        if type(None) in kinds and [word.lower() for word in words] == ["none"]:
            return None
        if not words and type(None) in kinds:
            raise ConfigError(flag, "", f"needs a value: {info.description}")
        return words
    if equals:
        text = inline
    elif rest and not (rest[0].startswith("--") and len(rest[0]) > 2):
        text = rest.pop(0)
    else:
        raise ConfigError(flag, "", f"needs a value: {info.description}")
    if dict in kinds:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError) as error:
            raise ConfigError(flag, text, "expected a mapping such as \"{'key': 1}\"") from error
    return None if text.lower() == "none" and type(None) in kinds else text


def _kinds(annotation: Any) -> set[type]:
    """The plain types an annotation admits: ``int | None`` → {int, NoneType}."""
    if get_origin(annotation) in (Union, types.UnionType):
        return {kind for argument in get_args(annotation) for kind in _kinds(argument)}
    origin = get_origin(annotation)
    return {origin if isinstance(origin, type) else annotation if isinstance(annotation, type) else object}
