"""Functions that the objective's functions import from slime: ``backends.megatron_utils.cp_utils`` and ``rollout.on_policy_distillation``.

Here a function of the objective always gets whole responses, whatever the layout, and gives whole ones back: under context parallelism
there is nothing to gather or to cut. In distillation there is no reward but the log-probs of the teacher, which the rollout services ask.
"""

from collections.abc import Sized
from typing import Any, TypeVar

_Values = TypeVar("_Values", bound=Sized)


def all_gather_with_cp(tensor: _Values, total_length: int, response_length: int) -> _Values:
    """Returns the values of a whole response, [response_length]: those given. Raises ValueError for another length."""
    return _whole(tensor, response_length)


def slice_log_prob_with_cp(log_prob: _Values, total_length: int, response_length: int) -> _Values:
    """Returns what a function hands back of a whole response, [response_length]: all of it. Raises ValueError for another length."""
    return _whole(log_prob, response_length)


def _whole(values: _Values, response_length: int) -> _Values:
    if len(values) != response_length:
        raise ValueError(f"{len(values)} values for a response of {response_length} tokens")
    return values


async def reward_func(args: Any, sample: Any, **keywords: Any) -> float:
    """Returns 0."""
    return 0.0


def post_process_rewards(args: Any, samples: list[Any], **keywords: Any) -> tuple[list[float], list[float]]:
    """Returns raw rewards and rewards, 0 for each sample."""
    return [0.0] * len(samples), [0.0] * len(samples)
