"""Verifiers: what counts as the right answer."""

import re

import math_verify
from hypothesis import given
from hypothesis import strategies as st

from shared.config.reward_section import RewardSection
from shared.rewards import names
from shared.rewards.reference import Reference
from shared.rewards.verifiers import READ_LABEL, VERIFIERS, verify
from tests.support.tables import table


def test_every_configurable_verifier_exists() -> None:
    for name in names.VERIFIERS:
        assert RewardSection(rm_type=name).rm_type == name
    assert VERIFIERS.keys() == names.QUEUES.keys()
    assert READ_LABEL.keys() <= VERIFIERS.keys()


@table(
    ("response", "label", "reward"),
    [("42", "42", 1.0), (" 42\n", "42 ", 1.0), ("42.0", "42", 0.0), ("the 42", "42", 0.0), ("", "42", 0.0), ("Yes", "yes", 0.0)],
)
def test_exact_match(response: str, label: str, reward: float) -> None:
    assert verify("exact", response, Reference(label)) == reward


@table(
    ("response", "label", "reward"),
    [
        ("42", "42", 1.0),
        (" 42\n", "42", 1.0),
        ("42.0", "42", 1.0),
        ("-7", "-7", 1.0),
        ("+7", "7", 1.0),
        ("007", "7", 1.0),
        ("0.5", "1/2", 1.0),
        ("41", "42", 0.0),
        ("4 2", "42", 0.0),
        ("", "42", 0.0),
        ("no idea", "42", 0.0),
        ("The answer is \\boxed{42}.", "42", 1.0),
        ("First \\boxed{41}, no: \\boxed{42}", "42", 1.0),
        ("So \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        ("\\boxed{x^2+2x}", "(x+1)^2", 0.0),
        ("\\boxed{\\{1, 2\\}}", "\\{2, 1\\}", 1.0),
        ("\\boxed{", "42", 0.0),
        ("\\boxed{42} and then \\boxed{", "42", 1.0),
        ("\\boxed{4\\text{ or }{\\boxed{42}}}, so \\boxed{42}", "42", 1.0),
        ("} \\boxed{\\{1, 2\\}} and {1}", "\\{2, 1\\}", 1.0),
    ],
)
def test_mathematical_equality(response: str, label: str, reward: float) -> None:
    assert verify("math_verify", response, Reference(label)) == reward


PIECES = ["so", "the answer is", "or", "e", "x", *"0123456789", " ", " ", "\n", *"-+*.:,()=%!^/"]


@given(st.lists(st.sampled_from(PIECES), max_size=7).map("".join), st.integers(-20, 20))
def test_the_short_way_for_plain_numbers_agrees_with_the_library(response: str, label: int) -> None:
    found = math_verify.parse(response)
    if found and not response.lstrip().startswith("(") and not re.search(r"\de[-+]?\d", response):  # which reads no exponents
        assert verify("math_verify", response, Reference(str(label))) == float(math_verify.verify(math_verify.parse(f"${label}$"), found))


@table(
    ("response", "label", "reward"),
    [
        ("(12 08 11)1182", "1182", 0.0),
        ("(12 08 11) 1182.", "1182", 1.0),
        ("3+4", "4", 0.0),
        ("3+4", "7", 1.0),
        ("5-7", "7", 0.0),
        ("1,042", "42", 0.0),
        ("1,042", "1042", 1.0),
    ],
)
def test_an_expression_counts_for_its_value(response: str, label: str, reward: float) -> None:
    assert verify("math_verify", response, Reference(label)) == reward


@given(st.integers(-(10**30), 10**30), st.integers(-(10**30), 10**30))
def test_plain_numbers_are_compared_exactly(left: int, right: int) -> None:
    assert verify("math_verify", str(left), Reference(str(right))) == float(left == right)
    assert verify("math_verify", f"{left}.50", Reference(f"{left}.5")) == 1.0
