"""Sources of tasks that adapt, and those of reasoning-gym."""

import importlib.util
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from myxo.preflight.data_checks import check_generators
from myxo.preflight.inspection import Inspection, Note
from shared.config.data_sections import CurriculumSection
from shared.config.run_config import RunConfig
from shared.data.reasoning_gym_source import LEVEL, MOVES, AdaptiveLevel, ReasoningGymSource, make
from shared.rewards.names import REASONING_GYM
from shared.rewards.reference import Reference, label_problem
from shared.rewards.text_rewards import answer_of
from shared.rewards.verifiers import verify
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


# --- tasks of the package reasoning-gym: at the level of each, the same after any restart, scored by their own verifier

if importlib.util.find_spec("reasoning_gym") is None:
    pytest.skip("reasoning_gym is not installed", allow_module_level=True)
WITHOUT_PYCOSAT = pytest.mark.skipif(importlib.util.find_spec("pycosat") is not None, reason="it is installed")


def config_of(directory: Path, *tasks: str, **fields: Any) -> RunConfig:
    return run_config(directory, data={"prompt_data": None}, curriculum={"reasoning_gym": list(tasks), "level_groups": 4, **fields})


def result_of(row: dict[str, Any], rate: float) -> dict[str, Any]:
    return {"metadata": row["metadata"], "pass_rate": rate, "rewards": [rate], "fate": "trained"}


def play(source: ReasoningGymSource, groups: int, rates: dict[str, float]) -> list[dict[str, Any]]:
    rows = []
    for _ in range(groups):
        rows += source.get_samples(1)
        source.observe([result_of(rows[-1], rates[rows[-1]["metadata"]["task"]])])
    return rows


def test_each_task_has_a_level_that_follows_its_own_pass_rate(tmp_path: Path) -> None:
    source = make(config_of(tmp_path, "chain_sum*3", "leg_counting"))
    rows = play(source, 80, {"chain_sum": 1.0, "leg_counting": 0.5})
    last = {row["metadata"]["task"]: row["metadata"]["level"] for row in rows}
    assert last["chain_sum"] > 5 and last["leg_counting"] == 0
    counts = Counter(row["metadata"]["task"] for row in rows)
    assert counts["chain_sum"] > 2 * counts["leg_counting"] > 0
    terms = [row["metadata"][REASONING_GYM]["metadata"]["num_terms"] for row in rows if row["metadata"]["task"] == "chain_sum"]
    assert terms[0] == 2 and terms[-1] > 6, "more is asked"


def test_a_source_goes_on_from_its_state(tmp_path: Path) -> None:
    config = config_of(tmp_path, "chain_sum", "basic_arithmetic")
    rates = {"chain_sum": 1.0, "basic_arithmetic": 0.0}
    whole, first, second = make(config), make(config), make(config)
    expected = play(whole, 60, rates)
    assert play(first, 35, rates) == expected[:35]
    second.load_state(json.loads(json.dumps(first.state())))
    assert play(second, 25, rates) == expected[35:]


def test_the_tasks_own_verifier_scores(tmp_path: Path) -> None:
    [row] = make(config_of(tmp_path, "chain_sum", reasoning_gym_parameters={"chain_sum": {"min_digits": 3, "max_digits": 3}})).get_samples(
        1
    )
    assert row["metadata"]["rm_type"] == REASONING_GYM and row["prompt"].endswith("</answer>.")
    assert row["metadata"][REASONING_GYM]["metadata"]["num_digits"] == 3, "a parameter is over the level's"
    reference = Reference(row["label"], False, row["metadata"])
    for response in (row["label"], f"<think>hm</think> so <answer>7</answer> no, <answer> {row['label']} </answer>"):
        assert verify(REASONING_GYM, response, reference) == 1.0
    assert verify(REASONING_GYM, "<answer>7</answer>", reference) < 1.0
    assert answer_of("<answer>1</answer></think> 2 ") == "2", "what was only thought does not count"
    assert label_problem(REASONING_GYM, reference) is None
    assert "expected metadata.reasoning_gym with dataset" in str(label_problem(REASONING_GYM, Reference("1")))
    unknown = {REASONING_GYM: {"dataset": "chain_som", "metadata": {}}}
    with pytest.raises(ValueError, match="'chain_som', no generator of reasoning-gym"):
        verify(REASONING_GYM, "1", Reference("1", False, unknown))


@pytest.mark.parametrize(
    ("task", "fields", "words"),
    [
        ("chain_sums", {}, "did you mean chain_sum"),
        ("chain_sum", {"reasoning_gym_parameters": {"chain_sum": {"max_terns": 3}}}, "did you mean max_terms"),
        ("chain_sum", {"reasoning_gym_parameters": {"chain_sum": {"min_terms": 9}}}, "level 0 of chain_sum cannot be made"),
        ("rearc", {}, "its verifier gives its own answer 1, and 0.05 once the task has been JSON"),
        pytest.param("zebra_puzzles", {}, "pycosat is not installed: pip install pycosat", marks=WITHOUT_PYCOSAT),
    ],
)
def test_a_generator_that_cannot_be_used_is_refused(tmp_path: Path, task: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make(config_of(tmp_path, task, **fields))
    assert caught.value.field.startswith("curriculum.reasoning_gym")


def test_a_task_that_does_not_take_the_start_level_is_noted(tmp_path: Path) -> None:
    assert list(check_generators(Inspection(config_of(tmp_path, "chain_sum")))) == []
    [note] = check_generators(Inspection(config_of(tmp_path, "chain_sum", start_level=11)))
    level = make(config_of(tmp_path, "chain_sum", start_level=11)).state()["levels"]["chain_sum"][0]
    assert isinstance(note, Note) and level == 10
    assert note.text.endswith(f"start_level = 11: chain_sum does not take it; it begins at level {level}, its highest")
