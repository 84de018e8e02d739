"""What can go wrong on the control plane, what of it is worth another try, and how tries are spaced."""

from __future__ import annotations

import asyncio

import nats.errors
import nats.js.errors

from shared.runtime.errors import MyxoError

ATTEMPT_SECONDS = 3.0
"""How long one try of a publish or request may take before it is tried again within the caller's deadline."""

RETRY_PAUSE = 0.2
"""Seconds between tries."""

WRONG_LAST_SEQUENCE = {10071, 10164}
STREAM_FULL = {10047, 10077, 10122}
"""Codes that the server refuses a message with."""

# what a restarting server, a lost link or a stream that is still being recovered looks like to the client
TRANSIENT = (
    nats.errors.TimeoutError,
    nats.errors.NoRespondersError,
    nats.errors.ConnectionClosedError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.StaleConnectionError,
    nats.errors.OutboundBufferLimitError,
    nats.js.errors.NoStreamResponseError,
    nats.js.errors.ServiceUnavailableError,
    asyncio.TimeoutError,
    ConnectionError,
)


class BusUnreachable(MyxoError):
    """No NATS server with JetStream answers at the URL, or it does not let this client in."""


class NotPermitted(MyxoError):
    """The NATS server refuses this client a subject: its account does not have it."""


class WrongSequence(MyxoError):
    """The stream has moved on since this writer last looked: another writer is active, this one must stop."""


class RequestRefused(MyxoError):
    """The other side answered a request with a reason not to do it."""
