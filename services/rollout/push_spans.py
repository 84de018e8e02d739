"""The spans of a replica's part in pushes of weights: one for each request of the trainer's, in the trace of its push."""

import functools
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shared.runtime.traces import Attributes, Traces, TraceSpan, push_trace
from shared.schema.messages import Message
from shared.schema.weight_messages import WeightsAbort, WeightsCommit, WeightsPrepare, WeightsReceive, WeightsReceived

PushStep = WeightsPrepare | WeightsReceive | WeightsCommit | WeightsAbort

Request = TypeVar("Request", WeightsPrepare, WeightsReceive, WeightsCommit, WeightsAbort)


class PushSpans:
    """Adds a span for each request that a handler answers, or fails to. A commit and an abort belong to the push that came before them."""

    def __init__(self, traces: Traces, replica: str) -> None:
        self._traces, self._replica, self._push = traces, replica, ""

    def around(self, name: str, handler: Callable[[Request], Awaitable[Message]]) -> Callable[[Request], Awaitable[Message]]:
        """Returns the handler, with a span called ``name`` around it."""
        if not self._traces.on:
            return handler

        @functools.wraps(handler)
        async def noted(request: Request) -> Message:
            started, answer, error = time.time(), None, ""
            try:
                answer = await handler(request)
                return answer
            except BaseException as raised:
                error = str(raised) or type(raised).__name__
                raise
            finally:
                self._note(name, request, answer, error, started)

        return noted

    def _note(self, name: str, request: PushStep, answer: Message | None, error: str, started: float) -> None:
        match request:
            case WeightsPrepare(version=version, channels=[first, *_]):
                self._push = push_trace(version, first.name)
            case WeightsReceive(version=version, channels=[first, *_]):
                self._push = push_trace(version, first)
        if self._push:
            attributes: Attributes = {"version": request.version, "replica": self._replica}
            attributes |= {"bytes": answer.bytes, "digest": answer.digest} if isinstance(answer, WeightsReceived) else {}
            self._traces.add(TraceSpan(trace=self._push, name=name, started=started, ended=time.time(), error=error, attributes=attributes))
