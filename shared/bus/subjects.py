"""The names on the bus: subjects, streams, consumers and KV buckets of a run. Every subject starts with the run's id."""

import itertools
import re
from collections.abc import Iterator

from shared.rewards.names import queue_of

RUN_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}\Z")  # The form of a run's id, which becomes part of subject, stream and key names
TRAIN = "train"
EVAL = "eval"  # The task classes: training and held-out prompts
ROLLOUT, REWARD, GATEWAY = "rollout", "reward", "gateway"  # The roles that report what became of a group, each on a subject of its own
PRODUCER = "producer"  # The lease of the replica that runs the user's rollout function


class Subjects:
    """All names of one run.

    Args:
        run: the run's id, matching `RUN_ID`.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        # request and reply
        self.batch = f"{run}.buffer.batch"
        self.trained = f"{run}.buffer.trained"
        self.durable = f"{run}.buffer.durable"
        self.refused = f"{run}.buffer.refused"
        self.evaluations = f"{run}.buffer.evaluations"
        self.object_urls = f"{run}.objects.urls"
        # streams and buckets (no dots allowed in their names)
        self.task_stream = f"{run}-task"
        self.generated_stream = f"{run}-generated"
        self.scored_stream = f"{run}-scored"
        self.ledger_stream = f"{run}-ledger"
        self.events_stream = f"{run}-events"
        self.commands_stream = f"{run}-commands"
        self.config_bucket = f"{run}-config"
        self.services_bucket = f"{run}-services"
        self.weights_bucket = f"{run}-weights"
        self.leases_bucket = f"{run}-leases"
        self.secrets_bucket = f"{run}-secrets"
        # patterns of keys in the store
        self.payload_keys = f"{run}:group:*"
        self.exchange_keys = f"{run}:exchange:*"
        self.session_keys = f"{run}:session:*"
        self.command_keys = f"{run}:command:*"
        self.ingest_keys = f"{run}:ingest:*"

    def task(self, task_class: str) -> str:
        return f"{self.run}.task.{task_class}"

    def generated(self, environment: str) -> str:
        """Returns the subject of groups to be scored by ``environment``."""
        return f"{self.run}.generated.{queue_of(environment)}"

    def scored(self, role: str) -> str:
        """Returns the subject on which the services of ``role`` (`ROLLOUT`, `REWARD`, `GATEWAY`) report outcomes to the buffer."""
        return f"{self.run}.scored.{role}"

    def ledger(self, event: str) -> str:
        return f"{self.run}.ledger.{event}"

    def command(self, kind: str, client: str = "", number: int | str = 0) -> str:
        """Returns the subject of a command from outside (``kind`` command) or of its outcome (``outcome``); ``>``: of all."""
        return f"{self.run}.commands.{kind}" if kind == ">" else f"{self.run}.commands.{kind}.{client}.{number}"

    def event(self, plane: str, what: str) -> str:
        """Returns the subject of an event; ``plane`` is one of weights, trainer, service."""
        return f"{self.run}.{plane}.{what}"

    def replica_weights(self, replica: str, verb: str) -> str:
        return f"{self.run}.rollout.{replica}.weights.{verb}"

    def environment(self, name: str, verb: str) -> str:
        """Returns the subject on which an environment on the bus answers; ``verb`` as in `shared.environment`."""
        return f"{self.run}.environment.{name}.{verb}"

    def inbox(self, role: str) -> str:
        """Returns the prefix of the reply subjects of one kind of service; no other kind can subscribe to them."""
        return f"_INBOX.{self.run}.{role}"

    # keys in the bucket of leases
    @staticmethod
    def trainer_nodes(role: str) -> str:
        """Returns what the nodes of the trainer share (``role``: actor, critic)."""
        return f"nodes.{role}"

    @staticmethod
    def engine_nodes(replica: str) -> str:
        """Returns what the nodes of one engine share; ``replica``: the rollout service that leads them."""
        return f"engines.{replica}"

    @staticmethod
    def node_lease(job: str, rank: int) -> str:
        """Returns the lease of a node, and the key of its secret; ``job``: what the nodes share."""
        return f"{job}.{rank}"

    @staticmethod
    def attempt(job: str) -> str:
        """Returns the key of the newest attempt of a job's nodes."""
        return f"{job}.attempt"

    # keys in the store
    def session_key(self, session: str) -> str:
        """Returns the key of a session's log."""
        return f"{self.run}:session:{session}"

    def command_key(self, client: str, number: int, part: str) -> str:
        """Returns the key of a command's payload, or of its result (``part``)."""
        return f"{self.run}:command:{client}:{number}:{part}"

    def ingest_key(self, group: str) -> str:
        """Returns the key of what became of a group from outside, by its producer's id."""
        return f"{self.run}:ingest:{group}"

    def payload_prefix(self, group: str, attempt: int) -> str:
        """Returns the prefix of all keys of an attempt at a group."""
        return f"{self.run}:group:{group}:{attempt}:"

    def payload_key(self, group: str, attempt: int, part: int, generation: str = "0") -> str:
        """Returns the key of one blob; ``generation`` distinguishes two replicas' work on one attempt, after a lease ran out."""
        return f"{self.payload_prefix(group, attempt)}{generation}:{part}"

    def picture_keys(self, group: str, attempt: int) -> Iterator[str]:
        """Yields the keys of the pictures that an attempt's prompt shows."""
        return (self.payload_key(group, attempt, part, "pictures") for part in itertools.count())

    def exchange_key(self, kind: str, what: str) -> str:
        """Returns the key of data that the trainer's roles exchange."""
        return f"{self.run}:exchange:{kind}:{what}"
