"""The parallel groups of FSDP2: all ranks hold shards of one model, and train on samples of their own."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from shared.model.parallel_layout import ParallelLayout


def form(layout: ParallelLayout, timeout_seconds: float) -> None:
    """Does nothing: the world's own group is the one."""


def leave() -> None:
    """Does nothing."""


def seed(seed: int) -> None:
    """Does nothing: there are no streams but PyTorch's own."""


def random_states() -> dict[str, Any]:
    return {}


def set_random_states(states: Mapping[str, Any]) -> None:
    """Does nothing."""


def data_parallel() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
