"""Who should be able to do what, written down by hand: what `shared.accounts.permissions` derives is held against this."""

from collections.abc import Iterable, Iterator

from shared.accounts.permissions import ANY, REST
from shared.bus.subjects import Subjects

BUFFER, ROLLOUT, REWARD, TRAINER, GATEWAY, CONSOLE, OPERATOR, ENVIRONMENT = ROLES = (
    "buffer",
    "rollout",
    "reward",
    "trainer",
    "gateway",
    "console",
    "operator",
    "environment",
)
SERVICES = {BUFFER, ROLLOUT, REWARD, TRAINER, GATEWAY}
PEOPLE = {OPERATOR}
READERS = {CONSOLE, OPERATOR}
"""Who hears and reads what a run tells; the console changes nothing, which is why it stands among those who publish only where asking is
publishing: in JetStream's API."""
NOBODY: set[str] = set()

Table = dict[str, tuple[set[str], set[str]]]
"""Subject → (who may publish on it, who may subscribe to it)."""


def subjects(run: str) -> Table:
    """The subjects of a run, each with an example in place of what varies."""
    names = Subjects(run)
    table: Table = {
        names.task("train"): ({BUFFER} | PEOPLE, PEOPLE),
        names.task("eval"): ({BUFFER} | PEOPLE, PEOPLE),
        names.generated("math"): ({ROLLOUT, GATEWAY} | PEOPLE, PEOPLE),
        names.scored("rollout"): ({ROLLOUT} | PEOPLE, PEOPLE),
        names.scored("reward"): ({REWARD} | PEOPLE, PEOPLE),
        names.scored("gateway"): ({GATEWAY} | PEOPLE, PEOPLE),
        names.scored("buffer"): (PEOPLE, PEOPLE),
        names.ledger("groups_admitted"): ({BUFFER} | PEOPLE, READERS),
        names.event("weights", "live"): ({TRAINER} | PEOPLE, {BUFFER} | READERS),
        names.event("weights", "pushed"): ({TRAINER} | PEOPLE, READERS),
        names.event("trainer", "metrics"): ({TRAINER} | PEOPLE, READERS),
        names.event("trainer", "step"): ({TRAINER} | PEOPLE, READERS),
        names.event("trainer", "warm_start"): ({TRAINER} | PEOPLE, READERS),
        names.event("service", "joined"): (SERVICES | PEOPLE, READERS),
        names.batch: ({TRAINER} | PEOPLE, {BUFFER}),
        names.trained: ({TRAINER} | PEOPLE, {BUFFER}),
        names.durable: ({TRAINER} | PEOPLE, {BUFFER}),
        names.refused: ({TRAINER} | PEOPLE, {BUFFER}),
        names.evaluations: ({TRAINER} | PEOPLE, {BUFFER}),
        names.environment("math", "describe"): ({REWARD, ROLLOUT, ENVIRONMENT} | PEOPLE, {ENVIRONMENT}),
        names.environment("math", "step"): ({ROLLOUT} | PEOPLE, {ENVIRONMENT}),
        names.environment("math", "score"): ({REWARD} | PEOPLE, {ENVIRONMENT}),
        names.command("command", "a", 1): ({GATEWAY} | PEOPLE, {TRAINER, GATEWAY}),
        names.command("outcome", "a", 1): ({TRAINER, GATEWAY} | PEOPLE, {TRAINER, GATEWAY}),
        names.object_urls: ({ROLLOUT} | PEOPLE, {TRAINER}),
        f"{run}.anything.else": (PEOPLE, NOBODY),
        f"{run}.>": (PEOPLE, NOBODY),
    }
    for verb in ("offer", "prepare", "pause", "receive", "commit", "abort", "sleep", "wake"):
        table[names.replica_weights("rollout-0", verb)] = ({TRAINER} | PEOPLE, {ROLLOUT})
    table[names.replica_weights("rollout-0", "transfer")] = ({TRAINER, ROLLOUT} | PEOPLE, {ROLLOUT})
    for role in ROLES:
        table[f"{names.inbox(role)}.x.y"] = (NOBODY, {role})
    return table


def buckets(run: str) -> Table:
    """Keys of the run's buckets."""
    names = Subjects(run)
    table: Table = {
        f"$KV.{names.config_bucket}.config": (PEOPLE, NOBODY),
        f"$KV.{names.config_bucket}.store": (PEOPLE, NOBODY),
        f"$KV.{names.config_bucket}.phase": ({BUFFER} | PEOPLE, NOBODY),
        f"$KV.{names.weights_bucket}.live": ({TRAINER} | PEOPLE, NOBODY),
        f"$KV.{names.weights_bucket}.snapshot": ({TRAINER} | PEOPLE, NOBODY),
        f"$KV.{names.leases_bucket}.buffer": ({BUFFER} | PEOPLE, NOBODY),
        f"$KV.{names.leases_bucket}.producer": ({ROLLOUT} | PEOPLE, NOBODY),
        f"$KV.{names.leases_bucket}.nodes.actor.1": ({TRAINER} | PEOPLE, NOBODY),
        f"$KV.{names.leases_bucket}.engines.rollout-0.1": ({ROLLOUT} | PEOPLE, NOBODY),
        f"$KV.{names.leases_bucket}.anything": (PEOPLE, NOBODY),
        f"$KV.{names.secrets_bucket}.engines.rollout-0.1": ({ROLLOUT}, NOBODY),
        f"$KV.{names.secrets_bucket}.anything": (NOBODY, NOBODY),
        f"$KV.{names.services_bucket}.console.console-0": (PEOPLE, NOBODY),
        f"$KV.{names.services_bucket}.environment.math": ({REWARD} | PEOPLE, NOBODY),
    }
    for role in sorted(SERVICES):
        table[f"$KV.{names.services_bucket}.{role}.{role}-0"] = ({role} | PEOPLE, NOBODY)
    table[f"$KV.{names.services_bucket}.critic.critic-0"] = ({TRAINER} | PEOPLE, NOBODY)
    table[f"$KV.{names.services_bucket}.model.model-judge-0"] = ({ROLLOUT} | PEOPLE, NOBODY)
    return table


def interface(run: str) -> Table:
    """The run's part of JetStream's API."""
    names = Subjects(run)
    takers = {
        f"{names.task_stream}.train": {ROLLOUT, GATEWAY},
        f"{names.task_stream}.eval": {ROLLOUT},
        f"{names.generated_stream}.math": {REWARD},
        f"{names.scored_stream}.buffer": {BUFFER},
        f"{names.ledger_stream}.reader-1": NOBODY,
        f"{names.events_stream}.reader-1": NOBODY,
    }
    acks = {queue: takers[queue] for queue in list(takers)[:4]}
    asked = {
        f"STREAM.INFO.{names.ledger_stream}": SERVICES | {CONSOLE},
        f"STREAM.INFO.KV_{names.config_bucket}": SERVICES | {CONSOLE},
        f"STREAM.INFO.KV_{names.services_bucket}": SERVICES | {CONSOLE},
        f"STREAM.INFO.KV_{names.weights_bucket}": {BUFFER, ROLLOUT, REWARD, TRAINER, GATEWAY, CONSOLE},
        f"STREAM.INFO.KV_{names.leases_bucket}": {BUFFER, ROLLOUT, TRAINER, CONSOLE},
        f"STREAM.INFO.{names.task_stream}": {CONSOLE},
        f"STREAM.MSG.GET.{names.ledger_stream}": {BUFFER, CONSOLE},
        f"STREAM.MSG.GET.KV_{names.config_bucket}": SERVICES | {CONSOLE},
        f"STREAM.MSG.GET.KV_{names.services_bucket}": {ROLLOUT, REWARD, TRAINER, GATEWAY, CONSOLE},
        f"STREAM.MSG.GET.KV_{names.weights_bucket}": {BUFFER, ROLLOUT, REWARD, TRAINER, GATEWAY, CONSOLE},
        f"STREAM.MSG.GET.KV_{names.leases_bucket}": {BUFFER, ROLLOUT, TRAINER, CONSOLE},
        f"STREAM.MSG.GET.{names.task_stream}": NOBODY,
        f"STREAM.MSG.GET.{names.commands_stream}": {TRAINER, GATEWAY, CONSOLE},
        f"STREAM.INFO.{names.commands_stream}": {TRAINER, GATEWAY, CONSOLE},
        f"DIRECT.GET.{names.commands_stream}": {TRAINER, GATEWAY, CONSOLE},
        f"STREAM.MSG.GET.{names.scored_stream}": NOBODY,
        f"CONSUMER.INFO.{names.task_stream}.train": {BUFFER, CONSOLE},
        f"CONSUMER.INFO.{names.generated_stream}.math": {BUFFER, CONSOLE},
        f"CONSUMER.INFO.{names.scored_stream}.buffer": {BUFFER, CONSOLE},
        f"CONSUMER.CREATE.{names.ledger_stream}.reader-1": NOBODY,
        f"CONSUMER.CREATE.{names.events_stream}.reader-1": NOBODY,
        f"CONSUMER.CREATE.{names.task_stream}.thief": NOBODY,
        f"CONSUMER.DURABLE.CREATE.{names.task_stream}.train": NOBODY,
        f"CONSUMER.DURABLE.CREATE.{names.ledger_stream}.stays": NOBODY,
        f"CONSUMER.DELETE.{names.task_stream}.train": NOBODY,
        f"CONSUMER.DELETE.{names.scored_stream}.buffer": NOBODY,
        f"DIRECT.GET.{names.task_stream}": NOBODY,
        f"DIRECT.GET.{names.ledger_stream}": {BUFFER, CONSOLE},
        f"DIRECT.GET.{names.events_stream}": {CONSOLE},
        f"DIRECT.GET.{names.scored_stream}": NOBODY,
        **{f"CONSUMER.MSG.NEXT.{queue}": who for queue, who in takers.items()},
    }
    for stream in every_stream(run):
        for verb in ("CREATE", "UPDATE", "DELETE", "PURGE", "MSG.DELETE"):
            asked[f"STREAM.{verb}.{stream}"] = NOBODY
    table: Table = {f"$JS.API.{subject}": (who | PEOPLE, NOBODY) for subject, who in asked.items()}
    secrets = f"KV_{names.secrets_bucket}"  # who operates the run makes and removes the bucket, and does not read it
    table[f"$JS.API.STREAM.INFO.{secrets}"] = ({ROLLOUT} | PEOPLE, NOBODY)
    table[f"$JS.API.STREAM.MSG.GET.{secrets}"] = ({ROLLOUT}, NOBODY)
    table |= {f"$JS.API.{subject}": (NOBODY, NOBODY) for subject in (f"DIRECT.GET.{secrets}", f"CONSUMER.CREATE.{secrets}.reader-1")}
    table |= {f"$JS.API.STREAM.{verb}.{secrets}": (NOBODY, NOBODY) for verb in ("SNAPSHOT", "RESTORE")}
    table |= {f"$JS.ACK.{queue}.1.1.1.1.1": (who | PEOPLE, NOBODY) for queue, who in acks.items()}
    return table


def server() -> Table:
    """What belongs to no run."""
    return {
        ">": (NOBODY, NOBODY),
        "$SYS.>": (NOBODY, NOBODY),
        "$SYS.REQ.SERVER.PING": (NOBODY, NOBODY),
        "$SYS.REQ.USER.INFO": (NOBODY, NOBODY),
        "$JS.>": (NOBODY, NOBODY),
        "$KV.>": (NOBODY, NOBODY),
        "$JS.API.INFO": (SERVICES | READERS | {ENVIRONMENT}, NOBODY),
        "$JS.API.STREAM.NAMES": (PEOPLE, NOBODY),
        "$JS.API.STREAM.CREATE.anything": (NOBODY, NOBODY),
        "_INBOX.>": (NOBODY, NOBODY),
        "_INBOX.x.y": (NOBODY, NOBODY),
    }


def every_stream(run: str) -> Iterator[str]:
    names = Subjects(run)
    yield from (
        names.task_stream,
        names.generated_stream,
        names.scored_stream,
        names.ledger_stream,
        names.events_stream,
        names.commands_stream,
    )
    buckets = (names.config_bucket, names.services_bucket, names.weights_bucket, names.leases_bucket, names.secrets_bucket)
    yield from (f"KV_{bucket}" for bucket in buckets)


def everything(run: str, other: str) -> Table:
    """All of the above for a run, and for another run: nobody may touch that one."""
    own = subjects(run) | buckets(run) | interface(run)
    others = {subject: (NOBODY, NOBODY) for table in (subjects, buckets, interface) for subject in table(other)}
    return own | others | server()


STORE = {
    BUFFER: {"PING", "GETRANGE", "EXISTS", "INFO", "SETNX", "UNLINK"},
    ROLLOUT: {"PING", "GETRANGE", "SETNX"},
    REWARD: {"PING", "GETRANGE"},
    GATEWAY: {"PING", "SETNX"},
    TRAINER: {"PING", "GET", "GETRANGE"},
    CONSOLE: {"PING", "GETRANGE", "INFO"},
    OPERATOR: {"PING", "GET", "GETRANGE", "EXISTS", "UNLINK", "SCAN"},
    "health": {"PING"},
}
"""Commands of Redis that each of its accounts may run on payloads."""

EXCHANGE = {TRAINER: {"GET", "HEXISTS", "HMGET", "HSET", "SET", "UNLINK"}}
"""Those that it may run besides, on what the trainer's roles tell each other."""

SESSIONS = {
    ROLLOUT: {"EXPIRE", "GET", "LLEN", "LRANGE", "RPUSH", "RPUSHX", "SETNX", "UNLINK"},
    GATEWAY: {"GET", "LLEN", "LRANGE", "RPUSHX"},
    CONSOLE: {"LLEN", "LRANGE"},
}
"""Those that it may run on sessions."""

INGESTED = {"GET", "SET"}
"""Those that a gateway may run on what became of groups from outside."""

COMMANDED = {TRAINER: {"GETRANGE", "SETNX", "UNLINK"}, GATEWAY: {"EXPIRE", "GETRANGE", "SETNX", "UNLINK"}}
"""Those that it may run on the payloads and results of commands from outside."""

PAYLOADS, EXCHANGED, SESSION, ALL = "group:*", "exchange:*", "session:*", "*"
KEYS: dict[str, tuple[set[str], set[str]]] = {
    BUFFER: ({PAYLOADS}, {PAYLOADS}),
    ROLLOUT: ({PAYLOADS}, {PAYLOADS}),
    REWARD: ({PAYLOADS}, set()),
    GATEWAY: ({SESSION}, {SESSION}),
    TRAINER: ({PAYLOADS, EXCHANGED}, {EXCHANGED}),
    CONSOLE: ({PAYLOADS}, set()),
    OPERATOR: ({ALL}, {ALL}),
}
"""Keys under the run's own prefix that each account may read, and write, besides what the replicas may do on sessions."""


def covers(pattern: str, subject: str) -> bool:
    """Returns whether ``pattern`` matches every subject that ``subject``, which may hold wildcards itself, matches."""
    wanted, given = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == REST:
            return len(given) > index
        if index >= len(given) or given[index] == REST or (token not in (ANY, given[index])):
            return False
    return len(wanted) == len(given)


def allowed(patterns: Iterable[str], subject: str) -> bool:
    """Returns whether one of the patterns covers the subject."""
    return any(covers(pattern, subject) for pattern in patterns)
