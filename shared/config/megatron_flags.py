"""Megatron's flags as a config holds them: names, kinds of values, and those without effect or refused here.

The catalogue, ``megatron_flags.json``, is made from Megatron's dataclasses and `docs.flag_tables` by ``python -m docs.flags``, so that the
flags of a user are checked without torch. A flag has one name (`Flag.name`) and may have other spellings: ``--no-rope-fusion`` is
``apply_rope_fusion = false``.
"""

import ast
import contextlib
import importlib.util
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from pydantic import TypeAdapter

from shared.runtime.errors import ConfigError, near

OF_DEEPEP = frozenset({"moe_enable_deepep", "moe_deepep_num_sms", "moe_flex_dispatcher_backend", "moe_hybridep_num_sms"})
"""Flags that only the flex dispatcher of tokens looks at."""

UNSET = object()
"""The mark for no fixed value."""

MAX_LIST = 4096
"""The most entries of a list that an expression may make."""


@dataclass(frozen=True)
class Flag:
    """One flag.

    Args:
        name: with underscores. spellings: other names → what a bare switch of that name sets here; None: takes a value as the name does.
        kind: switch, int, float, text, ints, floats, texts, or two of them (``int or ints``); dtypes are all refused. choices: of a text;
            none: any.
        optional: whether none is a value. default: the value if the flag is not given.
        groups: its destinations: transformer, optimizer, ddp (Megatron's dataclasses) or architecture; none: it is refused or
            states what always holds.
        fixed: the only value that it may have here. reason: why it is fixed, or why the flag is refused.
        ignored: whether every value of its kind is accepted without effect, for ``reason``.
        engine: whether only Transformer Engine's layers use it. kernels: whether it only chooses among kernels of Transformer Engine's,
            so that without them it has no effect.
    """

    name: str
    kind: str
    default: Any = None
    optional: bool = False
    groups: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    spellings: Mapping[str, Any] = field(default_factory=dict)
    fixed: Any = UNSET
    reason: str = ""
    ignored: bool = False
    engine: bool = False
    kernels: bool = False

    @property
    def refused(self) -> bool:
        """Returns whether every value is refused."""
        return bool(self.reason) and self.fixed is UNSET and not self.ignored

    @property
    def takes_several(self) -> bool:
        """Returns whether several words may follow it."""
        return self.refused or self.kind.endswith(("ints", "floats", "texts"))

    @property
    def command_line(self) -> list[str]:
        """Returns all spellings as typed on a command line, the name first."""
        return ["--" + name.replace("_", "-") for name in (self.name, *self.spellings)]

    def typed(self, value: Any) -> Any:
        """Returns ``value``, text of a command line or TOML's, as plain data of the flag's kind. Raises ValueError: what is expected."""
        if self.refused:
            raise ValueError(self.reason)
        plain = None if self.optional and _is_none(value) else _plain(self.kind, value)
        given = [] if plain is None else plain if isinstance(plain, list) else [plain]
        if self.choices and not set(given) <= set(self.choices):
            raise ValueError(f"one of {', '.join(self.choices)}")
        if self.fixed is not UNSET and plain != self.fixed:
            raise ValueError(f"leave it out, or give {_shown(self.fixed)}: {self.reason}")
        return plain


@cache
def catalogue() -> dict[str, Flag]:
    """Returns every flag by its name."""
    stored = json.loads(resources.files("shared.config").joinpath("megatron_flags.json").read_text())
    return {flag.name: flag for flag in TypeAdapter(list[Flag]).validate_python(stored["flags"])}


@cache
def spellings() -> dict[str, tuple[Flag, Any]]:
    """Returns for every spelling, ``no_…`` of switches too, the flag and the value that a bare switch sets (None: it is no switch)."""
    found: dict[str, tuple[Flag, Any]] = {}
    for flag in catalogue().values():
        found[flag.name] = flag, True if flag.kind == "switch" else None
        found |= {spelling: (flag, value) for spelling, value in flag.spellings.items()}
    opposites = {f"no_{name}": (flag, not value) for name, (flag, value) in found.items() if value is not None}
    return opposites | found


def names() -> list[str]:
    """Returns every spelling of a flag that is not refused, with underscores."""
    return [name for name, (flag, _) in spellings().items() if not flag.refused]


def canonical(given: Mapping[str, Any], own: Collection[str] = ()) -> dict[str, Any]:
    """Returns a config's ``[trainer.megatron]``, keys with dashes or underscores in any spelling, as name → plain value.

    Raises ConfigError: one of Myxo's ``own`` fields, an unknown or refused flag, a wrong value, two spellings that contradict one another.
    """
    result: dict[str, Any] = {}
    for key, value in given.items():
        name, path = key.replace("-", "_"), f"trainer.megatron.{key}"
        if name in own:
            raise ConfigError(path, value, f"a field of its own: {name}, outside of [trainer.megatron]")
        if (known := spellings().get(name)) is None:
            meant = near(name, names())
            hint = f"did you mean {meant}?" if meant else "`myxo flags` lists all"  # too many to tell
            raise ConfigError(path, value, f"unknown flag of Megatron's; {hint}")
        flag, bare = known
        name, typed = flag.name, _typed(path, flag, bare, value)
        if name in result and result[name] != typed:
            raise ConfigError(path, value, f"another spelling says {name} = {_shown(result[name])}")
        result[name] = typed
    return result


def has_engine() -> bool:
    """Returns whether Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def has_deepep() -> bool:
    """Returns whether DeepEP is installed."""
    return importlib.util.find_spec("deep_ep") is not None


def missing_engine(given: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yields an error for each flag that needs Transformer Engine if that is not installed. ``given``: name → value."""
    if has_engine():
        return
    for name, value in given.items():
        flag = catalogue().get(name)
        if name == "transformer_impl" and value == "transformer_engine":
            yield ConfigError(f"trainer.megatron.{name}", value, "local; Transformer Engine is not installed")
        elif flag is not None and flag.engine and not flag.kernels and value != flag.default:
            yield ConfigError(f"trainer.megatron.{name}", value, "Transformer Engine has it, which is not installed; leave it out")


def without_effect(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields each flag that changes nothing in this installation, and why. ``given``: name → value."""
    engine, deepep = has_engine(), has_deepep()
    for name, value in given.items():
        flag = catalogue().get(name)
        if flag is not None and flag.ignored:
            yield flag.command_line[0], flag.reason
        elif flag is not None and not deepep and (name in OF_DEEPEP or (name, value) == ("moe_token_dispatcher_type", "flex")):
            yield flag.command_line[0], "DeepEP is not installed: tokens go to their experts by all-to-all; the values are the same"
        elif flag is not None and flag.kernels and value != flag.default and not engine:
            yield flag.command_line[0], "it chooses among kernels of Transformer Engine's, which is not installed; the values are the same"


def refusal(name: str) -> str | None:
    """Returns why every value of a flag of Megatron's is refused; None for any other name."""
    flag = catalogue().get(name)
    return flag.reason if flag is not None and flag.refused else None


def _typed(path: str, flag: Flag, bare: Any, value: Any) -> Any:
    try:
        if flag.kind == "switch" and not flag.refused and not (flag.optional and _is_none(value)):
            given = _single("switch", value)
            value = bare if given else not bare
        return flag.typed(value)
    except ValueError as error:
        raise ConfigError(path, value, str(error)) from None


def from_words(spelled: str, flag: Flag, bare: Any, words: list[str]) -> Any:
    """Returns the value of ``--spelled word …`` on the command line. Raises ConfigError."""
    text = " ".join(words)
    if flag.refused:
        raise ConfigError(spelled, text, flag.reason)
    if bare is not None:
        return _typed(spelled, flag, bare, words[0] if words else True)
    if not words:
        raise ConfigError(spelled, "", f"needs a value: {flag.kind}" + (f", one of {', '.join(flag.choices)}" if flag.choices else ""))
    value: Any = words if flag.takes_several and len(words) > 1 else text
    return _typed(spelled, flag, bare, value)


# --- values


def _is_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.lower() == "none")


def _shown(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


_EXPECTED = {"switch": "true or false", "int": "a whole number", "float": "a number", "text": "text"}


def _single(kind: str, value: Any) -> Any:
    """Returns text or TOML's value as one of `_EXPECTED`. Raises ValueError: what is expected."""
    text = str(value)
    with contextlib.suppress(KeyError, ValueError):
        match kind:
            case "switch":
                return {"true": True, "false": False}[text.lower()]
            case "int":
                return int(text)
            case "float" if math.isfinite(number := float(text)):
                return number
            case "text" if isinstance(value, str) and value:
                return value
    raise ValueError(_EXPECTED[kind])


def _plain(kind: str, value: Any) -> Any:
    """Returns text or TOML's value as plain data: a list for ``ints``, one or a list for ``int or ints``. Raises ValueError."""
    single = kind.split()[0].removesuffix("s")
    if kind == single:
        return _single(kind, value)
    if isinstance(value, str):
        if value.lstrip().startswith(("[", "(")):
            value = _expression(value)
        elif " or " not in kind or " " in value.strip():
            value = value.replace(",", " ").split()
    if not isinstance(value, list | tuple):
        return _single(single, value) if " or " in kind else [_single(single, value)]
    if not value:
        raise ValueError("at least one value")
    return [_single(single, item) for item in value]


def _expression(text: str) -> list[Any]:
    """Returns the list that a script writes as ``[0]*1+[1]*27``. Raises ValueError."""

    def read(node: ast.AST) -> Any:
        match node:
            case ast.Expression(body=body):
                return read(body)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [read(item) for item in items]
            case ast.Constant(value=int() | float() | str() as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return joined(read(left), read(right), 1)
            case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int() as times)):
                return joined(read(left), [], times)
        raise ValueError

    def joined(left: Any, right: Any, times: int) -> list[Any]:
        if not isinstance(left, list) or not isinstance(right, list) or len(left) * times + len(right) > MAX_LIST:
            raise ValueError
        return left * times + right

    try:
        value = read(ast.parse(text.strip(), mode="eval"))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        value = None
    if not isinstance(value, list):
        raise ValueError("a list such as [0]*1+[1]*27")
    return value
