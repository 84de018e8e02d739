"""``slime.rollout.on_policy_distillation``: there is no reward but the log-probs of the teacher, which the rollout services ask."""

from typing import Any


async def reward_func(args: Any, sample: Any, **keywords: Any) -> float:
    """Returns 0."""
    return 0.0


def post_process_rewards(args: Any, samples: list[Any], **keywords: Any) -> tuple[list[float], list[float]]:
    """Returns raw rewards and rewards, 0 for each sample."""
    return [0.0] * len(samples), [0.0] * len(samples)
