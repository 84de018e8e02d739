"""What a worker process knows of the call that it is answering, in whichever task of it: code of the user's may start tasks of its own."""

from contextvars import ContextVar
from dataclasses import dataclass

CALL_HEADER = "X-Myxo-Call"
"""The header by which the door to an engine knows the call that a request belongs to, so that its requests can be ended."""


@dataclass
class CallContext:
    """One call of a generate function.

    Attributes:
        token: names it to the engine's door. engine: ``host:port`` of this. end: `time.monotonic` at which the call is late.
    """

    token: str
    engine: str
    end: float


current_call: ContextVar[CallContext | None] = ContextVar("current_call", default=None)
