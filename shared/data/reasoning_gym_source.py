"""Prompts made by the generators of the package reasoning-gym, each at a level that follows its pass rate.

The n-th prompt of a generator at a level is a function of the run's seed alone; which generator is drawn, and at which level, follows from
the seed and from what the source has heard. So it gives the same prompts again after any restart.

A level moves by the groups of the highest level alone, in windows that begin anew when it has moved: a group counts where its prompt was
made at the present level since then. Adaptive difficulty by verifiable environments: Zeng et al. 2025 (RLVE, arXiv:2511.07317).
"""

import dataclasses
import json
import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from shared.config.data_sections import CurriculumSection
from shared.config.run_config import RunConfig
from shared.rewards.names import REASONING_GYM
from shared.rewards.text_rewards import reasoning_gym_factory
from shared.runtime.errors import ConfigError, nearest

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


FIELD, PARAMETERS = "curriculum.reasoning_gym", "curriculum.reasoning_gym_parameters"

BLOCK = 64  # Tasks that a generator is opened for at once. Some make a list of all of them first, others load lists of words each time


def make(config: RunConfig) -> "ReasoningGymSource":
    """Returns the source of a run's config. Raises ConfigError."""
    return ReasoningGymSource(config)


class ReasoningGymSource:
    """See the module's docstring."""

    def __init__(self, config: RunConfig) -> None:
        self._curriculum, self._data = config.curriculum, config.data
        self._seed, start = config.data.rollout_seed, config.curriculum.start_level
        self._weights = [task.weight for task in self._curriculum.tasks]
        self._generators = {task.name: TaskGenerator(task.name, self._curriculum, self._seed) for task in self._curriculum.tasks}
        self._levels = {name: AdaptiveLevel(self._curriculum, generator.highest(start)) for name, generator in self._generators.items()}
        for name, level in self._levels.items():
            self._generators[name].task(level.level, 0)  # what a parameter breaks is told at the start
        self._drawn = 0

    def get_samples(self, n: int) -> list[dict[str, Any]]:
        """Returns the next n prompts."""
        return [self._draw() for _ in range(n)]

    def _draw(self) -> dict[str, Any]:
        dice = random.Random(f"{self._seed} {self._drawn}")
        [name] = dice.choices(list(self._generators), self._weights)
        at = self._levels[name].draw(dice)
        entry = self._generators[name].task(at[LEVEL], self._drawn)
        self._drawn += 1
        data, own = self._data, {"dataset": name, "metadata": entry["metadata"], "question": entry["question"]}
        metadata = {"rm_type": REASONING_GYM, "task": name, **at, REASONING_GYM: own}
        row = {data.input_key: entry["question"] + self._curriculum.reasoning_gym_instruction, data.metadata_key: metadata}
        return row if data.label_key is None else {**row, data.label_key: entry["answer"]}

    def observe(self, results: list[dict[str, Any]]) -> None:
        """Moves the levels of the tasks that came back."""
        for result in results:
            if (level := self._levels.get(result["metadata"].get("task"))) is not None:
                level.observe(result)

    def state(self) -> dict[str, Any]:
        """Returns how many prompts were drawn, and each task's level."""
        return {"drawn": self._drawn, "levels": {name: level.state() for name, level in self._levels.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues from what `state` gave; a task that is new since then begins at its start."""
        self._drawn = state["drawn"]
        for name, level in self._levels.items():
            if name in state["levels"]:
                level.load_state(state["levels"][name])


class TaskGenerator:
    """One generator of the package, at any level. Raises ConfigError for one that there is none of, and for its parameters."""

    def __init__(self, name: str, curriculum: CurriculumSection, seed: int) -> None:
        factory = reasoning_gym_factory()
        if name not in factory.DATASETS:
            raise ConfigError(FIELD, name, f"no generator of reasoning-gym; {nearest(name, sorted(factory.DATASETS))}")
        self.name, self._seed = name, seed
        self._dataset, self._config = factory.DATASETS[name]
        self._made = factory.CURRICULA[name]() if name in factory.CURRICULA else None
        self._parameters = curriculum.reasoning_gym_parameters.get(name, {})
        known = {field.name for field in dataclasses.fields(self._config)} - {"seed", "size"}
        for parameter in sorted(set(self._parameters) - known):
            raise ConfigError(f"{PARAMETERS}.{name}", parameter, f"no parameter of this generator; {nearest(parameter, sorted(known))}")
        self._block = lru_cache(16)(self._open)

    def highest(self, start: int) -> int:
        """Returns the highest level that the generator takes, from ``start`` on; 0 where it has no levels."""
        levels = [] if self._made is None else [len(attribute.levels) for attribute in self._made.attributes.values()]
        for level in range(start, max(levels, default=1)):
            try:
                self._configuration(level, 0)
            except ConfigError:  # some of the package's own levels are beyond what it takes
                return level - 1
        return max(levels, default=1) - 1

    def task(self, level: int, index: int) -> dict[str, Any]:
        """Returns a task: ``question``, ``answer`` and ``metadata``, as they come back from JSON. Raises ConfigError."""
        return _as_json(self._block(level, index // BLOCK)[index % BLOCK], self.name)

    def _open(self, level: int, block: int) -> Any:
        dataset = self._opened(level, block)
        task, travelled = dataset[0], _as_json(dataset[0], self.name)
        if isinstance(task["answer"], str) and (worth := _worth(dataset, task)) != (then := _worth(dataset, travelled)):
            reported = f"its verifier gives its own answer {worth:g}, and {then:g} once the task has been JSON; the rewards would be wrong"
            raise ConfigError(FIELD, self.name, reported)
        return dataset

    def _opened(self, level: int, block: int) -> Any:
        config = self._configuration(level, block)
        try:
            dataset = self._dataset(config=config)
            dataset[0]
            return dataset
        except Exception as error:  # whatever the package trips over
            raise self._refusal(level, error) from None

    def _configuration(self, level: int, block: int) -> Any:
        from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode

        own: dict[str, Any] = {"seed": random.Random(f"{self._seed} {self.name} {level} {block}").getrandbits(31), "size": BLOCK}
        try:
            if self._made is None:
                config = self._config(**own)
            else:
                self._made.set_global_level(level)
                config = self._made.generate_configuration(own, DefaultCurriculumContext(mode=RangeAttributeMode.UPPER_BOUND))
            config = dataclasses.replace(config, **self._parameters)
            if hasattr(config, "validate"):
                config.validate()
            return config
        except Exception as error:
            raise self._refusal(level, error) from None

    def _refusal(self, level: int, error: Exception) -> ConfigError:
        field = f"{PARAMETERS}.{self.name}" if self._parameters else FIELD
        given = self._parameters or self.name
        return ConfigError(field, given, f"level {level} of {self.name} cannot be made: {type(error).__name__}: {error}")


def _as_json(task: Any, name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(json.dumps(task, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(FIELD, name, f"its tasks are no JSON ({error}); they cannot travel") from None
    return found


def _worth(dataset: Any, task: Any) -> float:
    return float(dataset.score_answer(answer=task["answer"], entry=task))
