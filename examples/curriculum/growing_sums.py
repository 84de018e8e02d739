"""Sums that get longer while the model learns: level 0 has one digit, each level one more.

The source of prompts of this example: ``data_source = "examples.curriculum.growing_sums:make"``. The sums of a level are sampled from the
run's seed and their number, so that the same results give the same sums again.
"""

import random
from typing import Any

from shared.config.run_config import RunConfig
from shared.data.reasoning_gym_source import LEVEL, AdaptiveLevel

MOST_DIGITS = 3


def operands(dice: random.Random, digits: int) -> tuple[int, int]:
    """Returns two numbers of so many digits."""
    smallest = 10 ** (digits - 1) if digits > 1 else 0
    return dice.randint(smallest, 10**digits - 1), dice.randint(smallest, 10**digits - 1)


def make(config: RunConfig) -> "GrowingSums":
    """Returns the source of a run's config."""
    return GrowingSums(config)


class GrowingSums:
    """Samples sums at the level that the model is at; `[curriculum]` says when it moves."""

    def __init__(self, config: RunConfig) -> None:
        self._seed, self._sampled = config.data.rollout_seed, 0
        self._level = AdaptiveLevel(config.curriculum, highest=MOST_DIGITS - 1)

    def get_samples(self, n: int) -> list[dict[str, Any]]:
        """Returns the next n prompts."""
        return [self._draw() for _ in range(n)]

    def _draw(self) -> dict[str, Any]:
        dice = random.Random(f"{self._seed} {self._sampled}")
        self._sampled += 1
        at = self._level.draw(dice)
        left, right = operands(dice, at[LEVEL] + 1)
        return {"prompt": f"{left}+{right}=", "label": str(left + right), "metadata": at}

    def observe(self, results: list[dict[str, Any]]) -> None:
        """Hears what became of groups."""
        for result in results:
            self._level.observe(result)

    def state(self) -> dict[str, Any]:
        """Returns where the source is."""
        return {"drawn": self._sampled, "level": self._level.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues from there."""
        self._sampled = state["drawn"]
        self._level.load_state(state["level"])
