"""Rewards by slime's names: their values and their labels."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.rewards.math_verify import integer_label, math_labels
from shared.rewards.reference import Reference
from shared.rewards.verifiers import verify
from tests.oracle.rewards import OURS, outcome
from tests.support.tables import table


def reward(name: str, answer: str, label: str) -> float:
    said = f"Answer: {answer}" if name == "dapo" else f"</think>\\boxed{{{answer}}}"
    value = verify(name, said, Reference(label))
    return float(value["score"] if isinstance(value, Mapping) else value)


@table(
    ("label", "right", "wrong"),
    [
        ("1e-05", ["0.00001", "1e-05"], ["0", "1"]),
        ("1.5e+3", ["1500", "1,500"], ["1.5"]),
        ("\\[5\\]", ["5", "5.0"], ["6"]),
        ("\\(\\frac{1}{2}\\)", ["\\frac{1}{2}", "0.5"], ["2"]),
        ("$1,042.50", ["1042.5", "1,042.50"], ["1042"]),
        ("1 000", ["1000", "1,000"], ["1", "0"]),
        ("1\u00a0000", ["1000"], ["1"]),
        ("12.5 %", ["12.5", "12.5\\%"], ["125"]),
        ("5 km/h", ["5", "5 km/h", "5.0"], ["6", "5 km"]),
        ("3 kg", ["3", "3 kg"], ["3 g"]),
        ("2 1/2", ["5/2", "\\frac{5}{2}", "2.5", "2 1/2", "2\\frac{1}{2}"], ["21/2", "\\frac{21}{2}"]),
        ("\\boxed{2 1/2}", ["2.5"], ["21/2"]),
        ("0", ["0", "0.0"], ["1"]),
    ],
)
@table("name", ["math", "deepscaler"])
def test_boxed_rewards_read_numbers_as_people_write_them(name: str, label: str, right: list[str], wrong: list[str]) -> None:
    assert [reward(name, answer, label) for answer in right] == [1.0] * len(right)
    assert [reward(name, answer, label) for answer in wrong] == [0.0] * len(wrong)


def test_a_negative_mixed_fraction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the label '-2 1/2' is read as -2 \+ 1/2; give one fraction or a decimal number"):
        math_labels("-2 1/2")


@table("label", ["12.5", "12.5 %", "1e-05", "2 1/2", "1/2", "x", "", "12345678901234567890", "Paris", "inf", "nan"])
def test_dapo_refuses_what_is_no_integer_that_it_can_compare(label: str) -> None:
    with pytest.raises(ValueError, match="is no integer that dapo can compare"):
        integer_label(label)


@table("label", ["34", "34.0", "$34$", "\\boxed{34}", "\\[34\\]", "34 km/h", " 34 ", "x = 34", "34 degrees"])
def test_dapo_reads_integers_as_people_write_them(label: str) -> None:
    assert [reward("dapo", answer, label) for answer in ("34", "$34$", "35")] == [1.0, 1.0, -1.0]


@given(st.integers(-(10**12), 10**12))
def test_every_integer_is_right_in_every_form(number: int) -> None:
    forms = [str(number), f"\\[{number}\\]", f"{number:,}", f"{number} cm", f"${number}$"]
    for label in forms:
        assert reward("math", str(number), label) == 1.0, label
        assert reward("math", str(number + 1), label) == 0.0, label
        assert reward("dapo", str(number), label) == 1.0, label
        assert reward("dapo", str(number + 1), label) == -1.0, label


@given(st.integers(1, 99), st.integers(2, 99), st.data())
def test_a_mixed_fraction_is_the_sum_of_its_parts(whole: int, below: int, data: st.DataObject) -> None:
    above = data.draw(st.integers(1, below - 1))
    label = f"{whole} {above}/{below}"
    assert reward("math", f"\\frac{{{whole * below + above}}}{{{below}}}", label) == 1.0
    assert reward("math", f"\\frac{{{whole}{above}}}{{{below}}}", label) == float(int(f"{whole}{above}") == whole * below + above)


# --- rewards by slime's names have slime's values: what slime's own functions gave for hundreds of cases each (`tests.oracle.rewards`)

VALUES: dict[str, list[Any]] = json.loads((Path(__file__).parent / "values.json").read_text())


def test_there_are_values_of_every_reward() -> None:
    assert VALUES.keys() == OURS.keys()
    assert all(len(rows) >= 300 for rows in VALUES.values())


@table("name", VALUES)
def test_every_case_has_slimes_value(name: str) -> None:
    wrong = [(case, given, expected) for *case, expected in VALUES[name] if (given := outcome(OURS[name], tuple(case))) != expected]
    assert not wrong, f"{len(wrong)} of {len(VALUES[name])}, the first: {wrong[0]}"
