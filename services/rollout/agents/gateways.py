"""Finds a gateway for each session among those that are alive by the registry, one after the other."""

import asyncio
from collections.abc import Sequence

from shared.runtime.errors import DeadlineExceeded
from shared.service.service_base import Service

GATEWAY = "gateway"

WAIT_SECONDS = 60.0
"""The time that a session waits for a gateway: one that died is being restarted."""

POLL_INTERVAL_S = 0.5

KNOWN_SECONDS = 2.0
"""The time for which what the registry said is taken for true: hundreds of sessions may begin at once."""


class Gateways:
    """The gateways of a run."""

    def __init__(self, service: Service) -> None:
        self._service, self._lock = service, asyncio.Lock()
        self._known: Sequence[str] = ()
        self._known_until, self._given = 0.0, 0

    async def base_url(self) -> str:
        """Returns the base URL for the next session, as OpenAI's clients take it. Raises DeadlineExceeded without a gateway."""
        async with self._lock:
            end = asyncio.get_running_loop().time() + WAIT_SECONDS
            while not (urls := await self._urls()):
                if asyncio.get_running_loop().time() > end:
                    raise DeadlineExceeded("a gateway", "the registry", WAIT_SECONDS, "the group goes back to the queue")
                await asyncio.sleep(POLL_INTERVAL_S)
        self._given += 1
        return f"{urls[self._given % len(urls)]}/v1"

    async def _urls(self) -> Sequence[str]:
        now = asyncio.get_running_loop().time()
        if not self._known or now > self._known_until:
            statuses = await self._service.registry.alive(GATEWAY)
            self._known = [status.engine for status in statuses if status.engine and status.state == "ready"]
            self._known_until = now + KNOWN_SECONDS
        return self._known
