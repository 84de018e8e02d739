"""The errors of the control plane, those of them that are retried, and the pause between attempts."""

import asyncio
import functools
import re
import ssl

import nats.errors
import nats.js.errors
import structlog

from shared.runtime import addresses
from shared.runtime.errors import MyxoError, ServerUnreachable

ATTEMPT_SECONDS = 3.0  # The seconds that one attempt at a publish or request may take before the next one, within the caller's deadline
UNCONFIRMED_ATTEMPTS = 3  # A publish that so many attempts in a row of a connected client have not brought to its stream waits for room
RETRY_PAUSE = 0.2  # Seconds between attempts
WRONG_LAST_SEQUENCE = {10071, 10164}
# The codes with which the server refuses a message because the stream, or what the server may store at all, is full
STREAM_FULL = {10023, 10047, 10077, 10122}

# errors that the client sees from a restarting server, a lost connection or a stream that is still being recovered
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

BUS_ERRORS = (MyxoError, nats.errors.Error, *TRANSIENT)  # What a bus that is away, or that refuses, raises


class StreamFull(MyxoError):
    """A stream has reached its limit, or the server that of its storage: it takes a message once there is room for it."""


class Unconfirmed(nats.errors.TimeoutError):
    """The bus is connected and confirms a message not, again and again: a stream whose disk was full takes none until its server is started
    again, and says nothing to those who publish."""


class BusUnreachable(ServerUnreachable):
    """No NATS server with JetStream answers at the URL, or it does not let this client in."""


class NotPermitted(MyxoError):
    """The NATS server refuses this client a subject that its account has no permission for."""


class WrongSequence(MyxoError):
    """The stream's last sequence is not the one that this writer expected: another writer is active, and this one must stop."""


class RequestRefused(MyxoError):
    """The receiver answered a request with a refusal and its reason. ``error``: the class of the receiver's error; empty if not given."""

    error = ""


def full_reason(error: Exception) -> str:
    """Returns why there is no room, where the server refuses a message for that; else nothing."""
    if getattr(error, "err_code", None) in STREAM_FULL:  # not all of the library's errors of its API have one
        return f"the bus is full ({getattr(error, 'description', 'no reason is given')})"
    return "the bus confirms nothing although it is connected, as where its disk is full" if isinstance(error, Unconfirmed) else ""


def hopeless_reason(error: Exception) -> str | None:
    """Returns why connecting again will not help; None if it may."""
    if isinstance(error, nats.errors.AuthorizationError) or "authorization violation" in str(error).lower():
        return "authorization violation: it does not take these credentials"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); name the authority's file in {addresses.CA_VARIABLE}"
    return None


@functools.lru_cache(maxsize=256)
def warn_unreadable(key: str, revision: object, error: str, next_action: str) -> None:
    """Logs that a value in KV is not what belongs there, once for each revision, or value, of it."""
    structlog.get_logger().warning("value_unreadable", key=key, error=error, next_action=next_action)


@functools.lru_cache(maxsize=8)
def redacted(url: str) -> str:
    """Returns a URL without its credentials, for logs and errors."""
    return ",".join(re.sub(r"^(.*//)?.*@", r"\1", part) for part in url.split(","))
