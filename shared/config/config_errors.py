"""The errors of a config, each under its field: made of what pydantic refuses, and without those that only follow from another."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import ValidationError

from shared.config.environment_variables import names_credential
from shared.config.run_config import section_model
from shared.config.section import Misfits
from shared.runtime.errors import BadInput, ConfigError


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


def _without_secrets(value: Any) -> Any:
    """Returns a value as errors show it: with URLs stripped of credentials, and without what is named as one."""
    if isinstance(value, dict):
        return {key: "…" if names_credential(str(key)) else _without_secrets(item) for key, item in value.items()}
    return re.sub(r"://.*@", "://", value) if isinstance(value, str) else value


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
    value: Any = values
    for part in location:
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            value = value.get(part) if isinstance(value, dict) else None
    if kind == "missing":
        model = section_model(location[0]) if len(location) > 1 else None
        description = model.model_fields[location[1]].description if model and location[1] in model.model_fields else "a section"
        return ConfigError(".".join(location), None, f"required: {description}")
    return ConfigError(".".join(location), _without_secrets(value), message[0].lower() + message[1:])
