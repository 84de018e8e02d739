"""Checks a run's ledger, message by message as the stream holds them. It shares no code with the buffer's state nor with the audit.

What the weights must be at the run's end follows from it, too: from the digests of what each step trained (`fast.scripted_weights`).
"""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import nats
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from shared.schema import codec
from tests.chaos.fast.scripted_weights import first_state, next_state

Record = Mapping[str, Any]


@dataclass
class LedgerFindings:
    """What a ledger tells. ``problems``: what must not be. ``ends``: of each group that has ended, how. ``state``: of the weights.

    ``digests``: of each trained group's samples, in order. ``versions``: of each step, that of its batch.
    """

    problems: list[str] = field(default_factory=list)
    ends: dict[str, str] = field(default_factory=dict)
    admitted: int = 0
    steps: int = 0
    finished: bool = False
    state: bytes = field(default_factory=first_state)
    digests: dict[str, list[int]] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)


class LedgerCheck:
    """Takes every message in the stream's order, then gives its findings.

    Args:
        bound: the run's max_staleness. size: groups of a batch.
    """

    def __init__(self, bound: int, size: int) -> None:
        self._bound, self._size = bound, size
        self.findings = LedgerFindings()
        self._next_sequence = 1
        self._scores: dict[str, Record] = {}
        self._batches: dict[int, dict[str, Any]] = {}
        self._batched: dict[str, int] = {}
        self._refused: set[str] = set()
        self._live = -1
        self._durable = 0

    def take(self, sequence: int, data: bytes) -> None:
        """Takes one message."""
        if sequence != self._next_sequence:
            self._problem(f"the stream goes from message {self._next_sequence - 1} to {sequence}")
        self._next_sequence = sequence + 1
        record = codec.unpack(data)
        if (check := getattr(self, f"_{record['kind']}", None)) is not None:
            check(record)

    def end(self) -> LedgerFindings:
        """Returns what was found, once all messages were taken."""
        found = self.findings
        for step in range(found.steps):
            if step in self._batches and (digests := self._digests(self._batches[step])):
                found.state = next_state(found.state, digests)
        if found.finished and (missing := found.admitted - len(found.ends)):
            self._problem(f"the run is finished, and {missing} of {found.admitted} groups have no end")
        return found

    def _problem(self, text: str) -> None:
        self.findings.problems.append(text)

    def _GroupsAdmitted(self, record: Record) -> None:
        if record["first"] != self.findings.admitted:
            self._problem(f"group {record['first']} was admitted after {self.findings.admitted}")
        self.findings.admitted += record["count"]

    def _GroupsScored(self, record: Record) -> None:
        for scored in record["groups"]:
            if self._is_open(scored["group"], "scored"):
                self._scores[scored["group"]] = scored

    def _GroupRequeued(self, record: Record) -> None:
        group = record["group"]
        if self._is_open(group, "requeued"):
            self._scores.pop(group, None)
            if (step := self._batched.pop(group, None)) is not None:
                if group not in self._refused or record["reason"] != "payload lost":
                    self._problem(f"{group} left the batch of step {step}: {record['reason']}")
                self._batches[step]["groups"].remove(group)

    def _BatchFormed(self, record: Record) -> None:
        step = record["step"]
        if step in self._batches or step != len(self._batches):
            self._problem(f"the batch of step {step} was formed as the {len(self._batches)}th")
        if len(set(record["groups"])) != self._size:
            self._problem(f"the batch of step {step} has the groups {record['groups']}")
        self._batches[step] = {"version": record["version"], "below": record["mask_below"], "groups": list(record["groups"])}
        self._add(step, record["groups"])

    def _BatchAmended(self, record: Record) -> None:
        batch = self._batches[record["step"]]
        batch["groups"] = [group for group in batch["groups"] if group not in record["removed"]] + list(record["added"])
        self._add(record["step"], record["added"])
        for group in record["added"] if record["step"] < self.findings.steps else []:
            self._train(group)

    def _add(self, step: int, groups: Iterable[str]) -> None:
        batch = self._batches[step]
        for group in groups:
            if group in self._batched:
                self._problem(f"{group} is in the batches of steps {self._batched[group]} and {step}")
            self._batched[group] = step
            if not self._is_open(group, f"put into the batch of step {step}") or group not in self._scores:
                self._problem(f"{group} is in the batch of step {step} without a score")
                continue
            removed = set(self._scores[group]["removed"])
            for sample in (sample for index, sample in enumerate(self._scores[group]["samples"]) if index not in removed):
                for version, _ in self._spans(sample):
                    if version >= batch["below"] and not 0 <= batch["version"] - version <= self._bound:
                        self._problem(f"step {step} on version {batch['version']} has a token of version {version} in {group}")

    def _BatchTrained(self, record: Record) -> None:
        found, step = self.findings, record["step"]
        if step != found.steps:
            self._problem(f"step {step} was trained as the {found.steps}th")
        if (batch := self._batches.get(step)) is None:
            return self._problem(f"step {step} was trained without a batch")
        if record["version"] != batch["version"]:
            self._problem(f"step {step} was trained on version {record['version']}, its batch is for {batch['version']}")
        for group in batch["groups"]:
            self._train(group)
        found.steps, found.versions[step] = step + 1, batch["version"]
        samples = len(self._digests(batch))
        if record["attestation"] is None or record["attestation"]["samples"] != samples:
            self._problem(f"step {step}: the trainer attests {record['attestation']}, its batch has {samples} samples to train")

    def _train(self, group: str) -> None:
        self.findings.digests[group] = [sample["digest"] for sample in self._scores[group]["samples"]] if group in self._scores else []
        self._close(group, "trained")

    def _digests(self, batch: Mapping[str, Any]) -> list[int]:
        """Returns the digests of the samples of which a batch trains a token."""
        scores = [self._scores[group] for group in batch["groups"] if group in self._scores]
        kept = [sample for scored in scores for index, sample in enumerate(scored["samples"]) if index not in scored["removed"]]
        return [sample["digest"] for sample in kept if any(v >= batch["below"] and count for v, count in self._spans(sample))]

    def _GroupsDropped(self, record: Record) -> None:
        for group in record["groups"]:
            self._close(group, f"dropped: {record['reason']}")

    def _SampleRefused(self, record: Record) -> None:
        if record["step"] < self._durable or record["group"] not in self._batches.get(record["step"], {"groups": []})["groups"]:
            self._problem(f"{record['group']} was refused in step {record['step']}, which does not train it")
        self._refused.add(record["group"])

    def _GroupDead(self, record: Record) -> None:
        group = record["group"]
        if group in self._refused and self.findings.ends.get(group) == "trained":  # its step is to be trained again without it
            del self.findings.ends[group], self.findings.digests[group]
        self._close(group, f"dead: {record['reason']}")

    def _CheckpointDurable(self, record: Record) -> None:
        if not self._durable <= record["steps"] <= self.findings.steps:
            self._problem(f"a checkpoint of {record['steps']} steps is durable after {self.findings.steps}, the last had {self._durable}")
        self._durable = record["steps"]

    def _VersionLive(self, record: Record) -> None:
        if record["version"] <= self._live:
            self._problem(f"version {record['version']} became live after {self._live}")
        self._live = record["version"]

    def _RunFinished(self, record: Record) -> None:
        self.findings.finished = True

    @staticmethod
    def _spans(sample: Record) -> list[tuple[int, int]]:
        return [tuple(span) for span in sample["spans"]] or [(sample["oldest"], sample["trained"])]

    def _close(self, group: str, end: str) -> None:
        if self._is_open(group, end):
            self.findings.ends[group] = end

    def _is_open(self, group: str, what: str) -> bool:
        number = int(group[1:])
        if number >= self.findings.admitted:
            self._problem(f"{group} was {what}, and never admitted")
            return False
        if group in self.findings.ends:
            self._problem(f"{group} was {what} after its end ({self.findings.ends[group]})")
            return False
        return True


async def ledger_messages(url: str, run: str, inbox: str = "_INBOX") -> list[tuple[int, bytes]]:
    """Returns every message of a run's ledger, with its sequence. ``inbox``: the prefix of the account's replies."""
    connection, stream, name = await nats.connect(url, inbox_prefix=inbox), f"{run}-ledger", f"chaos-{secrets.token_hex(4)}"
    try:
        js = connection.jetstream()
        config = ConsumerConfig(
            ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.ALL, name=name, inactive_threshold=60, mem_storage=True
        )
        info = await js.add_consumer(stream, config)
        pull = await js.pull_subscribe_bind(name, stream)
        found, pending = [], info.num_pending or 0
        while len(found) < pending:
            batch = await pull.fetch(min(256, pending - len(found)), timeout=10)
            found += [(message.metadata.sequence.stream, message.data) for message in batch]
        await js.delete_consumer(stream, name)  # who asks often would have as many as a server allows
        return found
    finally:
        await connection.close()
