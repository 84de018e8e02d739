"""A buffer's config of a few numbers."""

from collections.abc import Mapping
from typing import Any

from services.buffer.buffer_config import BufferConfig
from shared.config.eval_section import EvalSection
from shared.config.rollout_section import RolloutSection
from shared.config.trainer_section import WeightsSection


def buffer_config(
    *,
    steps: int,
    groups: int,
    samples: int,
    max_staleness: int,
    interval: int,
    staleness: Any = "drop",
    order: Any = "completion",
    window: int = 0,
    surplus: int = 0,
    eval_prompts: int | Mapping[str, int] = 0,
    eval_interval: int | None = None,
    eval_first: bool = True,
    eval_timeout: float = 3600.0,
) -> BufferConfig:
    """The config of a run.

    Args:
        eval_prompts: of the set heldout, or of each set. window: 0 for the default; of no meaning but to ``windowed_fifo``, and never fewer
            groups than a batch has.
    """
    rollout = RolloutSection(
        num_rollout=steps,
        rollout_batch_size=groups,
        n_samples_per_prompt=samples,
        max_staleness=max_staleness,
        staleness_policy=staleness,
        rollout_order=order,
        rollout_window=max(window, groups) if window and order == "windowed_fifo" else None,
        over_sampling_batch_size=groups + surplus,
    )
    evaluation = EvalSection(
        eval_prompt_data="heldout.jsonl" if eval_interval else None,
        eval_timeout=eval_timeout,
        eval_interval=eval_interval,
        skip_eval_before_train=not eval_first,
    )
    sets = ({"heldout": eval_prompts} if eval_prompts else {}) if isinstance(eval_prompts, int) else eval_prompts
    return BufferConfig(rollout, WeightsSection(update_weights_interval=interval), evaluation, sets)
