"""Rank 0's requests to the replicas of a push: one request to every member at once, while the registry is watched for lost members.

The requests are made on the control client's thread; the push's thread waits for them. One that gets no answer, since a connection broke,
is sent again: a replica answers it as it answered the first (`services.rollout.weight_receiver`).
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from services.trainer.control_client import ControlClient
from services.trainer.weights.push_schedule import Target, lost_members
from shared.bus.bus_errors import RequestRefused
from shared.runtime.errors import MyxoError
from shared.schema.messages import Message

POLL_INTERVAL_S = 0.2
"""The interval at which the registry's statuses are compared with the members of a push."""

GRACE_SECONDS = 1.0
"""The time for which the others' answers are awaited once one has failed: they show which member broke the shared channel."""

ABSENCE_SECONDS = 3.0
"""The time for which nobody may listen for a replica that did before, or whose connection the bus's restart broke."""

OF_CHANNEL = ("ReceiverError", "")
"""The errors of a replica that another member of its channel may have caused; all others are its own."""

Answer = TypeVar("Answer", bound=Message)


class PeerFailure(MyxoError):
    """Some replicas failed a step of the push. ``failures``: instance → reason."""

    def __init__(self, step: str, failures: dict[str, str]) -> None:
        self.failures = failures
        super().__init__(f"{step}: " + "; ".join(f"{name}: {reason}" for name, reason in sorted(failures.items())))


class PushRequest(Generic[Answer]):
    """One request under way to several replicas.

    Args:
        verb: the last part of the replicas' subject. message: makes a member's request. seconds: the deadline.

    Attributes:
        members: the instances that are asked.
        answers: instance → its answer. errors: instance → its error, or why it counts as gone. Both grow until `done`.
        gone: the errors that come from the registry, not from the replica. own: those that have no other cause than the replica.
    """

    def __init__(
        self,
        link: ControlClient,
        members: Sequence[Target],
        verb: str,
        message: Callable[[Target], Message],
        reply: type[Answer],
        seconds: float,
    ) -> None:
        self.members = tuple(target.instance for target in members)
        self._link, self._verb, self._reply, self._seconds = link, verb, reply, seconds
        self.answers: dict[str, Answer] = {}
        self.errors: dict[str, str] = {}
        self.gone: dict[str, str] = {}
        self.own: dict[str, str] = {}
        self.done: Future[None] = link.begin(self._ask_all({target: message(target) for target in members}))

    def wait(self) -> dict[str, Answer]:
        """Returns the answers once all are there. Raises PeerFailure once one has failed, and the others have had a moment to answer."""
        self.done.result(self._seconds + 30)
        if self.errors:
            raise PeerFailure(self._verb, self.errors)
        return self.answers

    @property
    def missing(self) -> list[str]:
        """Returns the members whose answers are not there yet."""
        return [name for name in self.members if name not in self.answers and name not in self.errors]

    def settle(self) -> None:
        """Waits a moment for the errors of replicas whose shared channel broke, since their request will fail."""
        with contextlib.suppress(TimeoutError):
            self.done.result(GRACE_SECONDS)
        self.done.cancel()

    async def _ask_all(self, messages: dict[Target, Message]) -> None:
        tasks = {asyncio.create_task(self._ask(target, message)): target for target, message in messages.items()}
        end: float | None = None
        try:
            while (waiting := [task for task in tasks if not task.done()]) and (end is None or time.monotonic() < end):
                await asyncio.wait(waiting, timeout=POLL_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
                self.gone |= lost_members([target for task, target in tasks.items() if not task.done()], self._link.replicas)
                self.errors |= self.gone
                if self.errors and end is None:
                    end = time.monotonic() + GRACE_SECONDS
        finally:
            for task in tasks:
                task.cancel()

    async def _ask(self, target: Target, message: Message) -> None:
        service, started = self._link.service, time.monotonic()
        subject = service.subjects.replica_weights(target.instance, self._verb)
        try:
            self.answers[target.instance] = await service.bus.request(
                subject, message, self._reply, deadline=self._seconds, awaited_from=target.instance, absence=ABSENCE_SECONDS
            )
        except MyxoError as error:
            reason = self.errors[target.instance] = f"{error} ({time.monotonic() - started:.1f} s)"
            if isinstance(error, RequestRefused) and error.error not in OF_CHANNEL:
                self.own[target.instance] = reason


def watch_members(link: ControlClient, members: Sequence[Target]) -> Future[dict[str, str]]:
    """Returns a future of the members that are lost and why, done once there is one. Cancel it when it is no longer needed."""

    async def watched() -> dict[str, str]:
        while not (lost := lost_members(members, link.replicas)):
            await asyncio.sleep(POLL_INTERVAL_S)
        return lost

    return link.begin(watched())
