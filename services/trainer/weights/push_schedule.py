"""The decisions of a push: its members, the renewal of its channels, the response to failures, its record. Pure: callers give the time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.trainer.commands import Push
from shared.bus.registry import CATCHING_UP
from shared.schema.service_messages import PUSH, Doing, ServiceStatus
from shared.schema.weight_messages import Marks, ReplicaPush, WeightsPushed, WeightsReceived, WeightsServed

OFFER_SECONDS = 5.0  # the time that a replica has to answer that it can take a version
ABORT_SECONDS = 10.0  # the time that replicas have to acknowledge a push's end
BACK_OFF_SECONDS = 1.0
BACK_OFF_MOST = 60.0  # A replica that failed a push is offered the next one after 1, 2, 4, … seconds, 60 at most


@dataclass(frozen=True)
class PushResult:
    """The result of a push.

    Args:
        replicas: now serving the version. seconds: from its begin to the last commit. wire_seconds: from the first bucket's export until
            the last replica had loaded and checked everything. engine_seconds: the slowest engine's, from its first wait for a bucket to
            the last one's loading and checking. stall: seconds that the trainer waited for it; the rest ran beside the training.
            bytes: sent by all stages together. digest: that of the version. marks: who → what it has reached → when, in seconds of its
            machine's monotonic clock; the trainer's own under ``trainer``.
    """

    version: int
    replicas: list[str]
    seconds: float
    wire_seconds: float
    engine_seconds: float
    stall: float
    bytes: int
    digest: str
    marks: Mapping[str, Marks] = field(default_factory=dict)

    @property
    def phases(self) -> dict[str, float]:
        """Returns the seconds of each phase: ``pause``, the slowest replica's until its engine was paused, beside the ``transfer``; that,
        until all had loaded; ``check``: comparing digests; ``activate``: the commit. Empty without marks of them."""
        trainer, replicas = self.marks.get("trainer", {}), [marks for name, marks in self.marks.items() if name != "trainer"]
        if not {"receive_began", "check_began", "commit_began", "prepare_began"} <= trainer.keys():
            return {}
        return {
            "pause": max((marks["paused"] - marks["asked"] for marks in replicas if "paused" in marks), default=0.0),
            "transfer": trainer["check_began"] - trainer["receive_began"],
            "check": trainer["commit_began"] - trainer["check_began"],
            "activate": trainer["prepare_began"] + self.seconds - trainer["commit_began"],
        }

    @property
    def gb_per_s(self) -> float:
        return self.bytes / max(self.wire_seconds, 1e-9) / 1e9


@dataclass(frozen=True, order=True)
class Target:
    """A replica to push to: its name, the incarnation of its engine's weights, and the engine's ranks in all. ``machines``: the addresses
    of its nodes, each with as many of the ranks, where each machine has channels of its own; else empty."""

    instance: str
    incarnation: str
    ranks: int
    machines: tuple[str, ...] = ()

    @property
    def ranks_by_machine(self) -> dict[str, int]:
        """Returns its ranks in the channels of each machine, of its nodes in order; under an empty name where all share the channels."""
        return dict.fromkeys(self.machines or ("",), self.ranks // max(1, len(self.machines)))


class PushSchedule:
    """The trainer's record of the replicas beside their statuses. ``members``: those of the present channels."""

    def __init__(self) -> None:
        self.members: tuple[Target, ...] = ()
        self._served: dict[str, tuple[str, int]] = {}  # instance → (incarnation, version) that it confirmed
        self._failures: dict[str, tuple[str, int, float]] = {}  # instance → (its process, failures in a row, time of the next offer)
        self._digests: set[str] = set()  # digests of versions that this process has pushed
        self._number = 0

    def behind(self, statuses: Iterable[ServiceStatus], version: int, now: float) -> tuple[Target, ...]:
        """Returns the replicas that do not serve ``version`` yet and may be offered it. ``now``: monotonic seconds."""
        found = [status for status in statuses if status.state != CATCHING_UP and self._is_behind(status, version, now)]
        return tuple(sorted(Target(status.instance, status.incarnation, status.ranks) for status in found))

    def serving(self, statuses: Iterable[ServiceStatus], version: int) -> tuple[Target, ...]:
        """Returns the replicas that serve ``version``."""
        found = [status for status in statuses if status.version == version and status.state == "ready"]
        return tuple(sorted(Target(status.instance, status.incarnation, status.ranks) for status in found))

    def next_push(
        self,
        version: int,
        targets: Sequence[Target],
        digests: Mapping[str, str],
        *,
        skip_unchanged: bool,
        machines: Mapping[str, Sequence[str]] = {},
    ) -> Push | None:
        """Returns the push to begin, to those targets that have accepted it; they are the members from now on.

        Args:
            digests: of the weights that each of these holds, by instance. skip_unchanged: leave out frozen parameters where all have them.
            machines: by instance, the addresses of its nodes, where each machine has channels of its own.
        """
        accepted = [target for target in targets if target.instance in digests]
        members = tuple(replace(target, machines=tuple(machines.get(target.instance, ()))) for target in accepted)
        if not members:
            return None
        renewed, self.members = members != self.members, members
        self._number += 2  # a check of the push has the odd number after it
        return Push(
            version,
            self._number,
            engine_ranks=_ranks_by_machine(members) if renewed else {},
            partial=skip_unchanged and self._digests.issuperset(digests.values()),
        )

    def first_ranks(self, target: Target) -> dict[str, int]:
        """Returns by machine the rank in its channels of the first process that a member's engine has there; rank 0 is the source."""
        before = _ranks_by_machine(self.members[: self.members.index(target)])
        return {machine: 1 + before.get(machine, 0) for machine in target.ranks_by_machine}

    def confirmed(self, targets: Iterable[Target], version: int, digest: str) -> None:
        """Records that these targets serve a version."""
        self._digests.add(digest)
        for target in targets:
            self._served[target.instance] = (target.incarnation, version)
            self._failures.pop(target.instance, None)

    def failed(self, targets: Iterable[Target], culprits: Iterable[str], now: float) -> None:
        """Records that a push has failed for these; the channels have lost members, so the next push makes new ones."""
        targets, self.members = list(targets), ()
        self.blame([target for target in targets if target.instance in culprits], now)
        self.forget(target.instance for target in targets)

    def forget(self, names: Iterable[str]) -> None:
        """Forgets which versions these replicas serve."""
        for name in names:
            self._served.pop(name, None)

    def blame(self, targets: Iterable[Target], now: float) -> None:
        """Offers these no push for a while, longer after each failure; a new process of that name starts without a delay."""
        for target in targets:
            life, count, _ = self._failures.get(target.instance, ("", 0, 0.0))
            count = count + 1 if life == _life(target.incarnation) else 1
            pause = min(BACK_OFF_MOST, BACK_OFF_SECONDS * 2 ** (count - 1))
            self._failures[target.instance] = (_life(target.incarnation), count, now + pause)

    def _is_behind(self, status: ServiceStatus, version: int, now: float) -> bool:
        served = status.version
        incarnation, confirmed = self._served.get(status.instance, ("", -1))
        if incarnation == status.incarnation:  # the status may be older than the commit; a fenced replica has a new incarnation
            served = max(served, confirmed)
        blamed, _, not_before = self._failures.get(status.instance, ("", 0, 0.0))
        return served < version and (now >= not_before or blamed != _life(status.incarnation))


def _ranks_by_machine(members: Iterable[Target]) -> dict[str, int]:
    found: dict[str, int] = {}
    for target in members:
        for machine, ranks in target.ranks_by_machine.items():
            found[machine] = found.get(machine, 0) + ranks
    return found


def replicas_without_rank(machines: Mapping[str, Sequence[str]], trainers: Sequence[str]) -> dict[str, str]:
    """Returns the replicas that no rank of the trainer has a machine in common with, and why that is a fault.

    Args:
        machines: by instance, the addresses of its nodes. trainers: the addresses of the ranks' machines; none: that does not matter.
    """
    if not trainers:
        return {}
    places = ", ".join(dict.fromkeys(trainers))
    alone = {name: next((address for address in given if address not in trainers), None) for name, given in machines.items()}
    return {
        name: f"it shares its GPUs with the trainer, of which no rank is on its machine ({address or 'not told'}; ranks are on {places})"
        for name, address in alone.items()
        if address is not None
    }


def _life(incarnation: str) -> str:
    """Returns the process's part of an incarnation; the rest counts its engine's losses of weights."""
    return incarnation.partition(".")[0]


def culprits_of(
    members: Sequence[Target],
    answered: Iterable[str],
    errors: Mapping[str, str],
    gone: Mapping[str, str],
    own: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Returns the instances that caused a push's channels to break, with the reason.

    A channel that breaks fails every member of its group, and live members report that; the one that does not has broken it.

    Args:
        answered: instances whose engines received everything. errors: instance → the error it reported. gone: instance → why it counts
            as gone, by the registry. own: of the errors, those that have no other cause than the instance itself.
    """
    if gone or own:
        return {**gone, **(own or {})}
    heard = {name: "" for name in answered} | dict(errors)
    silent = {target.instance: "it did not answer" for target in members if target.instance not in heard}
    return silent or {target.instance: heard[target.instance] for target in members}


def lost_members(members: Iterable[Target], statuses: Iterable[ServiceStatus]) -> dict[str, str]:
    """Returns instance → why it counts as gone, by the registry. ``statuses``: of the replicas whose engines are up."""
    incarnations = {status.instance: status.incarnation for status in statuses}
    return {
        target.instance: "its engine has lost its weights" if target.instance in incarnations else "its engine or its heartbeat has stopped"
        for target in members
        if incarnations.get(target.instance) != target.incarnation
    }


PREPARE, RECEIVE, CHECK, COMMIT = "prepare", "receive", "check", "commit"  # the steps of a push, in their order
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
    def source(self) -> str:
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

    Attributes:
        received: the answers of those that have loaded everything. served: of those that serve the version.
    """

    def __init__(self, version: int, replicas: Iterable[str], declined: Mapping[str, str], now: float) -> None:
        self.version, self.step, self._began = version, PREPARE, {PREPARE: now}
        self._replicas = tuple(replicas)
        self._failures = {name: f"offer: {reason}" for name, reason in declined.items()}
        self.received: Mapping[str, WeightsReceived] = {}
        self.served: Mapping[str, WeightsServed] = {}

    def begin(self, step: str, now: float) -> None:
        """Records that a step begins, or continues."""
        self.step = step
        self._began.setdefault(step, now)

    def wait(self, missing: Iterable[str], now: float) -> PushWait:
        """Returns what the push waits for. ``missing``: the replicas that have not answered in this step."""
        return PushWait(self.version, self.step, tuple(missing) or self._replicas, now - self._began[self.step])

    def failed(self, culprits: Mapping[str, str]) -> None:
        """Takes why replicas have failed the present step."""
        self._failures |= {name: f"{self.step}: {reason}" for name, reason in culprits.items()}

    def marks(self, sender: Marks) -> dict[str, Marks]:
        """Returns who → what it has reached → when: the trainer's steps with what its ``sender`` has noted, and the replicas'."""
        steps = {f"{step}_began": at for step, at in self._began.items()}
        served = {name: {**answer.marks, **self.served[name].marks} for name, answer in self.received.items() if name in self.served}
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
        received, served = self.received.get(name), self.served.get(name)
        return ReplicaPush(
            replica=name,
            paused=served and served.paused,
            pausing=received and between(received.marks, "asked", "paused"),
            loading=received and received.seconds,
            activating=served and between(served.marks, "commit_asked", "resumed"),
            failure="" if served is not None else self._failures.get(name, f"{self.step}: the push failed for others"),
        )

    def _seconds(self, step: str, now: float) -> float:
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
