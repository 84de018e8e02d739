"""The flags of an engine's command line, as those read them who begin something before SGLang does. Pure."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest

TENSOR = ("tp-size", "tp", "tensor-parallel-size")
PIPELINE = ("pp-size", "pp", "pipeline-parallel-size")
DATA = ("dp-size", "dp", "data-parallel-size")
NODES = ("nnodes",)
"""Flags that tell sizes, each with its other names."""


def engine_flags(arguments: Sequence[str]) -> dict[str, str]:
    """Returns the flags of a command line without their dashes, each with the first of its values, or an empty string."""
    found = {}
    for word, following in zip_longest(arguments, arguments[1:], fillvalue="--"):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name.replace("_", "-")] = value if equals else "" if following.startswith("--") else following
    return found


def flag_number(flags: Mapping[str, str], names: Sequence[str], default: int = 1) -> int:
    """Returns the number that a flag gives, under any of its names. Raises ValueError for what is none."""
    return next((int(flags[name]) for name in names if name in flags), default)
