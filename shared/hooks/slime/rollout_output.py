"""``slime.rollout.base_types``: what a rollout function returns."""

from dataclasses import dataclass
from typing import Any

from shared.hooks.hook_sample import HookSample


@dataclass
class RolloutFnTrainOutput:
    """The groups of a training step, each a list of samples, or of lists of samples where rollouts fan out; and metrics by name."""

    samples: list[list[HookSample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Of each held-out set ``rewards``, ``truncated`` and ``samples``; and metrics by name."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(fn: Any, *args: Any, evaluation: bool, **kwargs: Any) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Returns the output of a rollout function; a bare value of older ones is put into the output's class."""
    output = fn(*args, **kwargs, evaluation=evaluation)
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    return RolloutFnEvalOutput(output) if evaluation else RolloutFnTrainOutput(output)
