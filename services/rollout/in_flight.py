"""Tracks what the engine generates for training, and stops groups that will never be trained, or all of them when the replica leaves.

A group that is too old to be trained (`shared.schema.versions.is_lost`) is not generated to its end, since that would waste the engine.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from services.rollout.engine.engine_client import EngineClient
from services.rollout.partial_samples import Partial
from shared.config.run_config import RunConfig
from shared.runtime.errors import MyxoError
from shared.schema.versions import is_lost

LEAVE_SECONDS = 3.0
"""The time that a stopping replica waits for the engine to return its partial outputs."""

LEAVE_PAUSE = 0.1


class Stopped(MyxoError):
    """A group's generation was stopped because it is too old (``stale``), else because the replica leaves."""

    def __init__(self, group: str, stale: bool) -> None:
        self.stale = stale
        super().__init__(f"{group} was stopped {'for its age' if stale else 'because this replica leaves'}")


@dataclass(eq=False)
class Requests:
    """Requests that the engine holds together.

    Attributes:
        rids: their ids; a function of the user's sends new ones while it runs. stopped: set when they are to end. stale: why.
    """

    rids: set[str] = field(default_factory=set)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    stale: bool = False

    def stop(self, stale: bool) -> None:
        """Has them end with what they have."""
        self.stale |= stale
        self.stopped.set()


class InFlight:
    """The requests that the engine holds. A group may have two attempts among them: one whose lease expired, and its successor."""

    def __init__(self, config: RunConfig) -> None:
        self._max_staleness, self._policy = config.rollout.max_staleness, config.rollout.staleness_policy
        self._oldest: dict[Requests, int] = {}  # a group's requests → the version that its oldest token may be of
        self._sent: Counter[Requests] = Counter()  # how many of them are in the engine
        self.leaving = False

    @contextlib.contextmanager
    def asked(self, group: str, partials: Sequence[Partial], requests: "Requests", rid: str, version: int) -> Iterator[None]:
        """Registers, while the body runs, one more of a group's requests in the engine, which serves ``version``.

        Args:
            partials: all of the group's: with one of its samples, all of them are too old. rid: of the request.

        Raises Stopped where it must not be sent at all.
        """
        oldest = min([version, *(partial.segments[0][2] for partial in partials if partial.segments)])
        with self.tracked(group, requests, oldest, version):
            requests.rids.add(rid)
            try:
                yield
            finally:
                requests.rids.discard(rid)

    @contextlib.contextmanager
    def tracked(self, group: str, requests: "Requests", oldest: int, version: int) -> Iterator[None]:
        """Registers, while the body runs, requests of a group whose oldest token may be of version ``oldest``. Raises as `asked`.

        Where some of them are registered already, all are as old as the oldest: one that ends first leaves its tokens in the group.
        """
        lost = self._is_lost(oldest, version)
        if lost or self.leaving or requests.stopped.is_set():
            raise Stopped(group, stale=lost or requests.stale)
        self._oldest[requests] = min(oldest, self._oldest.get(requests, oldest))
        self._sent[requests] += 1
        try:
            yield
        finally:
            self._sent[requests] -= 1
            if not self._sent[requests]:
                del self._oldest[requests], self._sent[requests]

    async def stop_stale(self, client: EngineClient, version: int) -> None:
        """Has the engine abort the requests that are stale once ``version`` is served. Raises as `EngineClient.abort`."""
        stale = [requests for requests, oldest in self._oldest.items() if self._is_lost(oldest, version)]
        for requests in stale:
            requests.stop(stale=True)
        if rids := [rid for requests in stale for rid in requests.rids]:
            await client.abort(rids)

    async def leave(self, client: EngineClient | None) -> None:
        """Has the engine abort all requests; returns once it has, or after `LEAVE_SECONDS`."""
        self.leaving = True
        for requests in self._oldest:
            requests.stop(stale=False)
        with contextlib.suppress(TimeoutError, MyxoError):
            async with asyncio.timeout(LEAVE_SECONDS):
                while self._oldest and client is not None:
                    await client.abort_all()
                    await asyncio.sleep(LEAVE_PAUSE)  # a request may still have been in transit

    def _is_lost(self, oldest: int, version: int) -> bool:
        return is_lost(oldest, version, self._max_staleness, self._policy)
