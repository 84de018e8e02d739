"""The bus side of a push, on the link's thread: one request to every member at once, and an eye on who is still alive meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from services.trainer.control_client import ControlClient
from services.trainer.weights.replicas import Target, is_gone
from shared.runtime.errors import MyxoError
from shared.schema.messages import Message

POLL_INTERVAL_S = 0.2
"""How often the registry's cards are compared with the members of a push."""

GRACE_SECONDS = 1.0
"""How long the others' answers are waited for once one has failed: they tell who broke what they had in common."""


class PeerFailure(MyxoError):
    """Some replicas failed a step of the push. ``failures``: instance → reason."""

    def __init__(self, step: str, failures: dict[str, str]) -> None:
        self.failures = failures
        super().__init__(f"{step}: " + "; ".join(f"{name}: {reason}" for name, reason in sorted(failures.items())))


class PushRequests:
    """Requests to replicas."""

    def __init__(self, link: ControlClient) -> None:
        self._link = link

    def each(
        self, members: Sequence[Target], verb: str, message: Callable[[Target], Message], reply: type[Message], seconds: float
    ) -> Asked:
        """Asks every member at once, in the background."""
        return Asked(self._link, members, verb, message, reply, seconds)

    def watch(self, members: Sequence[Target]) -> Future[dict[str, str]]:
        """Tells, once one of the members is gone, who and why. To be cancelled by whoever does not need to know any more."""

        async def look() -> dict[str, str]:
            while not (gone := gone_of(members, self._link)):
                await asyncio.sleep(POLL_INTERVAL_S)
            return gone

        return self._link.begin(look())


def gone_of(members: Sequence[Target], link: ControlClient) -> dict[str, str]:
    """Instance → why it counts as gone, by the registry."""
    cards = {card.instance: card for card in link.replicas}
    return {target.instance: reason for target in members if (reason := is_gone(target, cards)) is not None}


class Asked:
    """One request under way to several replicas.

    Attributes:
        answers: instance → its answer. errors: instance → what it said instead, or why it counts as gone. Both grow until `done`.
        gone: those of the errors that the registry told, not the replica.
    """

    def __init__(
        self,
        link: ControlClient,
        members: Sequence[Target],
        verb: str,
        message: Callable[[Target], Message],
        reply: type[Message],
        seconds: float,
    ) -> None:
        self.verb, self._link, self.members = verb, link, members
        self._message, self._reply, self._seconds = message, reply, seconds
        self.answers: dict[str, Message] = {}
        self.errors: dict[str, str] = {}
        self.gone: dict[str, str] = {}
        self.done: Future[None] = link.begin(self._ask_all())

    def wait(self) -> Asked:
        """Returns once all have answered well. Raises PeerFailure once one has failed, and the others have had a moment to answer."""
        self.done.result(self._seconds + 30)
        if self.errors:
            raise PeerFailure(self.verb, self.errors)
        return self

    def settle(self) -> None:
        """For a request that will fail, since what the replicas have in common broke: gives them a moment to say so."""
        with contextlib.suppress(TimeoutError):
            self.done.result(GRACE_SECONDS)
        self.done.cancel()

    async def _ask_all(self) -> None:
        tasks = [asyncio.create_task(self._ask(target)) for target in self.members]
        end: float | None = None
        try:
            while (waiting := [task for task in tasks if not task.done()]) and (end is None or time.monotonic() < end):
                await asyncio.wait(waiting, timeout=POLL_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
                gone = gone_of([target for target, task in zip(self.members, tasks, strict=True) if not task.done()], self._link)
                self.errors |= gone
                self.gone |= gone
                if self.errors and end is None:
                    end = time.monotonic() + GRACE_SECONDS
        finally:
            for task in tasks:
                task.cancel()

    async def _ask(self, target: Target) -> None:
        service = self._link.service
        subject = service.subjects.replica_weights(target.instance, self.verb)
        started = time.monotonic()
        try:
            answer = await service.bus.request(
                subject, self._message(target), self._reply, deadline=self._seconds, awaited_from=target.instance, patient=False
            )
            self.answers[target.instance] = answer
        except MyxoError as error:
            self.errors[target.instance] = f"{error} ({time.monotonic() - started:.1f} s)"
