"""A file of prompts as a config names it: a path, a slice of its rows, a weight.

As text ``train.jsonl``, ``train.jsonl@[100:200]`` (slime's suffix; rows as Python slices them), ``train.jsonl@[:-50]*0.5``; in TOML also
``{ path = "train.jsonl@[100:200]", weight = 0.5 }``. In the place of the path may stand a split of a data set on the hub
(`shared.hub.hub_names`): ``hf:org/name:train@[100:200]``.
"""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared.hub import hub_names

_TEXT = re.compile(r"(?P<path>.+?)(?:@\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\])?(?:\*(?P<weight>\d+(?:\.\d*)?(?:e[+-]?\d+)?))?", re.DOTALL)
_BRACKETS = re.compile(r"@\[[^\]]*\](?:\*.*)?\Z")

EXPECTED = "give PATH, PATH@[start:stop] or PATH@[start:stop]*WEIGHT"


@dataclass(frozen=True, repr=False)
class DataFile:
    """One file. start, stop: rows as in a Python slice, None where left open. weight: how often an epoch draws from it."""

    path: Path
    start: int | None = None
    stop: int | None = None
    weight: float = 1.0

    def rows(self, length: int) -> range:
        """Returns the selected rows of a file of ``length`` rows."""
        return range(length)[self.start : self.stop]

    def absolute(self, base: Path) -> "DataFile":
        """Returns the file with its path absolute from ``base``; a name on the hub stays."""
        return replace(self, path=absolute(self.path, base))

    def __str__(self) -> str:
        """Returns text that `parse` reads back."""
        if self == DataFile(self.path) == parse(str(self.path)):
            return str(self.path)
        start, stop = ("" if end is None else end for end in (self.start, self.stop))
        return f"{self.path}@[{start}:{stop}]" + ("" if self.weight == 1 else f"*{self.weight!r}")

    def __repr__(self) -> str:
        return repr(str(self))


def parse(text: str) -> DataFile:
    """Reads one file as text. Raises ValueError with what is expected."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} names no file; {EXPECTED}")
    path, start, stop, weight = match.groups()
    if _BRACKETS.search(path):
        raise ValueError(f"{text!r} has no slice of rows in its brackets; {EXPECTED}")
    if hub_names.is_name(path):
        hub_names.dataset(path)
    file = DataFile(Path(path), None if start is None else int(start), None if stop is None else int(stop))
    return file if weight is None else replace(file, weight=_weight(float(weight)))


def _weight(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"the weight {value!r}; give a number over 0")
    return float(value)


def _entry(value: Any) -> DataFile:
    match value:
        case DataFile():
            return value
        case str() | Path():
            return parse(str(value))
        case {"path": str() | Path() as path, **rest} if set(rest) <= {"weight"}:
            file = parse(str(path))
            if "weight" in rest and file.weight != 1:
                raise ValueError(f"{str(path)!r} has a weight already")
            return replace(file, weight=_weight(rest["weight"])) if "weight" in rest else file
        case _:
            raise ValueError(f"{value!r} is no file; {EXPECTED}, or {{ path = …, weight = … }}")


def weighted(value: Any) -> list[DataFile] | None:
    """Reads what a config gives for its prompts: a file, a list of them, or none. Raises ValueError."""
    if value is None:
        return None
    if not (files := [_entry(item) for item in (value if isinstance(value, list) else [value])]):
        raise ValueError("give at least one file")
    return files


def unweighted(value: Any) -> list[DataFile] | None:
    """Reads as `weighted` does, for files that are all used, each once."""
    for file in (files := weighted(value)) or []:
        if file.weight != 1:
            raise ValueError(f"{str(file)!r} has a weight; held-out prompts and demonstrations are all used, each once")
    return files


def paths(value: object) -> list[Path]:
    """Returns the paths in a config's value: a path, or those of a list of files. Names on the hub are not among them."""
    if isinstance(value, list):
        return [path for item in value if isinstance(item, DataFile) for path in paths(item.path)]
    return [value] if isinstance(value, Path) and not hub_names.is_name(value) else []


def absolute(value: Any, base: Path) -> Any:
    """Returns a config's value with its paths made absolute from ``base``; anything else as it is."""
    match value:
        case Path():
            return value if hub_names.is_name(value) else base / value
        case [DataFile(), *_]:
            return [file.absolute(base) for file in value]
        case _:
            return value
