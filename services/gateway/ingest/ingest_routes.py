"""``POST /groups`` and ``GET /groups``: who may hand groups in, and how long a body may be. What becomes of a group: `group_intake`."""

import hmac
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from services.gateway.bounded_body import bounded_body
from services.gateway.ingest.group_intake import RETRY_S, GroupIntake
from services.gateway.wire.turn_refused import TurnRefused
from shared.runtime.errors import MyxoError


def add_ingest_routes(app: FastAPI, intake: GroupIntake, key: str, most_bytes: int) -> None:
    """Adds the routes for groups from outside to a gateway's. ``most_bytes``: of a body."""
    digest = sha256(key.encode()).digest()

    async def describe(request: Request) -> JSONResponse:
        return await _answered(request, digest, intake.described)

    async def take(request: Request) -> JSONResponse:
        return await _answered(request, digest, lambda: intake.take(lambda: bounded_body(request, most_bytes)))

    app.add_api_route("/groups", describe, methods=["GET"])
    app.add_api_route("/groups", take, methods=["POST"])


async def _answered(request: Request, digest: bytes, answer: Callable[[], Awaitable[Any]]) -> JSONResponse:
    try:
        _check_key(request.headers.get("authorization", ""), digest)
        return JSONResponse(await answer())
    except TurnRefused as refused:
        error = refused
    except MyxoError as away:
        error = TurnRefused(503, str(away), code="unavailable", retry_after_s=RETRY_S)
    return JSONResponse(error.body("openai"), error.status, headers=dict(error.headers))


def _check_key(header: str, digest: bytes) -> None:
    """Raises TurnRefused where the header does not hold the producers' key; that is compared in constant time."""
    scheme, _, given = header.partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(sha256(given.strip().encode()).digest(), digest):
        raise TurnRefused(401, "expected the key of those who hand groups in, as Authorization: Bearer KEY", code="invalid_api_key")
