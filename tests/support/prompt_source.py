"""A source of prompts for tests: counts, and says in which process."""

import os
from typing import Any

from shared.config.run_config import RunConfig


class Sums:
    """1+1=, 2+1=, … with the process's id as metadata."""

    def __init__(self, config: RunConfig) -> None:
        self._at = 0

    def get_samples(self, n: int) -> list[dict[str, Any]]:
        first, self._at = self._at + 1, self._at + n
        return [{"prompt": f"{left}+1=", "label": left + 1, "metadata": {"process": os.getpid()}} for left in range(first, self._at + 1)]

    def state(self) -> int:
        return self._at

    def load_state(self, state: int) -> None:
        self._at = state
