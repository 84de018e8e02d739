"""The progress of a trainer, and the paths of its files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared.config.run_config import RunConfig
from shared.schema.versions import version_after


@dataclass
class Progress:
    """The training's progress, as a checkpoint records it.

    Args:
        steps: finished training steps. sft_done: the warm start is over (or there is none).
    """

    steps: int = 0
    sft_done: bool = False

    def version(self, config: RunConfig) -> int:
        """Returns the weight version after the finished steps."""
        return version_after(self.steps, config.weights.update_weights_interval, config.rollout.num_rollout)


@dataclass(frozen=True)
class Places:
    """The paths of a run's trainer files."""

    root: Path

    def checkpoints_of(self, role: Literal["actor", "critic"]) -> Path:
        return self.root / ("checkpoints" if role == "actor" else "critic-checkpoints")

    @property
    def reference(self) -> Path:
        """Returns the directory of the HF weights of version 0, the reference policy of a run with a KL term."""
        return self.root / "reference"

    @property
    def hf(self) -> Path:
        """Returns the directory of the HF weights of the final policy."""
        return self.root / "hf"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def tensorboard_of_critic(self) -> Path:
        return self.tensorboard / "critic"
