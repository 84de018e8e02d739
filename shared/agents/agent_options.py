"""What agents read: their options in a config, and the calls of tools that a model wrote."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from shared.runtime.errors import ConfigError

Options = TypeVar("Options", bound=BaseModel)


def options_of(data: Mapping[str, Any], kind: type[Options]) -> Options:
    """Returns the ``agent_options`` in an agent's data. Raises ConfigError that names the first field that is wrong."""
    given = data.get("options", {})
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(("rollout.agent_options", *map(str, problem["loc"])))
        raise ConfigError(field, problem["input"], problem["msg"]) from None


def arguments_of(text: str) -> dict[str, Any]:
    """Returns the arguments of a call, JSON of an object. Raises ValueError, in words for the model."""
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments are no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError("the arguments must be a JSON object")
    return given


def shortened(text: str, most: int) -> str:
    """Returns a text; of one of more than ``most`` characters the beginning and the end, and how many are left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"
