"""The parallel groups of FSDP2: all ranks hold shards of one model. Ranks that share matrices (tensor parallelism) are next to one another,
those that share sequences (context parallelism) lie around them; both train on the same samples. Ranks that share experts are neighbours.
"""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shared.model.parallel_layout import ParallelLayout

_made: dict[str, dist.ProcessGroup] = {}


def form(layout: ParallelLayout, timeout_seconds: float) -> None:
    """Forms the groups of more than one rank, ``tensor``, ``context``, ``batch`` (both) and ``expert``, and that of ``data``."""
    world, tensor, both = dist.get_world_size(), layout.tensor, layout.tensor * layout.context
    wanted = {
        "tensor": [range(first, first + tensor) for first in range(0, world, tensor)],
        "context": [range(block + own, block + both, tensor) for block in range(0, world, both) for own in range(tensor)],
        "batch": [range(first, first + both) for first in range(0, world, both)],
        "expert": [range(first, first + layout.expert) for first in range(0, world, layout.expert)],
        "data": [range(own, world, both) for own in range(both)],
    }
    for name, lists in wanted.items():
        if len(lists[0]) > 1 if name != "data" else both > 1:
            _form(name, lists, timedelta(seconds=timeout_seconds))


def _form(name: str, lists: Iterable[Iterable[int]], timeout: timedelta) -> None:
    for ranks in lists:
        group = dist.new_group(list(ranks), timeout=timeout)
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            _made[name] = group


def leave() -> None:
    """Ends the groups."""
    for group in _made.values():
        dist.destroy_process_group(group)
    _made.clear()


def group(name: str) -> dist.ProcessGroup | None:
    """Returns this rank's group of a kind; None where it is alone."""
    return _made.get(name)


def seed(seed: int) -> None:
    """Does nothing: there are no streams but PyTorch's own."""


def random_states() -> dict[str, Any]:
    return {}


def set_random_states(states: Mapping[str, Any]) -> None:
    """Does nothing."""


def data_parallel() -> dist.ProcessGroup:
    found = _made.get("data", dist.group.WORLD)
    assert found is not None
    return found
