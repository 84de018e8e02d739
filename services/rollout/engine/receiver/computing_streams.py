"""The streams on which the engine computes, so that loading can wait for the step under way, and for nothing else on the device."""

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

log = logging.getLogger(__name__)

FORWARD_STREAM = "forward_stream"
"""The scheduler's attribute by which it is known: the stream of its forward passes, which wait for all others that they use."""


def calling_scheduler() -> Any:
    """Returns the scheduler that has called, however indirectly; None where there is none."""
    found = next((owner for owner in _callers() if hasattr(owner, FORWARD_STREAM) and hasattr(owner, "process_input_requests")), None)
    if found is None:
        log.warning("no scheduler with a %s has called: pushes begin once the engine is paused", FORWARD_STREAM)
    return found


def computing_streams(scheduler: Any) -> Callable[[], list[torch.cuda.Stream]] | None:
    """Returns a function that returns a scheduler's streams; None where that of its forward passes is not among them."""
    if not isinstance(getattr(scheduler, FORWARD_STREAM, None), torch.cuda.Stream):
        return None
    return lambda: [value for value in vars(scheduler).values() if isinstance(value, torch.cuda.Stream)]


def _callers() -> Iterator[Any]:
    """Yields the objects whose methods are under way on this thread, from the innermost outwards."""
    frame = sys._getframe(1)
    while frame is not None:
        if (owner := frame.f_locals.get("self")) is not None:
            yield owner
        frame = frame.f_back  # type: ignore[assignment]
