"""The streams on which the engine computes, so that loading can wait for the step under way, and for nothing else on the device."""

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

log = logging.getLogger(__name__)

FORWARD_STREAM = "forward_stream"
"""The scheduler's attribute by which it is known: the stream of its forward passes, which wait for all others that they use."""


def computing_streams() -> Callable[[], list[torch.cuda.Stream]] | None:
    """Returns a function that returns the streams of the scheduler that has called, however indirectly; None where there is none."""
    scheduler = next((owner for owner in _callers() if isinstance(getattr(owner, FORWARD_STREAM, None), torch.cuda.Stream)), None)
    if scheduler is None:
        log.warning("this engine's scheduler has no %s: pushes begin once it is paused", FORWARD_STREAM)
        return None
    return lambda: [value for value in vars(scheduler).values() if isinstance(value, torch.cuda.Stream)]


def _callers() -> Iterator[Any]:
    """Yields the objects whose methods are under way on this thread, from the innermost outwards."""
    frame = sys._getframe(1)
    while frame is not None:
        if (owner := frame.f_locals.get("self")) is not None:
            yield owner
        frame = frame.f_back  # type: ignore[assignment]
