"""The difficulty of tasks, which follows the pass rate of groups: up over a threshold, down under another. Pure.

A level moves by the groups of the highest level alone, in windows that begin anew when it has moved: a group counts where its prompt was
drawn at the present level since then. Adaptive difficulty by verifiable environments: Zeng et al. 2025 (RLVE, arXiv:2511.07317).
"""

import random
from collections.abc import Mapping
from typing import Any

from shared.config.data_sections import CurriculumSection

LEVEL, MOVES = "level", "level_moves"
"""The keys of a prompt's metadata that say at which level it was drawn, and how often the level had moved before."""


class AdaptiveLevel:
    """The level of one kind of task, from 0.

    Args:
        highest: the highest level there is; None: there is no end.
    """

    def __init__(self, curriculum: CurriculumSection, highest: int | None = None) -> None:
        ends = [end for end in (highest, curriculum.max_level) if end is not None]
        self._curriculum, self._highest = curriculum, max(0, min(ends)) if ends else None
        self.level = curriculum.start_level if self._highest is None else min(curriculum.start_level, self._highest)
        self._moves = 0
        self._passed, self._groups = 0.0, 0

    def draw(self, dice: random.Random) -> dict[str, int]:
        """Returns the metadata of the next prompt: its level is the highest so far, or one of the ``level_spread`` - 1 below it."""
        lowest = max(0, self.level - self._curriculum.level_spread + 1)
        return {LEVEL: dice.randint(lowest, self.level), MOVES: self._moves}

    def observe(self, result: Mapping[str, Any]) -> bool:
        """Takes the result of a group (docs/curricula.md). Returns whether the level has moved."""
        metadata, rate = result["metadata"], result["pass_rate"]
        if rate is None or metadata.get(LEVEL) != self.level or metadata.get(MOVES) != self._moves:
            return False
        self._passed, self._groups = self._passed + rate, self._groups + 1
        if self._groups < self._curriculum.level_groups:
            return False
        return self._move(self._passed / self._groups)

    def _move(self, rate: float) -> bool:
        before = self.level
        if rate > self._curriculum.raise_above and self.level != self._highest:
            self.level += 1
        elif rate < self._curriculum.lower_below and self.level > 0:
            self.level -= 1
        self._passed, self._groups = 0.0, 0
        self._moves += self.level != before
        return self.level != before

    def state(self) -> list[float]:
        """Returns the level and what has been counted at it, for `load_state`."""
        return [self.level, self._moves, self._passed, self._groups]

    def load_state(self, state: list[float]) -> None:
        """Continues from what `state` gave."""
        self.level, self._moves, self._groups = int(state[0]), int(state[1]), int(state[3])
        self._passed = state[2]
