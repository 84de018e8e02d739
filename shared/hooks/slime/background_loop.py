"""``slime.utils.async_utils``: runs coroutines from code that is not async."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from shared.runtime.tasks import run_in_thread


class BackgroundLoop:
    """An event loop in a thread of its own, which lives as long as the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        run_in_thread(self.loop.run_forever, "slime-async-utils")

    def run(self, coro: Coroutine[Any, Any, Any]) -> Any:
        """Returns the coroutine's result; the calling thread waits for it."""
        return asyncio.run_coroutine_threadsafe(coro, self.loop).result()


_lock = threading.Lock()
_background: BackgroundLoop | None = None


def get_async_loop() -> BackgroundLoop:
    """Returns the process's one loop for such coroutines."""
    global _background
    with _lock:
        if _background is None:
            _background = BackgroundLoop()
        return _background


def run(coro: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of a coroutine that runs on the background loop."""
    return get_async_loop().run(coro)
