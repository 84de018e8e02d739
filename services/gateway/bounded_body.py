"""Reads the body of a request, no more of it and no longer than is good for the others."""

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from services.gateway.wire.turn_refused import TurnRefused

BODY_SECONDS = 60.0
"""The time that a body has to come."""


async def bounded_body(request: Request, most_bytes: int, seconds: float = BODY_SECONDS) -> bytes:
    """Returns a request's body. Raises TurnRefused where it is too large, does not come, or its client is gone."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > most_bytes:
                    raise TurnRefused(413, f"expected a body of at most {most_bytes} bytes", code="too_large")
    except ClientDisconnect:
        raise TurnRefused(408, "the client is gone") from None
    except TimeoutError:
        raise TurnRefused(408, f"the body did not come within {seconds:g} s") from None
    return bytes(body)
