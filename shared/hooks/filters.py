"""Filters of scored groups: what a dynamic sampling filter decides, and those that come with Myxo."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.hooks.hook_sample import HookSample


@dataclass(frozen=True)
class DynamicFilterOutput:
    """Whether a group is kept; where it is not, ``reason`` names why in counters."""

    keep: bool
    reason: str | None = None


def nonzero_std(args: Any, group: list[HookSample], **_: Any) -> DynamicFilterOutput:
    """Keeps a group unless its rewards are all equal: compared with each other, they teach nothing."""
    rewards = {sample.get_reward_value(args) for sample in group}
    if len(rewards) > 1:
        return DynamicFilterOutput(True)
    return DynamicFilterOutput(False, f"zero_std_{round(rewards.pop(), 1):g}")


BUILT_IN: dict[str, Callable[..., DynamicFilterOutput]] = {"nonzero_std": nonzero_std}
"""By the name that the config gives in place of a path."""
