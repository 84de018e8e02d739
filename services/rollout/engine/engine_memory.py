"""Releases an engine's GPU memory while a trainer computes on the same GPU, and takes it again.

While asleep, nothing runs in the engine, new requests wait in its queue, and the requested parts are released. SGLang crashes if memory is
released while it holds a request, or if a token is generated without its memory: both are prevented here.
"""

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus

from services.rollout.engine.engine_errors import EngineError
from services.rollout.engine.transport import EngineTransport
from shared.runtime.errors import DeadlineExceeded

WEIGHTS, CACHE, GRAPHS = "weights", "kv_cache", "cuda_graph"
EVERYTHING = (CACHE, WEIGHTS, GRAPHS)
"""The parts that an engine launched with ``--enable-memory-saver`` can release, by SGLang's names."""

POLL_INTERVAL_S = 0.05


class EngineMemory:
    """The memory of one engine, as its client knows it.

    Args:
        running: how many groups its client waits for.
    """

    def __init__(self, transport: EngineTransport, running: Callable[[], int]) -> None:
        self._transport, self._running = transport, running
        self.asleep = False
        self.released: frozenset[str] = frozenset()

    async def sleep(self, release: Iterable[str], *, deadline: float) -> None:
        """Ends all requests, each of which returns to its caller with its partial output, and releases memory.

        Does nothing to an engine that is asleep and has released that much. The caller keeps new groups away meanwhile.

        Raises:
            DeadlineExceeded, EngineError, EngineUnreachable: the engine is in an unknown state and must be killed.
        """
        self.asleep = True
        try:
            async with asyncio.timeout(deadline):
                await self._end_requests(deadline)
                if wanted := [tag for tag in release if tag not in self.released]:
                    next_action = "it may have released some of its memory"
                    await self._transport.post("/release_memory_occupation", {"tags": wanted}, deadline, next_action)
                    self.released |= set(wanted)
        except TimeoutError:
            raise DeadlineExceeded("an idle engine", f"the engine at {self._transport.url}", deadline, "it should be ended") from None

    async def take_back(self, *tags: str, deadline: float) -> None:
        """Takes memory again for the released parts among ``tags``. The weights' memory then has no defined content, unless backed up.

        Raises as `sleep`.
        """
        if wanted := [tag for tag in tags if tag in self.released]:
            next_action = "it may have taken some of its memory"
            await self._transport.post("/resume_memory_occupation", {"tags": wanted}, deadline, next_action)
            self.released -= set(wanted)

    async def wake(self, *, deadline: float) -> None:
        """Takes all memory again and resumes generation. Raises as `sleep`."""
        await self.take_back(*EVERYTHING, deadline=deadline)
        self.asleep = False
        await self._transport.post("/continue_generation", {"torch_empty_cache": False}, deadline, "the engine may still be paused")

    async def _end_requests(self, deadline: float) -> None:
        """Returns once the engine holds no request: it refuses to flush its cache while it holds any."""
        while self._running():  # a request may still have been in transit
            await self._transport.post("/abort_request", {"abort_all": True}, deadline, "requests may go on")
            await asyncio.sleep(POLL_INTERVAL_S)
        # stops new requests, and ends those that others have sent: agents through a router
        await self._transport.post("/pause_generation", {"mode": "abort"}, deadline, "the engine may be paused or not")
        while True:
            try:
                await self._transport.post("/flush_cache", None, deadline, "nothing was changed")
                return
            except EngineError as error:
                if error.status != HTTPStatus.BAD_REQUEST:
                    raise
            await asyncio.sleep(POLL_INTERVAL_S)
