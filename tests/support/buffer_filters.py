"""Buffer filters for tests."""

from typing import Any

from shared.hooks import HookSample


def newest_first(args: Any, rollout_id: int, buffer: list[list[HookSample]], num: int) -> list[list[HookSample]]:
    """The groups admitted last. Takes them out of the buffer, as slime's filters do."""
    assert args.rollout_batch_size == num
    buffer.sort(key=lambda group: group[0].group_index or 0)
    return [buffer.pop() for _ in range(num)]


def patient(args: Any, rollout_id: int, buffer: list[list[HookSample]], num: int) -> list[list[HookSample]]:
    """Waits until one group more than a batch is ready."""
    return buffer[1 : num + 1] if len(buffer) > num else []


def made_up(args: Any, rollout_id: int, buffer: list[list[HookSample]], num: int) -> list[list[HookSample]]:
    """The first group, over and over."""
    return [buffer[0]] * num


def broken(args: Any, rollout_id: int, buffer: list[list[HookSample]], num: int) -> list[list[HookSample]]:
    raise RuntimeError(f"no idea for step {rollout_id}")
