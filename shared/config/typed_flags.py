"""What the errors of a command line call a field: the flag that was typed, with the field beside it, as ``--lr (trainer.lr)``."""

import re
from collections.abc import Mapping

from shared.config.run_config import field_sections
from shared.config.slime_functions import SETTLED_FROM
from shared.runtime.errors import BadInput, ConfigError

_BEYOND = re.compile(r"[\w-]")
"""A character that would make a longer name of a field's."""


def named(problem: BadInput, typed: Mapping[str, str], *, alone: bool) -> BadInput:
    """Returns the same problem under the flag that its field was set by; as it is where a file set it.

    Args:
        typed: ``section.field`` → the flag that set it. alone: whether there is no file, so that every field is a flag's.
    """
    if not isinstance(problem, ConfigError):
        return problem
    flag = _flag(problem.field, typed) or (_own_flag(problem.field) if alone else None)
    return problem if flag is None else ConfigError(f"{flag} ({problem.field})", problem.value, problem.expected)


def _flag(field: str, typed: Mapping[str, str]) -> str | None:
    """Returns the flag of a field, of what it was settled from, or of the longest path above it."""
    paths = {**{settled: typed[source] for settled, source in SETTLED_FROM.items() if source in typed}, **typed}
    above = [path for path in paths if field.startswith(path) and not _BEYOND.match(field[len(path) :])]
    return paths[max(above, key=len)] if above else None


def _own_flag(field: str) -> str | None:
    section, _, rest = field.partition(".")
    name = re.split(r"[^\w]", rest, maxsplit=1)[0]
    return "--" + name.replace("_", "-") if field_sections().get(name) == section else None
