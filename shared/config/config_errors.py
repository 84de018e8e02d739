"""The errors of a config, each under its field: made of what pydantic refuses, and without those that only follow from another."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import ValidationError

from shared.config.eval_section import NAME
from shared.config.run_config import RunConfig, section_model
from shared.config.section import Misfits
from shared.runtime.errors import BadInput, ConfigError
from shared.runtime.safe_text import without_credentials


def without_consequences(found: Iterable[BadInput], reported: list[BadInput]) -> list[BadInput]:
    """Returns the errors that do not follow from a reported one: a misspelt field, or a section that is no table, is also missing."""
    refused = [problem for problem in reported if isinstance(problem, ConfigError)]
    fields, hints = {problem.field for problem in refused}, {problem.expected.rpartition("did you mean ")[2] for problem in refused}

    def follows(problem: BadInput) -> bool:
        if not isinstance(problem, ConfigError):
            return False
        section, _, name = problem.field.rpartition(".")
        return problem.field in fields or section in fields or f"{name}?" in hints

    return [problem for problem in found if not follows(problem)]


def config_errors(error: ValidationError, values: dict[str, Any]) -> Iterator[ConfigError]:
    """Yields an error for each value that pydantic refused, under its field."""
    for found in error.errors():
        reason = found.get("ctx", {}).get("error")
        if isinstance(reason, Misfits):
            for problem in reason.problems:
                field, message = problem.split(": ", 1)
                yield _config_error(found["type"], field.split("."), message, values)
        else:
            yield _config_error(found["type"], [str(part) for part in found["loc"]], found["msg"].removeprefix("Value error, "), values)


def _config_error(kind: str, location: list[str], message: str, values: dict[str, Any]) -> ConfigError:
    location, value = _found(location, values)
    if kind == "missing":
        model = section_model(location[0]) if len(location) > 1 else None
        description = model.model_fields[location[1]].description if model and location[1] in model.model_fields else "a section"
        return ConfigError(".".join(location), None, f"required: {description}")
    if value is None:
        value = _default(location)
    return ConfigError(".".join(location), without_credentials(value, free=True), message[0].lower() + message[1:])


def _default(location: list[str]) -> Any:
    """Returns the value that a field has where none is given; None for what has none."""
    if len(location) != 2 or location[0] not in RunConfig.model_fields:
        return None
    field = section_model(location[0]).model_fields.get(location[1])
    return None if field is None or field.is_required() else field.default


def _found(location: list[str], values: Any) -> tuple[list[str], Any]:
    """Returns a location with the names of a list's tables in the place of their numbers, and the value there; a key of a list: of all."""
    shown = []
    for part in location:
        if isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
            name = values.get("name") if isinstance(values, dict) else None
            shown.append(name if isinstance(name, str) and re.match(NAME, name) else part)
            continue
        if isinstance(values, list) and not part.isdecimal():
            values = [item.get(part) for item in values if isinstance(item, dict)]
        else:
            values = values.get(part) if isinstance(values, dict) else None
        shown.append(part)
    return shown, values
