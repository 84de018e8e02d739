"""A span as services note it, once it is over, and the ids that its trace has in every service. Pure."""

import hashlib
from dataclasses import dataclass, field

Attributes = dict[str, str | bool | int | float | list[float] | None]
"""What a span says of itself; None is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """Something that began and ended: in the trace of a group, a training step or a push.

    ``trace``: the trace's name: a group's id, or as `step_trace` and `push_trace` say. ``started``, ``ended``: seconds since the epoch.
    ``root``: it stands for the whole trace, which has one; all other spans are its children. ``error``: why it failed; empty: it did not.
    ``links``: names of other traces. ``events``: (name, seconds since the epoch).
    """

    trace: str
    name: str
    started: float
    ended: float
    root: bool = False
    error: str = ""
    links: tuple[str, ...] = ()
    events: tuple[tuple[str, float], ...] = ()
    attributes: Attributes = field(default_factory=dict)


def step_trace(step: int) -> str:
    """Returns the name of the trace of a training step."""
    return f"step {step}"


def push_trace(version: int, channel: str) -> str:
    """Returns the name of the trace of a push. ``channel``: the name of one of its channels, which are made anew after every failure."""
    return f"push {version} {channel}"


def trace_ids(life: str, trace: str) -> tuple[int, int]:
    """Returns a trace's id (128 bits) and that of its root span (64 bits), the same in all services.

    ``life``: what one life of a run has for itself: a run that begins anew under its name has new traces.
    """
    digest = hashlib.blake2b(f"{life}\n{trace}".encode(errors="backslashreplace"), digest_size=24).digest()
    return int.from_bytes(digest[:16]), int.from_bytes(digest[16:])
