"""Flags for every config field, under slime's and Megatron's names: ``--rollout-batch-size 32``; ``--sglang-…`` goes to the engine.

Megatron's own flags are taken as they are, where no field of the config has their name (`shared.config.megatron_flags`). A flag of slime's
without a field is refused with its replacement, an unknown flag with the nearest valid one.
"""

import ast
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from shared.config import megatron_flags
from shared.config.run_config import RunConfig, field_sections, section_model
from shared.runtime.errors import BadInput, ConfigError, near, nearest, raise_problems

SGLANG = "--sglang-"

Overrides = dict[str, dict[str, Any]]
"""Section → field → value."""


def parse(arguments: list[str]) -> Overrides:
    """Returns the overrides of `read`. Raises ConfigError for a refused flag, or Problems for several."""
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
    flag, equals, text = word.partition("=")
    given = text if equals else None
    name = flag.removeprefix("--").replace("-", "_")
    positive = name.removeprefix("no_")
    if flag.startswith(SGLANG):  # passed through verbatim: a value if one follows, a switch otherwise
        words = [given] if given is not None else _following(rest, 1)
        overrides.setdefault("rollout", {}).setdefault("sglang", {})[flag.removeprefix(SGLANG)] = words[0] if words else True
    elif name in owners:
        value = _value(flag, section_model(owners[name]).model_fields[name], given, rest)
        section = overrides.setdefault(owners[name], {})
        section[name] = {**section[name], **value} if isinstance(value, dict) and isinstance(section.get(name), dict) else value
    elif positive in owners:
        if bool not in _kinds(section_model(owners[positive]).model_fields[positive].annotation):
            raise ConfigError(flag, given or "", f"unknown flag; {nearest(flag.replace('--no-', '--', 1), flags())}")
        overrides.setdefault(owners[positive], {})[positive] = False
    else:
        megatron_name, value = _megatron(flag, name, given, rest)
        overrides.setdefault("trainer", {}).setdefault("megatron", {})[megatron_name] = value


def _megatron(flag: str, name: str, given: str | None, rest: list[str]) -> tuple[str, Any]:
    """Returns the name and the value of one of Megatron's flags. Raises ConfigError for an unknown flag."""
    if (known := megatron_flags.spellings().get(name)) is None:
        meant = near(flag, flags()) or near(flag, [f"--{other.replace('_', '-')}" for other in megatron_flags.names()])
        hint = f"did you mean {meant}?" if meant else "`myxo up --help` lists all, `myxo flags` Megatron's"
        raise ConfigError(flag, given or "", f"unknown flag; {hint}")
    found, switched = known
    words = [] if given is None else [given]
    if given is None and (switched is None or _next_is(rest, "true", "false")):
        words = _following(rest, None if found.takes_several else 1)
    return found.name, megatron_flags.from_words(flag, found, switched, words)


def _value(flag: str, info: FieldInfo, given: str | None, rest: list[str]) -> Any:
    """Returns the value of a field's flag: the text after its ``=``, or the words that follow. Raises ConfigError."""
    kinds = _kinds(info.annotation)
    optional = type(None) in kinds
    if given is not None:
        words = [given]
    elif bool in kinds and not _next_is(rest, "true", "false", *(["none"] if optional else [])):
        return True
    else:
        words = _following(rest, None if list in kinds else 1)
    if not words and (optional or list not in kinds):
        raise ConfigError(flag, "", f"needs a value: {info.description}")
    if optional and [word.lower() for word in words] == ["none"] and words[0] not in _choices(info.annotation):
        return None
    if list in kinds:
        return words
    return _mapping(flag, words[0]) if dict in kinds else words[0]


def _mapping(flag: str, text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ConfigError(flag, text, "expected a mapping such as \"{'key': 1}\"") from error


def _following(rest: list[str], most: int | None = None) -> list[str]:
    """Takes the words up to the next flag off ``rest``."""
    words: list[str] = []
    while rest and not (rest[0].startswith("--") and len(rest[0]) > 2) and (most is None or len(words) < most):
        words.append(rest.pop(0))
    return words


def _next_is(rest: list[str], *words: str) -> bool:
    return bool(rest) and rest[0].lower() in words


def _kinds(annotation: Any) -> set[type]:
    """Returns the plain types that an annotation admits: {int, NoneType} for ``int | None``."""
    if get_origin(annotation) in (Union, types.UnionType):
        return {kind for argument in get_args(annotation) for kind in _kinds(argument)}
    origin = get_origin(annotation)
    return {origin if isinstance(origin, type) else annotation if isinstance(annotation, type) else object}


def _choices(annotation: Any) -> set[Any]:
    """Returns the values of the literals among an annotation's types: ``none`` may be one of them."""
    if get_origin(annotation) in (Union, types.UnionType):
        return {choice for argument in get_args(annotation) for choice in _choices(argument)}
    return set(get_args(annotation)) if get_origin(annotation) is Literal else set()


def flags() -> list[str]:
    """Returns the flags of all config fields."""
    return ["--" + field.replace("_", "-") for field in field_sections()]


def help_lines() -> list[str]:
    """Returns one line for each flag, section by section: its name, default and meaning."""
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
