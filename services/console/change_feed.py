"""Tells browsers which page's data has changed, as server-sent events (WHATWG HTML, section 9.2)."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

OVERVIEW, RUN, FLOW, WEIGHTS, SAMPLES, HEALTH = PAGES = ("overview", "run", "flow", "weights", "samples", "health")
"""What the feed tells of: the pages, and what stands above them all."""

PAUSE_SECONDS = 1.0
"""The least time between two events of one browser."""

HEARTBEAT_SECONDS = 5.0


class ChangeFeed:
    """A revision for each page, which grows when the page's data has changed.

    It begins with the time: browsers that were connected to an earlier life of the console see that all has changed.
    """

    def __init__(self) -> None:
        self.revisions = dict.fromkeys(PAGES, int(time.time() * 1000))
        self._changed = asyncio.Event()

    def touch(self, *pages: str) -> None:
        """Notes that the data of ``pages`` has changed."""
        for page in pages:
            self.revisions[page] += 1
        if pages:
            self._changed.set()
            self._changed = asyncio.Event()

    async def events(self) -> AsyncIterator[str]:
        """Yields the events of one browser, until it is closed: all revisions first, then those that have changed, and heartbeats."""
        sent: dict[str, int] = {}
        while True:
            changed = self._changed
            new = {page: revision for page, revision in self.revisions.items() if sent.get(page) != revision}
            if new:
                sent |= new
                yield f"data: {json.dumps(new)}\n\n"
                await asyncio.sleep(PAUSE_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await changed.wait()
                continue
            yield "event: heartbeat\ndata: {}\n\n"
