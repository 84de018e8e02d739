"""Megatron's own parser, where a Megatron-LM checkout is on the path (``megatron.training`` is there)."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from shared.config import megatron_flags
from shared.runtime.errors import ConfigError

STUBBED = ("get_args", "get_timers", "get_tokenizer", "get_adlr_autoresume")
"""What the package's modules take from it when they are imported; none of it is called by the parser."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of leaving the process."""

    def error(self, message: str) -> Any:
        raise ValueError(message)


def parsed(given: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Every given flag as Megatron's parser reads it → (its destination, the value).

    Flags that the parser does not have, because only a dataclass does, are left out. Raises ConfigError: unknown to both, or refused by
    the parser.
    """
    parser = build()
    known = {option: action for action in parser._actions for option in action.option_strings}
    found: dict[str, tuple[str, Any]] = {}
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        if option not in known:
            if name in megatron_flags.catalogue():
                continue
            raise ConfigError(f"trainer.megatron.{name}", value, f"unknown to Megatron's own parser, too; {megatron_flags.near(name)}")
        action = known[option]
        try:
            space = parser.parse_args(_words(option, action, value))
        except (ValueError, argparse.ArgumentError) as error:
            raise ConfigError(f"trainer.megatron.{name}", value, f"Megatron's own parser says: {error}") from None
        found[name] = (action.dest, getattr(space, action.dest))
    return found


def build() -> argparse.ArgumentParser:
    """The parser of the checkout, none of its defaults applied to anything."""
    with _stub_package():
        arguments = importlib.import_module("megatron.training.arguments")
    parser = _Parser(allow_abbrev=False, exit_on_error=False, argument_default=None)
    with contextlib.redirect_stdout(io.StringIO()):
        arguments.add_megatron_arguments(parser)
    for action in parser._actions:
        action.required = False
    return parser


@contextlib.contextmanager
def _stub_package() -> Iterator[None]:
    """``megatron.training`` without its ``__init__``, which imports tokenizers, Triton and the training loop."""
    name = "megatron.training"
    if name in sys.modules:
        yield
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise ConfigError("PYTHONPATH", name, "a Megatron-LM checkout; this one has no package of that name")
    package = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    for function in STUBBED:
        setattr(package, function, lambda *_, **__: None)
    sys.modules[name] = package
    try:
        yield
    except ImportError as error:
        raise ConfigError("PYTHONPATH", package.__path__[0], f"a Megatron-LM checkout whose arguments can be imported: {error}") from error
    finally:
        for module in [module for module in sys.modules if module == name or module.startswith(name + ".")]:
            del sys.modules[module]


def _words(option: str, action: argparse.Action, value: Any) -> list[str]:
    if action.nargs == 0:  # a switch: given, or not
        return [option] if value is True or value == "true" else []
    if isinstance(value, list) and action.nargs is None:  # a list in one word, as scripts write it
        return [option, "[" + ",".join(map(str, value)) + "]"]
    values = value if isinstance(value, list) else [value]
    return [option, *map(str, values)]
