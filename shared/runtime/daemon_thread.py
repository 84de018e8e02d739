"""Work that cannot be cancelled, on a thread that does not keep the process from ending."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Runs ``work`` on a daemon thread. Its waiter may leave it: an executor's thread that hangs would hold up the process's end."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return  # nobody waits any more
        try:
            future.set_result(work())
        except BaseException as error:  # whoever waits raises it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
