"""The config files of NATS and Redis, from a run's rights and passwords. Pure: text in, text out.

NATS is told the passwords as they are (its file is mounted into no other container), Redis their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.accounts.permissions import HEALTH, BusRights, Rights, StoreRights

MAX_PAYLOAD = 1 << 20
"""Bytes of a message, headers included: NATS's own default. Payloads are in Redis."""

KEY, CERTIFICATE = "key.pem", "certificate.pem"
"""Names of a server's own TLS files, beside its config."""

TLS_SECONDS = 5
"""How long a client may take over the handshake."""

_ACCESS = {"R": "%R~", "W": "%W~", "RW": "~"}


@dataclass(frozen=True)
class NatsPlace:
    """Where the server listens and what it finds where, as it sees it itself.

    Args:
        tls: the directory of `KEY` and `CERTIFICATE`, None for plain connections. monitor: address of the HTTP side, for health checks
            inside the container.
    """

    listen: str = "0.0.0.0:4222"
    monitor: str = "127.0.0.1:8222"
    store: str = "/data"
    tls: str | None = None
    max_payload: int = MAX_PAYLOAD


@dataclass(frozen=True)
class RedisPlace:
    """As `NatsPlace`. ``socket``: for health checks inside the container, where there is no network to cross."""

    bind: str = "* -::*"
    port: int = 6379
    socket: str = "/tmp/redis.sock"
    data: str = "/data"
    tls: str | None = None
    appendfsync: str = "everysec"


def nats_conf(rights: Iterable[Rights], passwords: Mapping[str, str], place: NatsPlace) -> str:
    """nats.conf.

    Args:
        passwords: by role.
    """
    lines = [
        f"listen: {_quoted(place.listen)}",
        f"http: {_quoted(place.monitor)}",
        f"max_payload: {place.max_payload}",
        f"jetstream {{ store_dir: {_quoted(place.store)} }}",
    ]
    if place.tls is not None:
        files = f"cert_file: {_quoted(f'{place.tls}/{CERTIFICATE}')}, key_file: {_quoted(f'{place.tls}/{KEY}')}"
        lines.append(f"tls {{ {files}, timeout: {TLS_SECONDS} }}")
    lines += ["authorization {", "  users: ["]
    for one in rights:
        lines += [f"    {{ user: {_quoted(one.user)}, password: {_quoted(passwords[one.role])},", "      permissions: {"]
        lines += [f"        {line}" for line in _permissions(one.bus)]
        lines += ["      } }"]
    return "\n".join([*lines, "  ]", "}", ""])


def _permissions(bus: BusRights) -> list[str]:
    lines = []
    for verb, subjects in (("publish", bus.publish), ("subscribe", bus.subscribe)):
        if subjects:
            lines += [f"{verb}: {{ allow: [", *(f"  {_quoted(subject)}" for subject in subjects), "] }"]
        elif verb == "subscribe" or bus.answer_seconds is None:
            lines.append(f'{verb}: {{ deny: [">"] }}')  # an empty list would mean everything; with answers alone it means nothing
    if bus.answer_seconds is not None:
        lines.append(f'allow_responses: {{ max: 1, expires: "{bus.answer_seconds}s" }}')
    return lines


def redis_conf(rights: Iterable[Rights], passwords: Mapping[str, str], place: RedisPlace) -> str:
    """redis.conf, for Redis from 7.0 and Valkey.

    Args:
        passwords: by role, and that of `HEALTH`.
    """
    lines = [
        f"bind {place.bind}",
        f"unixsocket {_quoted(place.socket)}",
        "unixsocketperm 700",
        f"dir {_quoted(place.data)}",
        "appendonly yes",
        f"appendfsync {place.appendfsync}",
        'save ""',
        "maxmemory-policy noeviction",  # a payload that is evicted is a group lost
        "daemonize no",
    ]
    if place.tls is None:
        lines.append(f"port {place.port}")
    else:
        lines += ["port 0", f"tls-port {place.port}", "tls-auth-clients no"]
        lines += [f"tls-cert-file {_quoted(f'{place.tls}/{CERTIFICATE}')}", f"tls-key-file {_quoted(f'{place.tls}/{KEY}')}"]
    lines.append("user default off resetpass resetkeys resetchannels -@all")
    lines += [_user(one.user, passwords[one.role], one.store) for one in rights if one.store is not None]
    lines.append(_user(HEALTH, passwords[HEALTH], StoreRights(("ping",), "", "")))
    return "\n".join([*lines, ""])


def _user(name: str, password: str, store: StoreRights) -> str:
    keys = f"{_ACCESS[store.access]}{store.keys}" if store.access else "resetkeys"
    keys += f" ~{store.own}" if store.own else ""
    commands = " ".join(f"+{command}" for command in store.commands)
    return f"user {name} on #{hashlib.sha256(password.encode()).hexdigest()} sanitize-payload resetchannels {keys} -@all {commands}"


def _quoted(text: str) -> str:
    return json.dumps(text)
