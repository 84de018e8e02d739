"""Derives the permissions of every role on a run's bus and store from the names that the code itself uses, and renders the servers'
configs. Pure.

The servers refuse everything that is not listed here. A right is granted to a role, not to a process: all replicas of the rollout service
share one account, unless they are given accounts of their own (`replica_rights`), which can be revoked one by one. NATS gets the passwords
in plain text (no other container mounts its file), Redis their SHA-256.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shared.bus import registry
from shared.bus.streams import generated_consumer, scored_consumer, task_consumer
from shared.bus.subjects import EVAL, GATEWAY, PRODUCER, REWARD, ROLLOUT, TRAIN, Subjects
from shared.config.service_sections import BusSection

BUFFER, TRAINER, CONSOLE = "buffer", "trainer", "console"
OPERATOR, ENVIRONMENT = "operator", "environment"
# The accounts of a run: its services, its operators, and external environments on the bus.
ROLES = (BUFFER, ROLLOUT, REWARD, TRAINER, GATEWAY, CONSOLE, OPERATOR, ENVIRONMENT)
HEALTH = "health"  # store's account that may only ping
REPLICAS = "replicas"  # directory of the accounts of single replicas
ADMISSION = "admission"  # account of both servers by which `myxo accounts` lets replicas in and out while they run
ANY, REST = "*", ">"  # wildcards of a subject: one token, one or more tokens at the end
API = "$JS.API"

# Seconds within which a request may be answered: the server remembers every delivered message's reply subject for as long.
_SHORT_ANSWER, _LONG_ANSWER = 600, 3600

# Commands that every client of the store sends. CLIENT SETINFO, by which redis-py names itself, is left out: redis-py can do without, and
# servers before 7.2 do not start with a rule that names it.
_CONNECTION = ("ping",)


@dataclass(frozen=True)
class BusRights:
    """Subjects, with wildcards. ``answer_seconds``: how long after a request its reply subject may be published to; None: never."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answer_seconds: int | None = None


@dataclass(frozen=True)
class StoreRights:
    """Commands of Redis, and the patterns of the keys that they may read and write. ``further``: other commands, on keys of their own."""

    commands: tuple[str, ...]
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    further: "tuple[StoreRights, ...]" = ()


@dataclass(frozen=True)
class Rights:
    """All rights of one role. ``store`` is None for a role without an account there. ``home``: the directory of its files."""

    role: str
    user: str
    bus: BusRights
    store: StoreRights | None
    home: str


def user_name(role: str, run: str) -> str:
    """Returns the account's name on both servers; it needs no escaping in a URL."""
    return f"{role}.{run}"


def rights(run: str) -> tuple[Rights, ...]:
    """Returns the rights of every role in the order of `ROLES`. ``run``: the run's id, matching `RUN_ID`."""
    bus = dict(zip(ROLES, (_buffer, _rollout, _reward, _trainer, _gateway, _console, _operator, _environment), strict=True))
    names = Subjects(run)
    payloads, exchange, everything = (names.payload_keys,), (names.exchange_keys,), (f"{run}:*",)
    sessions, ingested, commands = (names.session_keys,), (names.ingest_keys,), (names.command_keys,)
    opener = StoreRights(("expire", "get", "llen", "lrange", "rpush", "rpushx", "setnx", "unlink"), sessions, sessions)
    store = {
        BUFFER: StoreRights((*_CONNECTION, "exists", "getrange", "info", "setnx", "unlink"), payloads, payloads),
        # SETNX sets what is not there: whoever has this account can add payloads, and change none
        ROLLOUT: StoreRights((*_CONNECTION, "getrange", "setnx"), payloads, payloads, (opener,)),
        REWARD: StoreRights((*_CONNECTION, "getrange"), payloads),
        TRAINER: StoreRights(
            (*_CONNECTION, "get", "getrange", "hexists", "hmget", "hset", "set", "unlink"),
            (*payloads, *exchange),
            exchange,
            (StoreRights(("getrange", "setnx", "unlink"), commands, commands),),
        ),
        # RPUSHX appends to what is there: a gateway opens no session
        GATEWAY: StoreRights(
            (*_CONNECTION, "get", "llen", "lrange", "rpushx"),
            sessions,
            sessions,
            (
                StoreRights(("setnx",), (), payloads),
                StoreRights(("get", "set"), ingested, ingested),
                StoreRights(("expire", "getrange", "setnx", "unlink"), commands, commands),
            ),
        ),
        CONSOLE: StoreRights((*_CONNECTION, "getrange", "info"), payloads, (), (StoreRights(("llen", "lrange"), sessions),)),
        OPERATOR: StoreRights((*_CONNECTION, "exists", "get", "getrange", "scan", "unlink"), everything, everything),
    }
    return tuple(Rights(role, user_name(role, run), bus[role](names), store.get(role), role) for role in ROLES)


def rights_of(role: str, run: str) -> Rights:
    """Returns the rights of one role."""
    return next(found for found in rights(run) if found.role == role)


def replica_rights(run: str, replica: str) -> Rights:
    """Returns the rights of one remote replica: those of the rollout service, under a name of its own."""
    return replace(rights_of(ROLLOUT, run), user=f"{user_name(ROLLOUT, run)}.{replica}", home=f"{REPLICAS}/{replica}")


def answering_role(subject: str) -> str | None:
    """Returns the role whose services answer requests on a subject of a run; None for what the server itself takes, streams among it."""
    first, plane = f"{subject}.".split(".")[:2]
    answering = {role: role for role in (BUFFER, ROLLOUT, ENVIRONMENT)} | {"objects": TRAINER}
    return None if first.startswith(("$", "_")) else answering.get(plane)


# --- rights that several roles have


def _stream_info(stream: str) -> str:
    return f"{API}.STREAM.INFO.{stream}"


def _read(bucket: str) -> tuple[str, str]:
    return _stream_info(f"KV_{bucket}"), f"{API}.STREAM.MSG.GET.KV_{bucket}"


def _take(stream: str, consumer: str) -> tuple[str, str]:
    return f"{API}.CONSUMER.MSG.NEXT.{stream}.{consumer}", f"$JS.ACK.{stream}.{consumer}.{REST}"


def _service(names: Subjects, role: str) -> tuple[str, ...]:
    """Returns the subjects that `shared.service.service_base` uses for every service: to read the config, renew a status, send events."""
    return (
        f"{API}.INFO",
        _stream_info(names.ledger_stream),  # whether the run is there
        *_read(names.config_bucket),
        _stream_info(f"KV_{names.services_bucket}"),
        f"$KV.{names.services_bucket}.{role}.{ANY}",
        names.event("service", ANY),
    )


def _inbox(names: Subjects, role: str) -> str:
    return f"{names.inbox(role)}.{REST}"


def _commands(names: Subjects, *kinds: str) -> tuple[str, ...]:
    """Returns the subjects that `shared.bus.command_log` uses. ``kinds``: of the entries that the role writes."""
    stream, written = names.commands_stream, (names.command(kind, ANY, ANY) for kind in kinds)
    return *written, _stream_info(stream), f"{API}.DIRECT.GET.{stream}", f"{API}.STREAM.MSG.GET.{stream}"


# --- the roles


def _buffer(names: Subjects) -> BusRights:
    run, bus, ledger = names.run, BusSection(), names.ledger_stream
    queues = [task_consumer(run, bus, TRAIN), task_consumer(run, bus, EVAL), generated_consumer(run, bus, ANY), scored_consumer(run, bus)]
    publish = (
        *_service(names, BUFFER),
        names.task(TRAIN),
        names.task(EVAL),
        names.ledger(ANY),
        f"{API}.STREAM.MSG.GET.{ledger}",  # to see which record took this writer's sequence
        f"{API}.DIRECT.GET.{ledger}",  # for the replay, without a consumer, which would name the subject that the server delivers to
        *_take(names.scored_stream, scored_consumer(run, bus).name),
        *(f"{API}.CONSUMER.INFO.{queue.stream}.{queue.name}" for queue in queues),  # to read the depth of the queues
        f"$KV.{names.config_bucket}.phase",
        f"$KV.{names.config_bucket}.data",
        *_read(names.weights_bucket),
        *_read(names.leases_bucket),
        f"$KV.{names.leases_bucket}.{BUFFER}",
    )
    listen = (
        _inbox(names, BUFFER),
        names.batch,
        names.trained,
        names.durable,
        names.refused,
        names.evaluations,
        names.event("weights", "live"),
    )
    return BusRights(publish, listen, _SHORT_ANSWER)


def _rollout(names: Subjects) -> BusRights:
    publish = (
        *_service(names, ROLLOUT),
        *(subject for kind in (TRAIN, EVAL) for subject in _take(names.task_stream, task_consumer(names.run, BusSection(), kind).name)),
        names.generated(ANY),
        names.scored(ROLLOUT),
        f"{API}.STREAM.MSG.GET.KV_{names.services_bucket}",  # to learn which engines a router should know, and which replicas have weights
        *_read(names.weights_bucket),  # to learn the live version and the newest snapshot
        *_read(names.leases_bucket),
        f"$KV.{names.leases_bucket}.{PRODUCER}",  # to be the one that runs the rollout function
        f"$KV.{names.leases_bucket}.engines.{ANY}.{ANY}",  # the nodes of engines over several
        *_read(names.secrets_bucket),  # by which these know each other
        f"$KV.{names.secrets_bucket}.engines.{ANY}.{ANY}",
        *(f"$KV.{names.services_bucket}.{kind}.{ANY}" for kind in (registry.ENGINE_NODE, registry.MODEL)),
        names.replica_weights(ANY, "transfer"),
        names.object_urls,
        *(names.environment(ANY, verb) for verb in ("describe", "reset", "step", "close")),  # episodes
    )
    return BusRights(publish, (_inbox(names, ROLLOUT), names.replica_weights(ANY, ANY)), _LONG_ANSWER)


def _reward(names: Subjects) -> BusRights:
    publish = (
        *_service(names, REWARD),
        *_take(names.generated_stream, generated_consumer(names.run, BusSection(), ANY).name),
        names.scored(REWARD),
        *(names.environment(ANY, verb) for verb in ("describe", "score")),
        *_read(names.weights_bucket),  # to learn the live version: no sample is of a much newer one
        f"{API}.STREAM.MSG.GET.KV_{names.services_bucket}",  # to learn which engines serve frozen models
        f"$KV.{names.services_bucket}.{registry.ENVIRONMENT}.{ANY}",  # the statuses of the environments that it scores with
    )
    return BusRights(publish, (_inbox(names, REWARD),))


def _trainer(names: Subjects) -> BusRights:
    publish = (
        *_service(names, TRAINER),
        f"$KV.{names.services_bucket}.critic.{ANY}",  # the other role of the same account
        f"$KV.{names.services_bucket}.node.{ANY}",  # the agents of several nodes
        *_read(names.leases_bucket),
        f"$KV.{names.leases_bucket}.nodes.{ANY}.{ANY}",
        names.batch,
        names.trained,
        names.durable,
        names.refused,
        names.evaluations,
        names.replica_weights(ANY, ANY),
        names.event("weights", "live"),
        names.event("weights", "pushed"),
        names.event("trainer", "step"),
        names.event("trainer", "metrics"),
        names.event("trainer", "warm_start"),
        *_read(names.weights_bucket),
        f"$KV.{names.weights_bucket}.live",
        f"$KV.{names.weights_bucket}.snapshot",
        f"{API}.STREAM.MSG.GET.KV_{names.services_bucket}",  # to list the replicas
    )
    listens = (_inbox(names, TRAINER), names.object_urls, names.command(REST))
    return BusRights((*publish, *_commands(names, "outcome")), listens, _SHORT_ANSWER)


def _gateway(names: Subjects) -> BusRights:
    publish = (
        *_service(names, GATEWAY),
        f"{API}.STREAM.MSG.GET.KV_{names.services_bucket}",  # to choose among the replicas
        *_take(names.task_stream, task_consumer(names.run, BusSection(), TRAIN).name),  # groups from outside take the place of tasks
        names.generated(ANY),
        names.scored(GATEWAY),  # that a task was given up
        *_read(names.weights_bucket),  # to learn the live version
    )
    return BusRights((*publish, *_commands(names, "command", "outcome")), (_inbox(names, GATEWAY), names.command(REST)))


def _console(names: Subjects) -> BusRights:
    """Returns rights to read alone. No consumer: whoever makes one names the subject that the server delivers its messages to."""
    bus = BusSection()
    queues = [task_consumer(names.run, bus, kind) for kind in (TRAIN, EVAL)]
    queues += [generated_consumer(names.run, bus, ANY), scored_consumer(names.run, bus)]
    publish = (
        f"{API}.INFO",
        *(_stream_info(stream) for stream in _streams(names)),
        *(f"{API}.STREAM.MSG.GET.{stream}" for stream in (names.ledger_stream, names.events_stream, names.commands_stream)),
        *(f"{API}.DIRECT.GET.{stream}" for stream in (names.ledger_stream, names.events_stream, names.commands_stream)),
        *(f"{API}.STREAM.MSG.GET.KV_{bucket}" for bucket in _buckets(names)),
        *(f"{API}.CONSUMER.INFO.{queue.stream}.{queue.name}" for queue in queues),
    )
    events = tuple(names.event(plane, REST) for plane in ("weights", "trainer", "service"))
    return BusRights(publish, (_inbox(names, CONSOLE), names.ledger(REST), *events))


def _operator(names: Subjects) -> BusRights:
    """Returns all rights of the run except to answer for a service, whose subjects others may not subscribe to, and to read the secrets
    of engines, whose bucket it makes and removes."""
    publish = (
        f"{names.run}.{REST}",
        f"{API}.INFO",
        f"{API}.STREAM.NAMES",
        f"{API}.STREAM.LIST",
        *(subject for stream in _streams(names) for subject in _administer(stream)),
        *(f"{API}.STREAM.{verb}.KV_{names.secrets_bucket}" for verb in ("CREATE", "INFO", "UPDATE", "DELETE", "PURGE", "MSG.DELETE")),
        *(f"$KV.{bucket}.{REST}" for bucket in _buckets(names)),
    )
    flows = (names.task(REST), names.generated(REST), names.scored(ANY), names.ledger(REST))
    events = tuple(names.event(plane, REST) for plane in ("weights", "trainer", "service"))
    return BusRights(publish, (_inbox(names, OPERATOR), *flows, *events))


def _administer(stream: str) -> Iterator[str]:
    yield f"{API}.STREAM.{ANY}.{stream}"
    yield f"{API}.STREAM.MSG.{ANY}.{stream}"
    yield f"{API}.CONSUMER.{ANY}.{stream}"
    yield f"{API}.CONSUMER.{ANY}.{stream}.{REST}"
    yield f"{API}.CONSUMER.DURABLE.CREATE.{stream}.{ANY}"
    yield f"{API}.CONSUMER.MSG.NEXT.{stream}.{ANY}"
    yield f"{API}.DIRECT.GET.{stream}"
    yield f"{API}.DIRECT.GET.{stream}.{REST}"
    yield f"$JS.ACK.{stream}.{REST}"
    yield f"$JS.FC.{stream}.{REST}"


def _streams(names: Subjects) -> tuple[str, ...]:
    queues = (names.task_stream, names.generated_stream, names.scored_stream)
    return (*queues, names.ledger_stream, names.events_stream, names.commands_stream, *(f"KV_{bucket}" for bucket in _buckets(names)))


def _buckets(names: Subjects) -> tuple[str, ...]:
    return names.config_bucket, names.services_bucket, names.weights_bucket, names.leases_bucket


def _environment(names: Subjects) -> BusRights:
    publish = (f"{API}.INFO", names.environment(ANY, "describe"))  # to learn whether another instance is there
    return BusRights(publish, (_inbox(names, ENVIRONMENT), f"{names.run}.environment.{REST}"), _LONG_ANSWER)


RUN_ACCOUNT = "run"  # the NATS account of the streams, where whoever made the server or operates the run connects
_STREAMED = (f"{API}.CONSUMER.MSG.NEXT.{REST}", f"{API}.DIRECT.GET.{REST}")  # requests that are answered by several messages
_PENDING = "1h"  # time for which NATS remembers to whom an answer goes: longer than any request waits
MAX_PAYLOAD = 8 << 20  # largest message in bytes, headers included: as much as NATS advises. A batch's references are one message.
MEMORY = "2gb"  # memory of Redis, unless `myxo accounts` is given another
KEY, CERTIFICATE = "key.pem", "certificate.pem"  # names of a server's own TLS files, beside its config
TLS_SECONDS = 5  # seconds that a client may take for the handshake


@dataclass(frozen=True)
class NatsSettings:
    """The addresses on which the server listens and the paths of its files, as the server sees them.

    ``tls``: the directory of `KEY` and `CERTIFICATE`; None for plain connections. ``monitor``: HTTP address for health checks inside the
    container. ``sync``: the time between two syncs of its files to disk, as long as Redis's ``everysec``.
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
    """Returns nats.conf, whose values are JSON. ``passwords``: by home, and that of `ADMISSION`."""
    config: dict[str, Any] = {
        "listen": settings.listen,
        "http": settings.monitor,
        "max_payload": settings.max_payload,
        "jetstream": {"store_dir": settings.store, "sync_interval": settings.sync},
    }
    if settings.tls is not None:
        files = {"cert_file": f"{settings.tls}/{CERTIFICATE}", "key_file": f"{settings.tls}/{KEY}"}
        config["tls"] = {**files, "timeout": TLS_SECONDS}
    users = [(role, nats_user(role, passwords[role.home])) for role in rights]
    config["accounts"] = nats_accounts([user for role, user in users if role.role == OPERATOR], users)
    admission = BusRights(("$SYS.REQ.SERVER.*.RELOAD",), (f"_INBOX.{REST}",))
    config["accounts"]["$SYS"] = {"users": [{"user": ADMISSION, "password": passwords[ADMISSION], "permissions": _permissions(admission)}]}
    return "".join(f"{key}: {json.dumps(value, indent=2)}\n" for key, value in config.items())


def nats_accounts(owners: list[dict[str, Any]], users: Iterable[tuple[Rights, dict[str, Any]]]) -> dict[str, Any]:
    """Returns the accounts of a server: `RUN_ACCOUNT` with the streams, and one for each role, which imports what it may publish and hear.

    NATS checks the subject of a request and not the reply subject that it names, to which the server then publishes. In an account of its
    own a role has its answers nowhere but in that account: no reply subject reaches a stream, or a subject that another role listens on.

    ``owners``: the users of `RUN_ACCOUNT`. ``users``: the other roles with their entries; operators, who are among the owners, are skipped.
    """
    served: dict[str, list[dict[str, Any]]] = {RUN_ACCOUNT: [{"service": subject, "response_type": "stream"} for subject in _STREAMED]}
    accounts: dict[str, Any] = {RUN_ACCOUNT: {"jetstream": "enabled", "users": owners, "exports": served[RUN_ACCOUNT]}}
    for rights, user in users:
        if rights.role == OPERATOR:
            continue
        if rights.role in accounts:  # a single replica: in the account of its role
            accounts[rights.role]["users"].append(user)
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
    found: dict[str, Any] = {"subscribe": _allowed(bus.subscribe), "publish": _allowed(bus.publish)}
    if bus.answer_seconds is not None:
        found["allow_responses"] = {"max": 1, "expires": f"{bus.answer_seconds}s"}
    return found


def _allowed(subjects: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {"allow": subjects} if subjects else {"deny": (REST,)}  # an empty list would allow everything


def redis_conf(rights: Iterable[Rights], passwords: Mapping[str, str], settings: RedisSettings) -> str:
    """Returns redis.conf, for Redis from 7.0 and Valkey. ``passwords``: by home, and those of `HEALTH` and `ADMISSION`."""
    lines = [
        f"bind {settings.bind}",
        f"unixsocket {_quoted(settings.socket)}",
        "unixsocketperm 700",
        f"dir {_quoted(settings.data)}",
        "appendonly yes",
        f"appendfsync {settings.appendfsync}",
        'save ""',
        "auto-aof-rewrite-min-size 1gb",  # as the embedded one has it, whose file says why
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
    lines += [redis_user(role.user, passwords[role.home], role.store) for role in rights if role.store is not None]
    lines.append(redis_user(HEALTH, passwords[HEALTH], StoreRights(("ping",))))
    lines.append(redis_user(ADMISSION, passwords[ADMISSION], StoreRights(("acl|setuser", "acl|deluser"))))
    return "\n".join([*lines, ""])


def redis_user(name: str, password: str, store: StoreRights) -> str:
    """Returns the line of an account, which has these rights and no other."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    further = "".join(f" ({_granted(rights)})" for rights in store.further)
    return f"user {name} on #{digest} sanitize-payload resetchannels resetkeys {_granted(store)}{further}"


def _granted(store: StoreRights) -> str:
    access = {keys: ("R" if keys in store.read else "") + ("W" if keys in store.write else "") for keys in (*store.read, *store.write)}
    return " ".join([*(f"%{letters}~{keys}" for keys, letters in access.items()), "-@all", *(f"+{command}" for command in store.commands)])


def _quoted(text: str) -> str:
    return json.dumps(text)
