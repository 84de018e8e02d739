"""`[curriculum]`: tasks whose difficulty follows what the model can do."""

import re
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from shared.config.section import Rule, Section

REASONING_GYM_SOURCE = "shared.data.reasoning_gym_source:make"
"""The source of prompts of ``reasoning_gym``."""

_TASK = re.compile(r"(?P<name>[A-Za-z]\w*)(?:\*(?P<weight>\d+(?:\.\d*)?))?", re.ASCII)


class WeightedTask(NamedTuple):
    """A generator of tasks, and how often it is drawn from compared with the others."""

    name: str
    weight: float


class CurriculumSection(Section):
    """Tasks that are made as they are needed, and get harder and easier."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "lower_below",
            lambda section, given: given >= section.raise_above,
            "expected less than raise_above = {0.raise_above}, else a level would be raised and lowered by the same rewards",
        ),
    )

    reasoning_gym: list[str] = Field(
        default=[],
        description="generators of the package reasoning-gym that prompts come from, in place of prompt_data: NAME, or NAME*WEIGHT to draw "
        "from it more or less often; its own verifier scores",
    )
    reasoning_gym_parameters: dict[str, dict[str, Any]] = Field(
        default={}, description="fixed parameters of a generator, over those of its level: NAME = {parameter = value}"
    )
    reasoning_gym_instruction: str = Field(
        default="\nGive the answer between <answer> and </answer>.",
        description="what stands behind each question; where a response has no <answer>, the whole of it is the answer",
    )
    start_level: int = Field(default=0, ge=0, description="the level at which tasks begin, from 0")
    max_level: int | None = Field(default=None, ge=0, description="the highest level; default: the generator's own")
    level_spread: int = Field(default=1, gt=0, description="levels that prompts are drawn from: the highest so far, and those below it")
    level_groups: int = Field(default=32, gt=0, description="groups of the highest level that are scored before it moves")
    raise_above: float = Field(default=0.8, ge=0, le=1, description="the pass rate over which the level rises")
    lower_below: float = Field(default=0.2, ge=0, le=1, description="the pass rate under which it falls")

    @property
    def tasks(self) -> list[WeightedTask]:
        """Returns the generators of ``reasoning_gym``."""
        found = (_TASK.fullmatch(text) for text in self.reasoning_gym)
        return [WeightedTask(match["name"], float(match["weight"] or 1)) for match in found if match is not None]

    def _misfits(self) -> Iterator[str]:
        for text in self.reasoning_gym:
            match = _TASK.fullmatch(text)
            if match is None or (match["weight"] is not None and float(match["weight"]) <= 0):
                yield f"curriculum.reasoning_gym: {text!r}: expected NAME, or NAME*WEIGHT with a weight over 0"
        names = [task.name for task in self.tasks]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"curriculum.reasoning_gym: {name} is there twice; give it a weight: {name}*2"
        for name in sorted(set(self.reasoning_gym_parameters) - set(names)):
            yield f"curriculum.reasoning_gym_parameters: {name} is not among reasoning_gym"
        if self.max_level is not None and self.max_level < self.start_level:
            yield f"curriculum.max_level: expected at least start_level = {self.start_level}"
