"""Buffer filters for tests."""

import threading
from typing import Any

from shared.hooks import HookSample

CALLS: list[int] = []
GO_ON = threading.Event()


def newest_first(args: Any, rollout_id: int, buffer: list[list[HookSample]], num: int) -> list[list[HookSample]]:
    """The groups admitted last. Takes them out of the buffer, as slime's filters do."""
    assert args.rollout_batch_size == num
    buffer.sort(key=lambda group: group[0].group_index or 0)
    return [buffer.pop() for _ in range(num)]


def by_number(args: Any, rollout_id: int, buffer: list[list[HookSample]], num: int) -> list[list[HookSample]]:
    """Waits with two groups, gives the first one over and over with three, raises with four, and chooses with five."""
    if len(buffer) == 4:
        raise RuntimeError(f"no idea for step {rollout_id}")
    return [buffer[0]] * num if len(buffer) == 3 else buffer[1 : num + 1] if len(buffer) > 4 else []


def held_up(args: Any, rollout_id: int, buffer: list[list[HookSample]], num: int) -> list[list[HookSample]]:
    """Counts its calls, waits for `GO_ON`, and raises."""
    CALLS.append(rollout_id)
    GO_ON.wait(60)
    raise RuntimeError("out of ideas")
