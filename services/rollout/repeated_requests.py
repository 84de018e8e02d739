"""Requests that are sent again, since a connection broke and the first or its answer was lost."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from shared.schema.messages import Message

Request = TypeVar("Request", bound=Message)


class AnsweredOnce(Generic[Request]):
    """A handler's way to take each request once: one that equals the one before is that request, sent again, and gets the same outcome.

    Requests that may be sent again must differ from all others: those of a push have its number or its remaining time in them.
    """

    def __init__(self, handler: Callable[[Request], Awaitable[Message]]) -> None:
        self._handler = handler
        self._request: Request | None = None
        self._handling: asyncio.Future[Message] | None = None

    async def __call__(self, request: Request) -> Message:
        """Returns the handler's answer to the request, or raises its error; waits for it where it is being handled."""
        if self._handling is None or request != self._request:
            self._request, self._handling = request, asyncio.ensure_future(self._handler(request))
        return await asyncio.shield(self._handling)
