"""``myxo accounts DIR``: makes the accounts of a run on NATS and Redis."""

import argparse
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from shared.accounts.credentials import Deployment, ServerAddress, make
from shared.accounts.permissions import MEMORY, NatsSettings, RedisSettings
from shared.bus.subjects import RUN_ID
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError

_SIZE = re.compile(r"[1-9]\d{0,14}([kmg]b?)?")  # size as Redis reads it
_DESCRIPTION = """Make the accounts of a run on NATS and Redis: passwords (kept where there are some already), the servers' configs and,
with --tls, certificates. DIR/nats and DIR/redis are for the servers, DIR/buffer, rollout, reward, trainer, operator and environment each
hold the nats_url and redis_url of one account. docs/accounts.md tells who may do what."""


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    command.description = _DESCRIPTION
    command.add_argument("directory", metavar="DIR", type=Path, help="where the files go")
    command.add_argument("--run", metavar="NAME", required=True, help="the run's id")
    command.add_argument("--nats", metavar="HOST:PORT", default="nats:4222", help="where services reach NATS (default nats:4222)")
    command.add_argument("--redis", metavar="HOST:PORT", default="redis:6379", help="where services reach Redis (default redis:6379)")
    command.add_argument("--tls", action="store_true", help="encrypt both, with certificates of an authority made for this")
    command.add_argument(
        "--mounted", metavar="PATH", help="where each server finds its own directory (default /credentials; with --data where it is made)"
    )
    command.add_argument(
        "--redis-memory", metavar="SIZE", default=MEMORY, help=f"memory for payloads, beyond which writers wait (default {MEMORY})"
    )
    command.add_argument("--listen", metavar="ADDRESS", help="where the servers listen (default: at all addresses, as in their containers)")
    command.add_argument(
        "--data", metavar="PATH", help="the servers' data lie in PATH/nats and PATH/redis (default: /data of either's container)"
    )
    command.add_argument(
        "--nats-monitor", metavar="HOST:PORT", help="where NATS serves its health page, to anybody (default 127.0.0.1:8222)"
    )
    command.set_defaults(run_command=accounts)


def accounts(parsed: argparse.Namespace, console: Console) -> int:
    """Makes the accounts, or brings them up to date, and reports what was done. Raises ConfigError."""
    if not RUN_ID.match(parsed.run):
        raise ConfigError("--run", parsed.run, "expected lower-case letters, digits, '-' and '_'")
    if parsed.mounted is not None and not parsed.mounted.startswith("/"):
        raise ConfigError("--mounted", parsed.mounted, "expected an absolute path")
    if not _SIZE.fullmatch(parsed.redis_memory):
        raise ConfigError("--redis-memory", parsed.redis_memory, "expected bytes, or a size as 512mb or 4gb; 0 would be without a bound")
    nats, redis = address("--nats", parsed.nats), address("--redis", parsed.redis)
    bus, store = NatsSettings(listen=f"0.0.0.0:{nats.port}"), RedisSettings(port=redis.port, memory=parsed.redis_memory)
    if parsed.listen is not None:
        bus, store = replace(bus, listen=f"{parsed.listen}:{nats.port}"), replace(store, bind=parsed.listen)
    if parsed.nats_monitor is not None:
        bus = replace(bus, monitor=str(address("--nats-monitor", parsed.nats_monitor)))
    if parsed.data is not None:
        data = Path(parsed.data).absolute()
        bus, store = replace(bus, store=str(data / "nats")), replace(store, data=str(data / "redis"))
    mounted = parsed.mounted.rstrip("/") if parsed.mounted else "/credentials" if parsed.data is None else ""
    deployment = Deployment(parsed.run, nats, redis, parsed.tls, bus, store, mounted)
    for line in make(parsed.directory, deployment):
        console.print(line, soft_wrap=True)
    return exit_codes.DONE


def address(flag: str, text: str) -> ServerAddress:
    """Reads ``host:port``, or with brackets ``[IPv6]:port``. Raises ConfigError for the flag."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or "@" in text or parts.path or parts.query:
        raise ConfigError(flag, text, "expected HOST:PORT, for example nats:4222")
    return ServerAddress(host, port)
