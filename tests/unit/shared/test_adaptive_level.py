"""Difficulty that follows the pass rate: it moves by whole windows at the present level, and nothing else moves it."""

import random
from typing import Any

import pytest

from shared.config.data_sections import CurriculumSection
from shared.data.reasoning_gym_source import LEVEL, MOVES, AdaptiveLevel
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config
from tests.support.tables import table


def level_of(highest: int | None = 9, **fields: Any) -> AdaptiveLevel:
    return AdaptiveLevel(CurriculumSection(level_groups=4, raise_above=0.75, lower_below=0.25, **fields), highest)


def drawn(level: AdaptiveLevel) -> dict[str, int]:
    return level.draw(random.Random(0))


def hear(level: AdaptiveLevel, *rates: float | None, metadata: dict[str, int] | None = None) -> list[bool]:
    return [level.observe({"metadata": drawn(level) if metadata is None else metadata, "pass_rate": rate}) for rate in rates]


def test_the_level_rises_over_the_threshold_and_falls_under_the_other() -> None:
    level = level_of(start_level=3)
    assert hear(level, 1.0, 1.0, 0.5, 0.5) == [False] * 4 and level.level == 3, "0.75 is not over 0.75"
    assert hear(level, 1.0, 1.0, 1.0, 0.5) == [False, False, False, True] and level.level == 4
    assert hear(level, 0.25, 0.25, 0.25, 0.25) == [False] * 4 and level.level == 4
    assert hear(level, 0.0, 0.25, 0.25, 0.25)[-1] and level.level == 3


def test_it_stays_between_its_ends() -> None:
    level = level_of(highest=1)
    hear(level, *[1.0] * 12)
    assert level.level == 1
    hear(level, *[0.0] * 12)
    assert level.level == 0
    limited = level_of(highest=9, max_level=2)
    hear(limited, *[1.0] * 40)
    assert limited.level == 2
    endless = level_of(highest=None)
    hear(endless, *[1.0] * 40)
    assert endless.level == 10


def test_what_was_drawn_before_a_move_does_not_count() -> None:
    level = level_of()
    early = drawn(level)
    hear(level, 1.0, 1.0, 1.0, 1.0)
    assert level.level == 1
    assert hear(level, *[0.0] * 20, metadata=early) == [False] * 20
    hear(level, 0.0, 0.0, 0.0, 0.0)
    assert level.level == 0, "back at the old level"
    hear(level, *[1.0] * 20, metadata=early)
    assert level.level == 0, "and what was drawn there before is still of another time"
    hear(level, None, None, None, None, 1.0, 1.0, 1.0)
    assert level.level == 0, "groups that were never scored do not count"
    assert hear(level, 1.0) == [True]


def test_prompts_are_drawn_from_the_levels_below_too_and_only_the_highest_counts() -> None:
    level = level_of(start_level=5, level_spread=3)
    dice = random.Random(1)
    assert {level.draw(dice)[LEVEL] for _ in range(60)} == {3, 4, 5}
    hear(level, *[1.0] * 20, metadata={LEVEL: 4, MOVES: 0})
    assert level.level == 5


def test_a_state_holds_everything() -> None:
    one, other = level_of(), level_of()
    dice = random.Random(3)
    for _ in range(50):
        other = level_of()
        other.load_state(one.state())
        assert other.state() == one.state()
        result = {"metadata": {LEVEL: one.level, MOVES: one.state()[1]}, "pass_rate": dice.random()}
        assert one.observe(result) == other.observe(result) and one.state() == other.state()


@table(
    ("fields", "field", "words"),
    [
        ({"raise_above": 0.2, "lower_below": 0.2}, "curriculum.lower_below", "expected less than raise_above = 0.2"),
        ({"max_level": 1, "start_level": 2}, "curriculum.max_level", "at least start_level = 2"),
        ({"reasoning_gym": ["chain_sum*0"]}, "curriculum.reasoning_gym", "a weight over 0"),
        ({"reasoning_gym": ["a b"]}, "curriculum.reasoning_gym", "expected NAME, or NAME"),
        ({"reasoning_gym": ["chain_sum", "chain_sum*2"]}, "curriculum.reasoning_gym", "chain_sum is there twice"),
        ({"reasoning_gym_parameters": {"chain_sum": {}}}, "curriculum.reasoning_gym_parameters", "chain_sum is not among reasoning_gym"),
    ],
)
def test_what_makes_no_curriculum_is_refused(tmp_path: Any, fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        run_config(tmp_path, data={"prompt_data": None, "data_source": "a:b"}, curriculum=fields)
    assert caught.value.field == field


def test_prompts_come_from_one_place(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="prompts come from one place"):
        run_config(tmp_path, curriculum={"reasoning_gym": ["chain_sum"]})
    config = run_config(tmp_path, data={"prompt_data": None}, curriculum={"reasoning_gym": ["chain_sum*2", "leg_counting"]})
    assert [tuple(task) for task in config.curriculum.tasks] == [("chain_sum", 2.0), ("leg_counting", 1.0)]
    assert (config.data.data_source, config.reward.rm_type) == ("shared.data.reasoning_gym_source:make", "reasoning_gym")
    again = type(config).model_validate_json(config.model_dump_json())
    assert again == config, "the frozen config reads back"
