"""From which step on payloads stay in the store. Pure."""

from collections.abc import Collection


def kept_from(checkpoints: Collection[int], keep: int, last: int, *, room_needed: bool = False) -> int:
    """Returns the steps below which no checkpoint that is kept needs its batches: those of the oldest kept, so each can be resumed.

    Where the store is full, and at the run's end, they are the newest one's.

    Args:
        checkpoints: steps of those on disk. keep: how many of the newest stay. last: the run's steps. room_needed: the store is full.
    """
    newest = max(checkpoints, default=0)
    if room_needed or newest >= last:
        return newest
    return min(sorted(checkpoints)[-keep:], default=0)
