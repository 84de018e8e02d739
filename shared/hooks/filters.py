"""Filters of scored groups: the decision of a dynamic sampling filter, and the built-in filters."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.hooks.hook_sample import HookSample


@dataclass(frozen=True)
class DynamicFilterOutput:
    """The decision whether to keep a group; if it is not kept, counters show it under ``reason``."""

    keep: bool
    reason: str | None = None


def nonzero_std(args: Any, group: list[HookSample], **_: Any) -> DynamicFilterOutput:
    """Keeps a group unless its rewards are all equal, which gives zero advantages."""
    rewards = {sample.get_reward_value(args) for sample in group}
    if len(rewards) > 1:
        return DynamicFilterOutput(True)
    return DynamicFilterOutput(False, f"zero_std_{round(rewards.pop(), 1):g}")


BUILT_IN: dict[str, Callable[..., DynamicFilterOutput]] = {"nonzero_std": nonzero_std}
"""The built-in filters by the name that the config gives in place of a path."""
