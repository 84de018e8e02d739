"""Decides by which id a request's turn is known: asked again for the same, it is the same turn. It is pure.

A client may name its requests (`Idempotency-Key` or `X-Request-Id`); another body under the same name is another request. The houses' own
SDKs do not, but they count the repetitions of a request in `X-Stainless-Retry-Count`: one that is repeated is the newest request of the
session with the very same body.
"""

import hashlib
import uuid
from collections.abc import Mapping

from shared.sessions.session import SessionLog

NAMES = ("idempotency-key", "x-request-id")
RETRY_HEADER = "x-stainless-retry-count"


def request_id(log: SessionLog, prefix: str, path: str, headers: Mapping[str, str], body: bytes) -> str:
    """Returns the id of a request's turn. ``prefix``: how the format's ids begin. ``headers``: by names in lower case."""
    for name in NAMES:
        if given := headers.get(name):
            return prefix + _digest(log.session.id, given, path, body)
    base = f"{prefix}{_digest(path, body)}"
    if headers.get(RETRY_HEADER, "0") not in ("", "0"):
        known = [request for request in [*log.turns, *log.pending] if request.startswith(base)]
        if known:
            return known[-1]
    return base + uuid.uuid4().hex[:8]


def _digest(*parts: str | bytes) -> str:
    found = hashlib.blake2b(digest_size=12)
    for part in parts:
        found.update((part.encode(errors="replace") if isinstance(part, str) else part) + b"\x00")
    return found.hexdigest()
