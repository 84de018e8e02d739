"""``myxo accounts DIR``: makes the accounts of a run on NATS and Redis."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from shared.accounts.credentials import Deployment, ServerAddress, make
from shared.bus.subjects import RUN_ID
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError


def accounts(directory: Path, run: str, nats: str, redis: str, *, tls: bool, mounted: str, console: Console) -> int:
    """Makes them, or brings them up to date, and says what was done. Raises ConfigError."""
    if not RUN_ID.match(run):
        raise ConfigError("--run", run, "expected lower-case letters, digits, '-' and '_'")
    if not mounted.startswith("/"):
        raise ConfigError("--mounted", mounted, "expected an absolute path")
    deployment = Deployment(run, address("--nats", nats), address("--redis", redis), tls=tls, mounted=mounted.rstrip("/"))
    for line in make(directory, deployment):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return exit_codes.DONE


def address(flag: str, text: str) -> ServerAddress:
    """``host:port``, or with brackets ``[IPv6]:port``. Raises ConfigError for the flag."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or "@" in text or parts.path or parts.query:
        raise ConfigError(flag, text, "expected HOST:PORT, for example nats:4222")
    return ServerAddress(host, port)
