"""A thread for calls that a dead peer may leave hanging: such a call is left behind, and the next one goes on without it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


class CollectiveThread:
    """Runs calls one after another, apart from whoever waits for them.

    A daemon thread, not an executor's: the interpreter waits for those at its end, however long they hang.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Has ``work`` called when all earlier calls are done; the future gets what it returns or raises."""
        future: Future[Result] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name=self._name, daemon=True).start()
        self._calls.put(call)
        return future

    def abandon(self) -> None:
        """Leaves the present call, and those behind it, to end by themselves; later ones get a thread of their own."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
