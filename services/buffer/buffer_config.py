"""The sections of a run's config that the buffer's decisions depend on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.config.eval_section import EvalSection
from shared.config.rollout_section import RolloutSection
from shared.config.trainer_section import WeightsSection
from shared.schema.versions import admissible_steps, version_after

DEAD_BATCHES, FEWEST_DEAD = 4, 32  # Default of `max_dead_in_a_row`: batches, and groups at least


@dataclass(frozen=True)
class BufferConfig:
    """The sections for the buffer's decisions, and values derived from them.

    eval_sets: the sets of held-out prompts, name → number of prompts. passes: reward from which on a sample passes. active_since: when
    this buffer became active (seconds since the epoch): an evaluation's time does not run while the run stands still. has_critic: whether
    a critic trains the same batches. longest_sample: tokens of a micro-batch. message_bytes: of the bus's largest message. rollout_only:
    nothing is trained, and version 0 is the only one. named_rewards: batches have the named rewards of each sample. eval_function:
    the user's own function evaluates.
    """

    rollout: RolloutSection
    weights: WeightsSection = field(default_factory=WeightsSection)
    evaluation: EvalSection = field(default_factory=EvalSection)
    eval_sets: Mapping[str, int] = field(default_factory=dict)
    passes: float = 1.0
    active_since: float = 0.0
    has_critic: bool = False
    longest_sample: int = 1 << 31
    message_bytes: int = 8_000_000
    rollout_only: bool = False
    named_rewards: bool = False
    eval_function: bool = False

    @property
    def surplus(self) -> int:
        """Returns the number of groups in flight beyond those that the batches need."""
        return (self.rollout.over_sampling_batch_size or self.rollout.rollout_batch_size) - self.rollout.rollout_batch_size

    @property
    def window(self) -> int:
        """Returns the number of groups that ``windowed_fifo`` looks ahead: two batches unless given."""
        return self.rollout.rollout_window or 2 * self.rollout.rollout_batch_size

    @property
    def max_dead_in_a_row(self) -> int:
        """Returns the number of dead groups in a row that ends the run; 0: it never does."""
        given = self.rollout.max_dead_in_a_row
        return max(DEAD_BATCHES * self.rollout.rollout_batch_size, FEWEST_DEAD) if given is None else given

    @property
    def last_version(self) -> int:
        """Returns the weight version that the last step makes."""
        return self.newest_version(self.rollout.num_rollout)

    def eval_deadline(self, started: float) -> float:
        """Returns until when an evaluation that started then may last, both in seconds since the epoch."""
        return max(started, self.active_since) + self.evaluation.eval_timeout

    def admissible_groups(self, live_version: int, trained_steps: int) -> int:
        """Returns the groups that may be admitted while a version is live, from the run's beginning on, less those dropped and dead.

        Where nothing is trained, as many batches may be under way as if each step made a version.
        """
        rollout, interval = self.rollout, self.weights.update_weights_interval
        if self.rollout_only:
            live_version, interval = trained_steps, 1
        steps = admissible_steps(live_version, rollout.max_staleness, interval, rollout.num_rollout)
        return steps * rollout.rollout_batch_size + self.surplus

    def version_of_step(self, step: int) -> int:
        """Returns the weight version that ``step`` trains on."""
        return 0 if self.rollout_only else step // self.weights.update_weights_interval

    def newest_version(self, formed_steps: int) -> int:
        """Returns the newest weight version that there can be, since a step is trained once its batch was formed."""
        return 0 if self.rollout_only else version_after(formed_steps, self.weights.update_weights_interval, self.rollout.num_rollout)
