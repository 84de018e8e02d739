"""Rank 0's requests to the replicas of a push: one request to every member at once, while the registry is watched for lost members.

The requests are made on the control client's thread; the push's thread waits for them.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from services.trainer.control_client import ControlClient, now
from services.trainer.weights.push_schedule import ABORT_SECONDS, OFFER_SECONDS, PushResult, Target, reason_gone
from shared.runtime.errors import MyxoError
from shared.schema.messages import Accepted, Message, ServiceStatus
from shared.schema.weight_messages import (
    WeightChannelAddress,
    WeightsAbort,
    WeightsCommit,
    WeightsLive,
    WeightsOffer,
    WeightsPrepare,
    WeightsReady,
    WeightsReceive,
    WeightsReceived,
)

POLL_INTERVAL_S = 0.2
"""The interval at which the registry's statuses are compared with the members of a push."""

GRACE_SECONDS = 1.0
"""The time for which the others' answers are awaited once one has failed: they show which member broke the shared channel."""

Answer = TypeVar("Answer", bound=Message)
Members = Sequence[Target]


class PeerFailure(MyxoError):
    """Some replicas failed a step of the push. ``failures``: instance → reason."""

    def __init__(self, step: str, failures: dict[str, str]) -> None:
        self.failures = failures
        super().__init__(f"{step}: " + "; ".join(f"{name}: {reason}" for name, reason in sorted(failures.items())))


class PushProtocol:
    """Requests to replicas, over the bus."""

    def __init__(self, link: ControlClient) -> None:
        self._link = link

    @property
    def statuses(self) -> list[ServiceStatus]:
        """Returns the statuses of the replicas whose engines are up."""
        return self._link.replicas

    def offer(self, members: Members, version: int) -> "PushRequest[WeightsReady]":
        """Asks which replicas can take a version now. Only these join a channel: its members would wait for a dead one."""
        return self.request(members, "offer", lambda _: WeightsOffer(version=version), WeightsReady, OFFER_SECONDS)

    def prepare(
        self, members: Members, version: int, channels: list[WeightChannelAddress], rank: Callable[[Target], int], seconds: float
    ) -> "PushRequest[WeightsReady]":
        """Has the engines begin to join channels. ``rank``: that of a member's first engine process."""

        def message(target: Target) -> WeightsPrepare:
            return WeightsPrepare(version=version, channels=channels, rank=rank(target), deadline=seconds)

        return self.request(members, "prepare", message, WeightsReady, seconds)

    def receive(
        self, members: Members, version: int, push: int, channels: list[str], check: bool, seconds: float
    ) -> "PushRequest[WeightsReceived]":
        """Has the replicas load, or compare, the buckets that are about to be sent."""
        message = WeightsReceive(version=version, push=push, channels=channels, check=check, deadline=seconds)
        return self.request(members, "receive", lambda _: message, WeightsReceived, seconds)

    def commit(self, members: Members, version: int, digest: str, seconds: float) -> "PushRequest[Accepted]":
        """Has the replicas serve what they have received."""
        message = WeightsCommit(version=version, digest=digest, deadline=seconds)
        return self.request(members, "commit", lambda _: message, Accepted, seconds)

    def abort(self, members: Members, version: int, reason: str) -> "PushRequest[Accepted]":
        """Tells the replicas that the push has failed."""
        return self.request(members, "abort", lambda _: WeightsAbort(version=version, reason=reason), Accepted, ABORT_SECONDS)

    def live(self, result: PushResult) -> None:
        """Announces the version that is served now."""
        self._link.weights_live(
            WeightsLive(
                version=result.version, replicas=result.replicas, seconds=result.seconds, bytes=result.bytes, digest=result.digest, at=now()
            )
        )

    def request(
        self, members: Members, verb: str, message: Callable[[Target], Message], reply: type[Answer], seconds: float
    ) -> "PushRequest[Answer]":
        """Asks every member at once, in the background."""
        return PushRequest(self._link, members, verb, message, reply, seconds)

    def watch(self, members: Members) -> Future[dict[str, str]]:
        """Returns a future of the members that are gone and why, done once there is one. Cancel it when it is no longer needed."""

        async def watched() -> dict[str, str]:
            while not (gone := _gone(members, self._link)):
                await asyncio.sleep(POLL_INTERVAL_S)
            return gone

        return self._link.begin(watched())


class PushRequest(Generic[Answer]):
    """One request under way to several replicas.

    Attributes:
        answers: instance → its answer. errors: instance → its error, or why it counts as gone. Both grow until `done`.
        gone: the errors that come from the registry, not from the replica.
    """

    def __init__(
        self, link: ControlClient, members: Members, verb: str, message: Callable[[Target], Message], reply: type[Answer], seconds: float
    ) -> None:
        self._link, self._members, self._verb = link, members, verb
        self._message, self._reply, self._seconds = message, reply, seconds
        self.answers: dict[str, Answer] = {}
        self.errors: dict[str, str] = {}
        self.gone: dict[str, str] = {}
        self.done: Future[None] = link.begin(self._ask_all())

    def wait(self) -> dict[str, Answer]:
        """Returns the answers once all are there. Raises PeerFailure once one has failed, and the others have had a moment to answer."""
        self.done.result(self._seconds + 30)
        if self.errors:
            raise PeerFailure(self._verb, self.errors)
        return self.answers

    def settle(self) -> None:
        """Waits a moment for the errors of replicas whose shared channel broke, since their request will fail."""
        with contextlib.suppress(TimeoutError):
            self.done.result(GRACE_SECONDS)
        self.done.cancel()

    async def _ask_all(self) -> None:
        tasks = {asyncio.create_task(self._ask(target)): target for target in self._members}
        end: float | None = None
        try:
            while (waiting := [task for task in tasks if not task.done()]) and (end is None or time.monotonic() < end):
                await asyncio.wait(waiting, timeout=POLL_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
                gone = _gone([target for task, target in tasks.items() if not task.done()], self._link)
                self.errors |= gone
                self.gone |= gone
                if self.errors and end is None:
                    end = time.monotonic() + GRACE_SECONDS
        finally:
            for task in tasks:
                task.cancel()

    async def _ask(self, target: Target) -> None:
        service, started = self._link.service, time.monotonic()
        subject = service.subjects.replica_weights(target.instance, self._verb)
        try:
            self.answers[target.instance] = await service.bus.request(
                subject, self._message(target), self._reply, deadline=self._seconds, awaited_from=target.instance, patient=False
            )
        except MyxoError as error:
            self.errors[target.instance] = f"{error} ({time.monotonic() - started:.1f} s)"


def _gone(members: Members, link: ControlClient) -> dict[str, str]:
    """Returns instance → why it counts as gone, by the registry."""
    statuses = {status.instance: status for status in link.replicas}
    return {target.instance: reason for target in members if (reason := reason_gone(target, statuses)) is not None}
