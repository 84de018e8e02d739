"""Rewards by slime's names have slime's values: what slime's own functions gave for hundreds of cases each (`tests.oracle.rewards`)."""

import json
from pathlib import Path
from typing import Any

from tests.oracle.rewards import OURS, outcome
from tests.support.tables import table

VALUES: dict[str, list[Any]] = json.loads((Path(__file__).parent / "values.json").read_text())


def test_there_are_values_of_every_reward() -> None:
    assert VALUES.keys() == OURS.keys()
    assert all(len(rows) >= 300 for rows in VALUES.values())


@table("name", VALUES)
def test_every_case_has_slimes_value(name: str) -> None:
    wrong = [(case, given, expected) for *case, expected in VALUES[name] if (given := outcome(OURS[name], tuple(case))) != expected]
    assert not wrong, f"{len(wrong)} of {len(VALUES[name])}, the first: {wrong[0]}"
