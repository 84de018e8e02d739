"""Checks a run's ledger, message by message as the stream holds them. It shares no code with the buffer's state nor with the audit.

What the weights must be at the run's end follows from it, too: from the digests of what each step trained (`fast.scripted_weights`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
        if self._is_open(record["group"], "requeued"):
            self._scores.pop(record["group"], None)

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
        digests = []
        for group in batch["groups"]:
            scored = self._scores.get(group, {"samples": [], "removed": []})
            trained = [sample for index, sample in enumerate(scored["samples"]) if index not in scored["removed"]]
            digests += [sample["digest"] for sample in trained if any(v >= batch["below"] and count for v, count in self._spans(sample))]
            found.digests[group] = [sample["digest"] for sample in scored["samples"]]
            self._close(group, "trained")
        found.steps, found.versions[step] = step + 1, batch["version"]
        if digests:
            found.state = next_state(found.state, digests)
        if record["attestation"] is None or record["attestation"]["samples"] != len(digests):
            self._problem(f"step {step}: the trainer attests {record['attestation']}, its batch has {len(digests)} samples to train")

    def _GroupsDropped(self, record: Record) -> None:
        for group in record["groups"]:
            self._close(group, f"dropped: {record['reason']}")

    def _GroupDead(self, record: Record) -> None:
        self._close(record["group"], f"dead: {record['reason']}")

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
