"""Renders the config files of NATS and Redis from a run's rights and passwords. Pure: text in, text out.

NATS gets the passwords in plain text (no other container mounts its file), Redis their SHA-256.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shared.accounts.permissions import API, HEALTH, OPERATOR, REST, BusRights, Rights, StoreRights, answering_role

RUN_ACCOUNT = "run"
"""The NATS account of the streams, where whoever made the server or operates the run connects."""

_STREAMED = (f"{API}.CONSUMER.MSG.NEXT.{REST}", f"{API}.DIRECT.GET.{REST}")
"""The requests that are answered by several messages."""

_PENDING = "1h"
"""The time for which NATS remembers to whom an answer goes: longer than any request waits."""

MAX_PAYLOAD = 1 << 20
"""The largest message in bytes, headers included: NATS's own default. Payloads are in Redis."""

MEMORY = "2gb"
"""The memory of Redis, unless `myxo accounts` is told otherwise."""

KEY, CERTIFICATE = "key.pem", "certificate.pem"
"""The names of a server's own TLS files, beside its config."""

TLS_SECONDS = 5
"""The seconds that a client may take for the handshake."""


@dataclass(frozen=True)
class NatsSettings:
    """The addresses on which the server listens and the paths of its files, as the server sees them.

    Args:
        tls: the directory of `KEY` and `CERTIFICATE`; None for plain connections. monitor: HTTP address for health checks
            inside the container. sync: the time between two syncs of its files to disk, as long as Redis's ``everysec``.
    """

    listen: str = "0.0.0.0:4222"
    monitor: str = "127.0.0.1:8222"
    store: str = "/data"
    tls: str | None = None
    max_payload: int = MAX_PAYLOAD
    sync: str = "1s"


@dataclass(frozen=True)
class RedisSettings:
    """The same settings for Redis. ``socket``: a unix socket for health checks inside the container. ``memory``: its maxmemory, as Redis
    writes it; a container needs half as much again, for what is not data and while its log is rewritten."""

    bind: str = "* -::*"
    port: int = 6379
    socket: str = "/tmp/redis.sock"
    data: str = "/data"
    tls: str | None = None
    appendfsync: str = "everysec"
    memory: str = MEMORY


def nats_conf(rights: Iterable[Rights], passwords: Mapping[str, str], settings: NatsSettings) -> str:
    """Returns nats.conf, whose values are JSON.

    Args:
        passwords: by role.
    """
    config: dict[str, Any] = {
        "listen": settings.listen,
        "http": settings.monitor,
        "max_payload": settings.max_payload,
        "jetstream": {"store_dir": settings.store, "sync_interval": settings.sync},
    }
    if settings.tls is not None:
        files = {"cert_file": f"{settings.tls}/{CERTIFICATE}", "key_file": f"{settings.tls}/{KEY}"}
        config["tls"] = {**files, "timeout": TLS_SECONDS}
    users = [(role, nats_user(role, passwords[role.role])) for role in rights]
    config["accounts"] = nats_accounts([user for role, user in users if role.role == OPERATOR], users)
    return "".join(f"{key}: {json.dumps(value, indent=2)}\n" for key, value in config.items())


def nats_accounts(owners: list[dict[str, Any]], users: Iterable[tuple[Rights, dict[str, Any]]]) -> dict[str, Any]:
    """Returns the accounts of a server: `RUN_ACCOUNT` with the streams, and one for each role, which imports what it may publish and hear.

    NATS checks the subject of a request and not the reply subject that it names, to which the server then publishes. In an account of its
    own a role has its answers nowhere but in that account: no reply subject reaches a stream, or a subject that another role listens on.

    Args:
        owners: the users of `RUN_ACCOUNT`. users: the other roles with their entries; operators, who are among the owners, are skipped.
    """
    served: dict[str, list[dict[str, Any]]] = {RUN_ACCOUNT: [{"service": subject, "response_type": "stream"} for subject in _STREAMED]}
    accounts: dict[str, Any] = {RUN_ACCOUNT: {"jetstream": "enabled", "users": owners, "exports": served[RUN_ACCOUNT]}}
    for rights, user in users:
        if rights.role == OPERATOR:
            continue
        imports: list[dict[str, Any]] = []
        for subject in rights.bus.publish:
            owner = answering_role(subject) or RUN_ACCOUNT
            if owner == rights.role:
                continue  # among its own replicas
            imports.append({"service": {"account": owner, "subject": subject}})
            export = {"service": subject, "response_type": "singleton", "response_threshold": _PENDING}
            if not subject.startswith(tuple(streamed.removesuffix(REST) for streamed in _STREAMED)):
                served.setdefault(owner, []).append(export)
        for subject in rights.bus.subscribe:
            if answering_role(subject) is None and not subject.startswith("_INBOX."):
                imports.append({"stream": {"account": RUN_ACCOUNT, "subject": subject}})
                served[RUN_ACCOUNT].append({"stream": subject})
        accounts[rights.role] = {"users": [user], "imports": imports, "exports": served.setdefault(rights.role, [])}
    for exports in served.values():
        exports[:] = {json.dumps(export): export for export in exports}.values()
    return accounts


def nats_user(role: Rights, password: str) -> dict[str, Any]:
    """Returns the entry of a role's user in its account."""
    return {"user": role.user, "password": password, "permissions": _permissions(role.bus)}


def _permissions(bus: BusRights) -> dict[str, Any]:
    found: dict[str, Any] = {"subscribe": _allowed(bus.subscribe)}
    if bus.publish or bus.answer_seconds is None:  # allow_responses alone allows only answers
        found["publish"] = _allowed(bus.publish)
    if bus.answer_seconds is not None:
        found["allow_responses"] = {"max": 1, "expires": f"{bus.answer_seconds}s"}
    return found


def _allowed(subjects: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {"allow": subjects} if subjects else {"deny": (REST,)}  # an empty list would allow everything


def redis_conf(rights: Iterable[Rights], passwords: Mapping[str, str], settings: RedisSettings) -> str:
    """Returns redis.conf, for Redis from 7.0 and Valkey.

    Args:
        passwords: by role, and that of `HEALTH`.
    """
    lines = [
        f"bind {settings.bind}",
        f"unixsocket {_quoted(settings.socket)}",
        "unixsocketperm 700",
        f"dir {_quoted(settings.data)}",
        "appendonly yes",
        f"appendfsync {settings.appendfsync}",
        'save ""',
        f"maxmemory {settings.memory}",
        "maxmemory-policy noeviction",  # an evicted payload would lose its group; services hold their work back instead
        "daemonize no",
    ]
    if settings.tls is None:
        lines.append(f"port {settings.port}")
    else:
        lines += ["port 0", f"tls-port {settings.port}", "tls-auth-clients no"]
        lines += [f"tls-cert-file {_quoted(f'{settings.tls}/{CERTIFICATE}')}", f"tls-key-file {_quoted(f'{settings.tls}/{KEY}')}"]
    lines.append("user default off resetpass resetkeys resetchannels -@all")
    lines += [redis_user(role.user, passwords[role.role], role.store) for role in rights if role.store is not None]
    lines.append(redis_user(HEALTH, passwords[HEALTH], StoreRights(("ping",))))
    return "\n".join([*lines, ""])


def redis_user(name: str, password: str, store: StoreRights) -> str:
    """Returns the line of an account, which has these rights and no other."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    further = "".join(f" ({_granted(rights)})" for rights in store.further)
    return f"user {name} on #{digest} sanitize-payload resetchannels resetkeys {_granted(store)}{further}"


def _granted(store: StoreRights) -> str:
    """Returns the rules that grant rights to a user, or to a selector of a user."""
    access = {keys: ("R" if keys in store.read else "") + ("W" if keys in store.write else "") for keys in (*store.read, *store.write)}
    return " ".join([*(f"%{letters}~{keys}" for keys, letters in access.items()), "-@all", *(f"+{command}" for command in store.commands)])


def _quoted(text: str) -> str:
    return json.dumps(text)
