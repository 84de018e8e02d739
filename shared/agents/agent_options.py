"""What a config says to an agent, read and checked by the agent that it is for."""

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
