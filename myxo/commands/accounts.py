"""``myxo accounts DIR``: makes the accounts of a run on NATS and Redis."""

import argparse
import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import nats
import redis
from rich.console import Console

from shared.accounts.credentials import AUTHORITY, NATS, REDIS, REDIS_URL, Deployment, admit, make, revoke
from shared.accounts.permissions import ADMISSION, MEMORY, OPERATOR, NatsSettings, RedisSettings, redis_user, replica_rights
from shared.bus.subjects import RUN_ID
from shared.runtime import exit_codes
from shared.runtime.addresses import HttpAddress, trusted
from shared.runtime.errors import ConfigError

SERVER_SECONDS = 15.0  # time in which a running server has to take a change

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
    page = f"where NATS serves its health page, to anybody (default {NatsSettings.monitor})"
    command.add_argument("--nats-monitor", metavar="HOST:PORT", default=NatsSettings.monitor, help=page)
    single = command.add_mutually_exclusive_group()
    single.add_argument(
        "--join", metavar="REPLICA", help="give one remote replica its own accounts, in DIR/replicas/REPLICA, while the servers run"
    )
    single.add_argument(
        "--leave", metavar="REPLICA", help="revoke these accounts: the running servers close their connections and take no others"
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
    bus = NatsSettings(listen=f"0.0.0.0:{nats.port}", monitor=str(address("--nats-monitor", parsed.nats_monitor)))
    store = RedisSettings(port=redis.port, memory=parsed.redis_memory)
    if parsed.listen is not None:
        bus, store = replace(bus, listen=f"{parsed.listen}:{nats.port}"), replace(store, bind=parsed.listen)
    if parsed.data is not None:
        data = Path(parsed.data).absolute()
        bus, store = replace(bus, store=str(data / "nats")), replace(store, data=str(data / "redis"))
    mounted = parsed.mounted.rstrip("/") if parsed.mounted else "/credentials" if parsed.data is None else ""
    deployment = Deployment(parsed.run, nats, redis, parsed.tls, bus, store, mounted)
    if parsed.leave is not None:
        revoke(parsed.directory, parsed.leave)
    if parsed.join is not None:
        admit(parsed.directory, parsed.join)
    for line in make(parsed.directory, deployment):
        console.print(line, soft_wrap=True)
    failed = list(_apply(parsed.directory, deployment, parsed.join, parsed.leave))
    for line in failed:
        console.print(line, soft_wrap=True)
    return exit_codes.FAILED if failed else exit_codes.DONE


def _apply(directory: Path, deployment: Deployment, join: str | None, leave: str | None) -> Iterator[str]:
    """Has the running servers take a replica's accounts, or drop them. Yields a line for each that did not."""
    if (name := join or leave) is None:
        return
    rights, authority = replica_rights(deployment.run, name), directory / OPERATOR / AUTHORITY
    passwords = {server: (directory / server / ADMISSION).read_text() for server in (NATS, REDIS)}
    done = "joins" if join else "is revoked"
    try:
        tls = {"ssl_ca_certs": str(authority)} if deployment.tls else {}
        url = f"{'rediss' if deployment.tls else 'redis'}://{ADMISSION}:{passwords[REDIS]}@{deployment.redis}"
        with redis.Redis.from_url(url, socket_timeout=SERVER_SECONDS, **tls) as store:
            if leave:
                store.execute_command("ACL DELUSER", rights.user)
            elif rights.store is not None:
                password = urlsplit((directory / rights.home / REDIS_URL).read_text().strip()).password or ""
                _, user, *rules = redis_user(rights.user, password, rights.store).split()
                store.execute_command("ACL SETUSER", user, "reset", *rules)
    except redis.RedisError as error:
        yield f"Redis at {deployment.redis} runs as before ({error}): {name} {done} there once it is restarted"
    try:
        url = f"{'tls' if deployment.tls else 'nats'}://{ADMISSION}:{passwords[NATS]}@{deployment.nats}"
        asyncio.run(asyncio.wait_for(_reload(url, str(authority) if deployment.tls else None), SERVER_SECONDS))
    except (OSError, nats.errors.Error, ValueError) as error:
        reason = str(error) or type(error).__name__
        yield f"NATS at {deployment.nats} runs as before ({reason}): {name} {done} there once it is restarted"


async def _reload(url: str, authority: str | None) -> None:
    """Has a NATS server read its config again. Raises ValueError with its reason where it does not."""
    tls = trusted(authority) if authority else None
    client = await nats.connect(url, tls=tls, allow_reconnect=False, connect_timeout=5)
    try:
        subject = f"$SYS.REQ.SERVER.{client._server_info['server_id']}.RELOAD"
        answer = json.loads((await client.request(subject, b"", timeout=SERVER_SECONDS)).data)
    finally:
        await client.close()
    if "error" in answer:
        raise ValueError(answer["error"].get("description", answer["error"]))


def address(flag: str, text: str) -> HttpAddress:
    """Reads ``host:port``, or with brackets ``[IPv6]:port``. Raises ConfigError for the flag."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or "@" in text or parts.path or parts.query:
        raise ConfigError(flag, text, "expected HOST:PORT, for example nats:4222")
    return HttpAddress(host, port)
