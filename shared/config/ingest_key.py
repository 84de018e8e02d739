"""The key of those who hand groups in: a secret, so it is in the environment of gateways and never in a config."""

import os
from collections.abc import Mapping

from shared.runtime.errors import ConfigError

KEY_VARIABLE = "MYXO_INGEST_KEY"
"""The environment variable that holds it."""

SHORTEST_KEY = 16
"""Characters."""


def ingest_key(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the key. Raises ConfigError where there is none, or one that can be guessed."""
    key = environment.get(KEY_VARIABLE, "")
    if len(key) < SHORTEST_KEY:
        expected = f"required with ingest.ingest_groups where gateways start: the producers' key, {SHORTEST_KEY} characters or more"
        raise ConfigError(KEY_VARIABLE, "*" * len(key), expected)
    return key
