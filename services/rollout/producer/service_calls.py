"""The producer process's calls to the service that started it, over its pipes: made by any thread, answered in any order."""

import itertools
import os
import threading
from concurrent.futures import Future
from typing import Any

from shared.process.frames import FrameStream
from shared.runtime.errors import MyxoError
from shared.runtime.tasks import run_in_thread


class CallRefused(MyxoError):
    """The service does not do what it was asked for; the text says why."""


class ServiceCalls:
    """The process's end of the pipes. It ends with the service: whoever is left to wait for an answer would wait for ever."""

    def __init__(self, channel: FrameStream) -> None:
        self._channel, self._sending, self._ids = channel, threading.Lock(), itertools.count(1)
        self._open: dict[int, Future[dict[str, Any]]] = {}
        run_in_thread(self._receive, "producer-answers")

    def call(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Returns the service's answer, which keeps its own deadline. Raises CallRefused."""
        call_id, answer = next(self._ids), Future[dict[str, Any]]()
        self._open[call_id] = answer
        with self._sending:
            self._channel.send([call_id, {"verb": verb, **fields}])
        given = answer.result()
        if "refused" in given:
            raise CallRefused(str(given["refused"]))
        return given

    def _receive(self) -> None:
        try:
            while True:
                call_id, answer = self._channel.receive()
                self._open.pop(call_id).set_result(answer)
        finally:
            os._exit(0)
