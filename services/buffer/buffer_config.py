"""What a run's config fixes for the buffer's decisions."""

from __future__ import annotations

from dataclasses import dataclass

from services.buffer.batch_order import Order
from services.buffer.staleness import Policy
from shared.config.run_config import RunConfig
from shared.schema.versions import version_after

DEAD_BATCHES, FEWEST_DEAD = 4, 32
"""Default of `max_dead_in_a_row`: batches, and groups at least."""


@dataclass(frozen=True)
class BufferConfig:
    """See the module's docstring.

    groups: per batch. samples: rollouts of a group. window: groups that order ``windowed_fifo`` looks ahead (0: two batches).
    surplus: groups that are under way beyond what the batches need. max_dead_in_a_row: of groups (0: any number).
    eval_prompts: held-out prompts (0: the run evaluates nothing).
    """

    steps: int
    groups: int
    samples: int
    max_staleness: int
    interval: int
    staleness: Policy = "drop"
    order: Order = "completion"
    window: int = 0
    surplus: int = 0
    max_dead_in_a_row: int = 0
    eval_name: str = "heldout"
    eval_prompts: int = 0
    eval_interval: int | None = None
    eval_first: bool = True

    @classmethod
    def of(cls, config: RunConfig, eval_prompts: int) -> BufferConfig:
        return cls(
            steps=config.rollout.num_rollout,
            groups=config.rollout.rollout_batch_size,
            samples=config.rollout.n_samples_per_prompt,
            max_staleness=config.rollout.max_staleness,
            interval=config.weights.update_weights_interval,
            staleness=config.rollout.staleness_policy,
            order=config.rollout.rollout_order,
            window=config.rollout.rollout_window or 0,
            surplus=(config.rollout.over_sampling_batch_size or config.rollout.rollout_batch_size) - config.rollout.rollout_batch_size,
            max_dead_in_a_row=_max_dead(config),
            eval_name=config.eval.eval_name,
            eval_prompts=eval_prompts,
            eval_interval=config.eval.eval_interval,
            eval_first=not config.eval.skip_eval_before_train,
        )

    @property
    def last_version(self) -> int:
        return version_after(self.steps, self.interval, self.steps)

    def version_of_step(self, step: int) -> int:
        """The weight version that ``step`` trains on."""
        return step // self.interval


def _max_dead(config: RunConfig) -> int:
    given = config.rollout.max_dead_in_a_row
    return max(DEAD_BATCHES * config.rollout.rollout_batch_size, FEWEST_DEAD) if given is None else given
