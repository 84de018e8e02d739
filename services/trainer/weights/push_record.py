"""The record of one push: when each step began, and what every replica came to. Pure: its callers give the time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.schema.service_messages import Doing
from shared.schema.weight_messages import Marks, ReplicaPush, WeightsPushed, WeightsReceived, WeightsServed
from shared.service.activities import PUSH

PREPARE, RECEIVE, CHECK, COMMIT = "prepare", "receive", "check", "commit"
"""The steps of a push, in their order."""

_NEXT = {PREPARE: (RECEIVE,), RECEIVE: (CHECK, COMMIT), CHECK: (COMMIT,), COMMIT: ()}


def between(marks: Marks, first: str, last: str) -> float | None:
    """Returns the seconds from one mark to another; None where one is missing."""
    return max(0.0, marks[last] - marks[first]) if first in marks and last in marks else None


@dataclass(frozen=True)
class PushWait:
    """What a push waits for now: its step, of those replicas, for ``seconds`` so far."""

    version: int
    step: str
    awaited_from: tuple[str, ...]
    seconds: float

    @property
    def what(self) -> str:
        return f"the push of version {self.version} ({self.step})"

    @property
    def whom(self) -> str:
        return ", ".join(self.awaited_from) or "the trainer's own ranks"

    def doing(self, timeout_s: float, now: float) -> Doing:
        """Returns what the status shows. ``timeout_s``: of the whole push; ``now``: since the epoch."""
        after = f"who has not answered is left out weights.push_timeout = {timeout_s:g} s after its beginning"
        what = self.what.removeprefix("the ")
        return Doing(part=PUSH, what=what, since=now - self.seconds, awaited_from=list(self.awaited_from), next_action=after)


class PushRecord:
    """Takes what happens in a push of ``version``, and makes the event of it.

    Args:
        replicas: its members. declined: replica → why it did not accept the offer. now: monotonic seconds.
    """

    def __init__(self, version: int, replicas: Iterable[str], declined: Mapping[str, str], now: float) -> None:
        self.version, self.step, self._began = version, PREPARE, {PREPARE: now}
        self._replicas = tuple(replicas)
        self._failures = {name: f"offer: {reason}" for name, reason in declined.items()}
        self._received: Mapping[str, WeightsReceived] = {}
        self._served: Mapping[str, WeightsServed] = {}

    def begin(self, step: str, now: float) -> None:
        """Takes that a step begins, or goes on."""
        self.step = step
        self._began.setdefault(step, now)

    def wait(self, missing: Iterable[str], now: float) -> PushWait:
        """Returns what the push waits for. ``missing``: the replicas that have not answered in this step."""
        return PushWait(self.version, self.step, tuple(missing) or self._replicas, now - self._began[self.step])

    def received(self, answers: Mapping[str, WeightsReceived]) -> None:
        """Takes the answers of those that have loaded everything."""
        self._received = answers

    def serve(self, answers: Mapping[str, WeightsServed]) -> None:
        """Takes the answers of those that serve the version."""
        self._served = answers

    def failed(self, culprits: Mapping[str, str]) -> None:
        """Takes why replicas have failed the present step."""
        self._failures |= {name: f"{self.step}: {reason}" for name, reason in culprits.items()}

    def marks(self, sender: Marks) -> dict[str, Marks]:
        """Returns who → what it has reached → when: the trainer's steps with what its ``sender`` has noted, and the replicas'."""
        steps = {f"{step}_began": at for step, at in self._began.items()}
        served = {name: {**answer.marks, **self._served[name].marks} for name, answer in self._received.items() if name in self._served}
        return {"trainer": {**steps, **sender}, **served}

    def event(self, now: float, at: float, *, stall: float = 0.0, sent: int = 0, failure: str = "") -> WeightsPushed:
        """Returns the event of the push that has ended. ``now``: monotonic; ``at``: since the epoch; ``sent``: bytes."""
        return WeightsPushed(
            version=self.version,
            replicas=[self._replica(name) for name in dict.fromkeys((*self._replicas, *self._failures))],
            joining=self._seconds(PREPARE, now),
            transfer=self._seconds(RECEIVE, now),
            check=self._seconds(CHECK, now),
            activation=self._seconds(COMMIT, now),
            seconds=now - self._began[PREPARE],
            stall=stall,
            bytes=sent,
            failure=failure,
            at=at,
        )

    def _replica(self, name: str) -> ReplicaPush:
        received, served = self._received.get(name), self._served.get(name)
        return ReplicaPush(
            replica=name,
            paused=served and served.paused,
            pausing=received and between(received.marks, "asked", "paused"),
            loading=received and received.seconds,
            activating=served and between(served.marks, "commit_asked", "resumed"),
            failure="" if served is not None else self._failures.get(name, f"{self.step}: the push failed for others"),
        )

    def _seconds(self, step: str, now: float) -> float:
        """Returns the seconds of a step, up to the next one or the push's end; 0 where it did not begin."""
        if (began := self._began.get(step)) is None:
            return 0.0
        return next((self._began[later] for later in _NEXT[step] if later in self._began), now) - began


def mismatches(answers: Mapping[str, WeightsReceived], digest: str) -> dict[str, str]:
    """Returns replica → how its weights differ from those that were sent, whose digest is ``digest``."""
    failures = {}
    for name, answer in answers.items():
        if answer.differences:
            first = next(iter(answer.differences.items()))
            failures[name] = f"{len(answer.differences)} tensors differ from the trainer's, first {first}"
        elif answer.digest != digest:
            failures[name] = f"the weights that it got have digest {answer.digest}, not {digest}"
    return failures
