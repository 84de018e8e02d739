"""``slime.rollout.data_source``: where prompts come from."""

from abc import ABC, abstractmethod
from typing import Any

from shared.hooks.hook_sample import HookSample


class DataSource(ABC):
    """The base of sources of prompts. A group is the n samples of one prompt."""

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[list[HookSample]]:
        """Returns the next ``num_samples`` groups."""

    @abstractmethod
    def add_samples(self, samples: list[list[HookSample]]) -> None:
        """Takes groups back, to be given out again."""

    @abstractmethod
    def save(self, rollout_id: int) -> Any:
        """Keeps the position, under the number of a step."""

    @abstractmethod
    def load(self, rollout_id: int | None = None) -> Any:
        """Goes to a position that was kept."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of prompts."""
