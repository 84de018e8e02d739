"""Filters of scored groups: the decision of a dynamic sampling filter, and the built-in filters."""

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.hooks.hook_sample import HookSample


@dataclass
class DynamicFilterOutput:
    """The decision whether to keep a group; if it is not kept, counters show it under ``reason``.

    keep_when_insufficient: keep it all the same where no groups are under way beyond those that a batch needs.
    """

    keep: Any
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **keywords: Any) -> DynamicFilterOutput:
    """Returns the decision of a dynamic filter, which may be a bare truth value; without a filter a group is kept."""
    output = DynamicFilterOutput(True) if fn is None else fn(*args, **keywords)
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(output)


def should_drop_dynamic_filter_output(output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int) -> bool:
    """Returns whether a group is dropped: not where the filter would rather have it than one more, and no others are left."""
    return not output.keep and not (output.keep_when_insufficient and remaining_batch_size <= target_data_size)


class MetricGatherer:
    """Counts dropped groups by reason."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Counts one; without a reason none is counted."""
        if reason:
            self._dropped[reason] += 1

    def collect(self) -> dict[str, int]:
        """Returns the counts under the names of metrics."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._dropped.items()}


def nonzero_std(args: Any, group: list[HookSample], **_: Any) -> DynamicFilterOutput:
    """Keeps a group unless its rewards are all equal, within each role where there are roles, which gives zero advantages."""
    rewards = {(getattr(sample, "role", ""), sample.get_reward_value(args)) for sample in group}
    if len(rewards) > len({role for role, _ in rewards}):
        return DynamicFilterOutput(True)
    return DynamicFilterOutput(False, f"zero_std_{round(min(reward for _, reward in rewards), 1):g}")


def check_reward_nonzero_std(args: Any, samples: list[HookSample], **_: Any) -> DynamicFilterOutput:
    """Keeps a group whose rewards deviate by more than 1e-6 (slime's filter): none of a single sample."""
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    keep = len(rewards) > 1 and statistics.stdev(rewards) > 1e-6
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: list[HookSample], **more: Any) -> DynamicFilterOutput:
    """As `check_reward_nonzero_std`, but rather a group of equal rewards than one more to generate."""
    output = check_reward_nonzero_std(args, samples, **more)
    output.keep_when_insufficient = True
    return output


BUILT_IN: dict[str, Callable[..., DynamicFilterOutput]] = {"nonzero_std": nonzero_std}
"""The built-in filters by the name that the config gives in place of a path."""
