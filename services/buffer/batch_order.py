"""Decides the order in which groups are trained: which of the ready ones a batch may take now.

``completion``: those that came back first. ``fifo``: the groups admitted first; ready groups wait for them. ``windowed_fifo``: those that
came back first among the ``window`` numbers from the oldest unbatched group on; so at most ``window`` − 1 groups overtake it.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Literal

from services.buffer.state import GroupState

Order = Literal["completion", "windowed_fifo", "fifo"]


def choose(order: Order, window: int, size: int, groups: Iterable[GroupState], fitting: list[GroupState]) -> list[GroupState]:
    """Returns the next batch's groups, or too few of them where it has to wait.

    Args:
        window: numbers that ``windowed_fifo`` looks ahead. size: groups of a batch. groups: all in flight, in order of admission.
        fitting: those of them that are ready and within the bound, in the order they came back.
    """
    if order == "completion" or len(fitting) < size:
        return fitting[:size]
    first = [group.number for group in islice((group for group in groups if group.step is None), size)]  # in no batch yet
    # never fewer than a batch, even if groups have left the window: it would wait for ever
    last = first[-1] if order == "fifo" else max(first[-1], first[0] + window - 1)
    return [group for group in fitting if group.number <= last][:size]
