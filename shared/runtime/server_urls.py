"""Reads from the environment where NATS and Redis are, and the router's key: the text itself, or the path of a file that holds it.

A URL carries a password. In a variable it stands in the process list's environment and in every inspection of a container; in a file it
does not, so that deployments name files: ``NATS_URL_FILE``, ``REDIS_URL_FILE``. ``MYXO_CA_FILE`` names the certificates to trust for
``tls://`` and ``rediss://``.
"""

import os
import secrets
import ssl
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from shared.runtime.errors import ConfigError

CA_VARIABLE = "MYXO_CA_FILE"

ROUTER_KEY = "MYXO_ROUTER_KEY"
"""The variable of the key to a router's control plane."""

CONSOLE_TOKEN = "MYXO_CONSOLE_TOKEN"
"""The variable of the token that opens the console."""

CONSOLE_TOKEN_BYTES = 32


def nats_url() -> str | None:
    """Returns ``NATS_URL``, or what is in the file of ``NATS_URL_FILE``; None where neither is set. Raises ConfigError."""
    return _given("NATS_URL")


def redis_url() -> str | None:
    """Returns the same for ``REDIS_URL``. Raises ConfigError."""
    return _given("REDIS_URL")


def router_key() -> str | None:
    """Returns the same for ``MYXO_ROUTER_KEY``. Raises ConfigError."""
    return _given(ROUTER_KEY)


def console_token() -> str | None:
    """Returns the same for ``MYXO_CONSOLE_TOKEN``. Raises ConfigError."""
    return _given(CONSOLE_TOKEN)


def new_console_token() -> str:
    """Returns a token for a console that nobody can guess."""
    return secrets.token_urlsafe(CONSOLE_TOKEN_BYTES)


def _given(variable: str) -> str | None:
    text, name = os.environ.get(variable), f"{variable}_FILE"
    if text or not (path := os.environ.get(name)):
        return text or None
    try:
        content = Path(path).read_text().strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(name, path, f"{reason}; expected a file with the value") from error
    if not content:
        raise ConfigError(name, path, "the file is empty; expected the value in it")
    return content


def authorities() -> str | None:
    """Returns the file of ``MYXO_CA_FILE``; None where it is not set and the system's authorities hold. Raises ConfigError."""
    if path := os.environ.get(CA_VARIABLE):
        trusted(path)
    return path or None


def trusted(path: str | None) -> ssl.SSLContext:
    """Returns a TLS context that trusts the certificates of a file (None: the system's) and checks host names. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(CA_VARIABLE, path, f"{error.strerror or error}; expected a file of PEM certificates") from error


def has_credentials(url: str) -> bool:
    """Returns whether a URL carries a user or a password."""
    parts = urlsplit(url)
    return parts.username is not None or parts.password is not None or bool({"username", "password"} & parse_qs(parts.query).keys())
