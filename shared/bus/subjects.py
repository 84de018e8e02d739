"""Names on the bus: subjects, streams, consumers and KV buckets of a run. Every subject starts with the run's id."""

from __future__ import annotations

import re
from dataclasses import dataclass

RUN_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}\Z")
"""What a run may be called: it becomes part of subject, stream and key names."""

TRAIN = "train"
EVAL = "eval"
"""Task classes."""


@dataclass(frozen=True)
class Subjects:
    """All names of one run.

    Args:
        run: the run's id, matching `RUN_ID`.
    """

    run: str

    # work queues
    def task(self, task_class: str) -> str:
        return f"{self.run}.task.{task_class}"

    def generated(self, environment: str) -> str:
        return f"{self.run}.generated.{environment}"

    @property
    def scored(self) -> str:
        return f"{self.run}.scored"

    # audit trail and events
    def ledger(self, event: str) -> str:
        return f"{self.run}.ledger.{event}"

    def event(self, plane: str, what: str) -> str:
        """``plane`` is one of weights, trainer, service."""
        return f"{self.run}.{plane}.{what}"

    # request and reply
    @property
    def batch(self) -> str:
        return f"{self.run}.buffer.batch"

    @property
    def trained(self) -> str:
        return f"{self.run}.buffer.trained"

    @property
    def durable(self) -> str:
        return f"{self.run}.buffer.durable"

    def replica_weights(self, replica: str, verb: str) -> str:
        return f"{self.run}.rollout.{replica}.weights.{verb}"

    def environment(self, name: str, verb: str) -> str:
        """Where an environment on the bus answers; ``verb`` is describe or score."""
        return f"{self.run}.environment.{name}.{verb}"

    def inbox(self, role: str) -> str:
        """Prefix of the reply subjects of one kind of service, so that none can listen to another's."""
        return f"_INBOX.{self.run}.{role}"

    # streams and buckets (no dots allowed in their names)
    @property
    def task_stream(self) -> str:
        return f"{self.run}-task"

    @property
    def generated_stream(self) -> str:
        return f"{self.run}-generated"

    @property
    def scored_stream(self) -> str:
        return f"{self.run}-scored"

    @property
    def ledger_stream(self) -> str:
        return f"{self.run}-ledger"

    @property
    def events_stream(self) -> str:
        return f"{self.run}-events"

    @property
    def config_bucket(self) -> str:
        return f"{self.run}-config"

    @property
    def services_bucket(self) -> str:
        return f"{self.run}-services"

    @property
    def weights_bucket(self) -> str:
        return f"{self.run}-weights"

    @property
    def leases_bucket(self) -> str:
        return f"{self.run}-leases"

    # payload keys in the store
    def payload_prefix(self, group: str, attempt: int) -> str:
        """What all keys of an attempt at a group begin with."""
        return f"{self.run}:group:{group}:{attempt}:"

    def payload_key(self, group: str, attempt: int, part: int, generation: str = "0") -> str:
        """``generation``: tells apart what was made of one attempt, which two may work at where a lease ran out."""
        return f"{self.payload_prefix(group, attempt)}{generation}:{part}"

    def exchange_key(self, kind: str, what: str) -> str:
        """Of what the trainer's roles tell each other."""
        return f"{self.run}:exchange:{kind}:{what}"
