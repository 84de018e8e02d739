"""A run config's TOML file with the files that it builds on: ``base = "model.toml"``, or a list of them, at its top.

A file's values override those of its bases, and a later base overrides an earlier one; tables such as ``[rollout.sglang]`` are merged
key by key. A base's path is relative to the file that names it.
"""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shared.runtime.errors import BadInput, ConfigError

BASE = "base"


class Known(NamedTuple):
    """The known values of a file: section → field → value, in a form that can be merged; the errors of the others; lines for the user."""

    values: dict[str, Any]
    problems: list[BadInput]
    notes: list[str]


@dataclass
class Layers:
    """The merged values of a file and its bases.

    Args:
        known: takes the values of one file.
        values: section → field → value. origins: ``section.field`` → the file that set it last. problems: the entries that were refused;
            one in a base names its file. notes: lines for the user.
    """

    known: Callable[[dict[str, Any]], Known]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Path] = field(default_factory=dict)
    problems: list[BadInput] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def read(self, path: Path, key: str = "CONFIG", given: str = "", above: tuple[Path, ...] = ()) -> None:
        """Reads a file and, under it, its bases. ``key``, ``given``: where it is named, and how. ``above``: the files that it is a base of.

        Raises ConfigError: a file is no readable TOML, or a base is missing or leads back to its own file; the error names the file.
        """
        where = f" (in {above[-1]})" if above else ""
        try:
            values = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError(key, given or str(path), f"no such file; give a TOML run config{where}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise ConfigError(key, given or str(path), f"not a readable TOML file: {error}{where}") from None
        chain = (*above, path)
        for base in _bases(values.pop(BASE, []), path):
            target = path.parent / base
            if target.resolve() in [file.resolve() for file in chain]:
                circle = " → ".join(str(file) for file in (*chain, target))
                raise ConfigError(BASE, base, f"a file that does not lead back to itself: {circle}")
            self.read(target, BASE, base, chain)
        taken, problems, notes = self.known(values)
        self.lay(taken, path)
        self.problems += [in_file(problem, path) for problem in problems] if above else problems
        self.notes += notes

    def lay(self, values: dict[str, Any], path: Path) -> None:
        """Merges a file's own values over the present ones."""
        for section, fields in values.items():
            if not isinstance(fields, dict) or not isinstance(self.values.get(section, {}), dict):
                self.values[section] = fields  # `shared.config.config_reading.parse` refuses it
                self.origins[section] = path
                continue
            known = self.values.setdefault(section, {})
            for name, value in fields.items():
                known[name] = _over(known[name], value) if name in known else value
                self.origins[f"{section}.{name}"] = path


def in_file(problem: BadInput, path: Path) -> BadInput:
    """Returns the same problem with the file that it comes from."""
    return ConfigError(problem.field, problem.value, f"{problem.expected} (in {path})") if isinstance(problem, ConfigError) else problem


def _bases(value: Any, path: Path) -> list[str]:
    bases = value if isinstance(value, list) else [value]
    if not all(isinstance(base, str) and base for base in bases):
        raise ConfigError(BASE, value, f"the path of a TOML file, relative to {path.parent}, or a list of such paths")
    return bases


def _over(below: Any, above: Any) -> Any:
    """Merges tables key by key; a file of prompts, which is a table with a path, is one value."""
    if not isinstance(below, dict) or not isinstance(above, dict) or "path" in above:
        return above
    return {**below, **{key: _over(below[key], value) if key in below else value for key, value in above.items()}}
