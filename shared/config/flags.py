"""The command line: a flag for every config field, ``--rollout-batch-size 32``; ``--sglang-…`` goes to the engine.

What becomes of slime's and Megatron's flags that are no fields is in `shared.config.flag_table`. An unknown flag, a shortened one too, is
refused with the nearest valid one.
"""

import ast
import contextlib
import dataclasses
import json
import re
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from shared.config import flag_table
from shared.config.run_config import RunConfig, field_sections, section_model
from shared.config.section import Words
from shared.config.slime_defaults import SETTLED_FROM
from shared.runtime.errors import BadInput, ConfigError, near, nearest, raise_problems
from shared.runtime.safe_text import without_credentials

SGLANG = "--sglang-"

Overrides = dict[str, dict[str, Any]]  # Section → field → value


@dataclasses.dataclass
class CommandLine:
    """The flags of a command line.

    Args:
        overrides: what they set. problems: a ConfigError for each flag that cannot be taken; it takes its values with it.
        renamed: fields that flags under other names set; a field's own flag wins over them.
        notes: lines for the user: flags under other names, without effect, or given twice. environment: variables for the services.
        typed: ``section.field`` → the flag that sets it, as it was typed. as_slime: whether slime's defaults and rules hold.
        words: as they were typed, without credentials.
    """

    overrides: Overrides = dataclasses.field(default_factory=dict)
    problems: list[BadInput] = dataclasses.field(default_factory=list)
    renamed: flag_table.Fields = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    typed: dict[str, str] = dataclasses.field(default_factory=dict)
    as_slime: bool = False
    words: list[str] = dataclasses.field(default_factory=list)

    def set(self, section: str, name: str, value: Any, flag: str, key: str = "") -> None:
        """Sets a field, or a key of it; a mapping is added to the one that is there."""
        self.typed[f"{section}.{name}" + (f".{key}" if key else "")] = flag
        fields, value = self.overrides.setdefault(section, {}), {key: value} if key else value
        present = fields.get(name)
        fields[name] = {**present, **value} if isinstance(present, dict) and isinstance(value, dict) else value


def parse(arguments: list[str]) -> Overrides:
    """Returns the overrides of `read`. Raises ConfigError for a refused flag, or Problems for several."""
    given = read(arguments)
    raise_problems(given.problems)
    return given.overrides


def read(arguments: list[str]) -> CommandLine:
    """Reads ``--name value``, ``--name=value``, ``--switch``, ``--no-switch`` into section → field → value.

    Values stay text where pydantic converts them; lists take the following words up to the next flag. A flag that is given twice has its
    last value.
    """
    owners = field_sections()
    given = CommandLine()
    rest, seen = list(arguments), dict[str, list[str]]()
    while rest:
        before = list(rest)
        try:
            _read_flag(rest, owners, given)
        except ConfigError as error:
            given.problems.append(error)
            _following(rest)
            continue
        words = before[: len(before) - len(rest)]
        flag, _, value = words[0].partition("=")
        key, name = flag.replace("--no-", "--", 1), flag.removeprefix("--").replace("-", "_")
        if (slimes := flag_table.of_slime(name)) is None or not slimes.variable:
            given.words += map(_without_credentials, words)
        if seen.get(key, words) != words and not adds(name) and not value.startswith("{") and not words[-1].startswith("{"):
            last = " ".join([value, *words[1:]]).strip()
            given.notes.append(f"{key} is given twice: {last or flag} counts, the last")
        seen[key] = words
    given.notes += flag_table.lay_renamed(given.overrides, owners, given.renamed)
    return given


def _read_flag(rest: list[str], owners: Mapping[str, str], given: CommandLine) -> None:
    """Takes one flag and its values off ``rest``. Raises ConfigError."""
    word = rest.pop(0)
    if not word.startswith("--"):
        raise ConfigError(word, word, "expected a flag that starts with --")
    flag, equals, text = word.partition("=")
    own = [text] if equals else None
    name = flag.removeprefix("--").replace("-", "_")
    positive = name.removeprefix("no_")
    if name in owners:
        value = _value(flag, section_model(owners[name]).model_fields[name], own, rest)
        earlier = given.overrides.get(owners[name], {}).get(name)
        given.set(owners[name], name, [*earlier, *value] if earlier and adds(name) else value, flag)
    elif flag.startswith(SGLANG) and flag_table.of_slime(name) is None:
        # passed through verbatim: the values that follow, or a switch
        words = _following(rest) if own is None else own
        value = True if not words else words[0] if len(words) == 1 else words
        given.set("rollout", "sglang", value, flag, flag.removeprefix(SGLANG))
    elif positive in owners:
        if not is_switch(positive):
            raise ConfigError(flag, text, f"unknown flag; {nearest(flag.replace('--no-', '--', 1), flags())}")
        if equals:
            raise ConfigError(flag, text, f"no value: it turns --{positive.replace('_', '-')} off, which takes true or false")
        given.set(owners[positive], positive, False, flag)
    else:
        _translated(flag, name, own, rest, given)


def _translated(flag: str, name: str, own: list[str] | None, rest: list[str], given: CommandLine) -> None:
    """Reads a flag that is no field: one of slime's or of Megatron's. Raises ConfigError."""
    slimes = flag_table.of_slime(name)
    known = (slimes, True if slimes.kind == "switch" else None) if slimes else flag_table.spellings().get(name)
    if known is None:
        raise ConfigError(flag, "".join(own or []), f"unknown flag; {_hint(flag)}")
    found, bare = known
    words = own or []
    if own is None and (bare is None or _next_is_truth(rest)):
        words = _following(rest, None if found.refused or found.kind.endswith("s") else 1)
    value = found.of_words(flag, bare, words)
    if slimes is None:
        given.set("trainer", "megatron", flag_table.typed(flag, found, bare, value), flag, found.name)
        return
    given.renamed, note, environment = flag_table.translate(flag, found, value, given.renamed)
    for field in given.renamed:
        given.typed.setdefault(f"{field_sections()[field]}.{field}", flag)
    given.notes += [note] if note not in given.notes else []
    given.environment |= environment


def _hint(flag: str) -> str:
    """Returns which flag is meant by an unknown one: of the config, slime's, or else Megatron's."""
    name = flag.removeprefix("--").replace("-", "_")
    if (field := flag_table.of_others("fields").get(name)) is not None:
        return f"did you mean --{field.replace('_', '-')}?"
    slimes, megatrons = ([f"--{name.replace('_', '-')}" for name in names] for names in (flag_table.SLIME, flag_table.names()))
    meant = near(flag, [*flags(), *slimes]) or near(flag, megatrons)
    return flag_table.refusal(name) or (f"did you mean {meant}?" if meant else "`myxo up --help` lists all, `myxo flags` Megatron's")


def adds(name: str) -> bool:
    """Returns whether the flag of this name adds to a list each time that it is given; False for those that are no fields."""
    section = field_sections().get(name)
    found = [] if section is None else section_model(section).model_fields[name].metadata
    return any(isinstance(item, Words) and item.adds for item in found)


def _value(flag: str, info: FieldInfo, own: list[str] | None, rest: list[str]) -> Any:
    """Returns the value of a field's flag: the text after its ``=`` (``own``), or the words that follow. Raises ConfigError."""
    kinds = _kinds(info.annotation)
    reader = next((item.read for item in info.metadata if isinstance(item, Words)), None)
    several, optional = list in kinds, type(None) in kinds
    if own is None and bool in kinds and not _next_is_truth(rest, none=optional):
        return True
    words = _following(rest, None if several or reader else 1) if own is None else own
    if not words and not (several and not optional):
        raise ConfigError(flag, "", f"needs a value: {info.description}")
    if optional and _is_none(words, info):
        return None
    return _read_by(reader, flag, kinds, words)


def _read_by(reader: Callable[[list[str]], Any] | None, flag: str, kinds: set[type], words: list[str]) -> Any:
    if reader is None and list in kinds:
        return words
    if reader is None:
        return mapping(flag, words[0]) if dict in kinds else flag_table.truth(words[0]) if bool in kinds else words[0]
    try:
        return reader(words)
    except ValueError as error:
        raise ConfigError(flag, " ".join(words), str(error)) from None


def _is_none(words: list[str], info: FieldInfo) -> bool:
    choices = [choice for member in _members(info.annotation) if get_origin(member) is Literal for choice in get_args(member)]
    return [word.lower() for word in words] == ["none"] and words[0] not in choices


def _without_credentials(word: str) -> str:
    """Returns a word as others may see it; a table's text with ``…`` in the place of what its keys say is secret."""
    if (table := re.fullmatch(r"((?:[^\[{]*=)?\s*)([\[{].*)", word, re.DOTALL)) and (found := _literal(table[2])) != table[2]:
        return table[1] + json.dumps(without_credentials(found, free=True), ensure_ascii=False, default=str, skipkeys=True)
    return str(without_credentials(word))


def mapping(flag: str, text: str) -> dict[str, Any] | None:
    """Returns the mapping in a flag's text, JSON or Python; None for null. Raises ConfigError."""
    if isinstance(found := _literal(text), dict | None):
        return found
    raise ConfigError(flag, text, "expected a mapping such as '{\"key\": true}'")


def _literal(text: str) -> Any:
    """Returns what a text says in JSON or Python; itself where it is neither."""
    for read_text in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # a set of tables: TypeError
            return read_text(text)
    return text


def _following(rest: list[str], most: int | None = None) -> list[str]:
    """Takes the words up to the next flag off ``rest``."""
    words: list[str] = []
    while rest and not (rest[0].startswith("--") and len(rest[0]) > 2) and (most is None or len(words) < most):
        words.append(rest.pop(0))
    return words


def _next_is_truth(rest: list[str], *, none: bool = False) -> bool:
    return bool(rest) and (isinstance(flag_table.truth(rest[0]), bool) or (none and rest[0].lower() == "none"))


def _members(annotation: Any) -> list[Any]:
    """Returns the types of a union; of any other annotation itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for argument in get_args(annotation) for member in _members(argument)]
    return [annotation]


def _kinds(annotation: Any) -> set[type]:
    """Returns the plain types that an annotation admits: {int, NoneType} for ``int | None``."""
    plain = (get_origin(member) or member for member in _members(annotation))
    return {kind if isinstance(kind, type) else object for kind in plain}


def is_switch(field: str) -> bool:
    """Returns whether a field's flag may stand without a value, and has an opposite."""
    return bool in _kinds(section_model(field_sections()[field]).model_fields[field].annotation)


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
    lines.append("  and Megatron's own flags as they are, such as --moe-router-dtype fp32; `myxo flags [PATTERN]` lists them,")
    lines.append("  and slime's: docs/coming-from-slime.md tells what becomes of each")
    return lines


def named(problem: BadInput, typed: Mapping[str, str], *, alone: bool) -> BadInput:
    """Returns the same problem under the flag that its field was set by, as ``--lr (trainer.lr)``; as it is where a file set it.

    Args:
        typed: ``section.field`` → the flag that set it. alone: whether there is no file, so that every field is a flag's.
    """
    if not isinstance(problem, ConfigError):
        return problem
    demonstrates = "algorithm.loss_type" in typed  # else flags of prompts are not those of demonstrations
    settled = {field: typed[of] for field, of in SETTLED_FROM.items() if of in typed and (demonstrates or not field.startswith("sft."))}
    paths = settled | dict(typed)
    above = [path for path in paths if re.match(rf"{re.escape(path)}(?![\w-])", problem.field)]
    section, _, rest = problem.field.partition(".")
    name = re.split(r"[^\w]", rest, maxsplit=1)[0]
    own = f"--{name.replace('_', '-')}" if alone and field_sections().get(name) == section else None
    flag = paths[max(above, key=len)] if above else own
    return problem if flag is None else ConfigError(f"{flag} ({problem.field})", problem.value, problem.expected)
