"""docs/math-rewards.md says what the math verifier reads: each row of its tables is run through it."""

import re
from pathlib import Path

import pytest

from shared.rewards.reference import Reference
from shared.rewards.verifiers import verify
from tests.support.tables import table

PAGE = (Path(__file__).parents[3] / "docs" / "math-rewards.md").read_text()


def rows(head: str) -> list[list[str]]:
    """The cells of a table, without the signs for code and with line breaks."""
    [table] = re.findall(rf"^{re.escape(head)}\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
    return [[cell.strip("` |").replace(" ⏎ ", "\n") for cell in cells] for cells in lines]


ANSWERS = rows("| response | label | reward |")
LABELS = rows("| label | is read as | response | reward |")
REFUSED = rows("| label | words |")


@table(
    ("response", "label", "reward"),
    [(response, label, float(reward)) for response, label, reward in ANSWERS]
    + [(response, label, float(reward)) for label, _, response, reward in LABELS],
)
def test_what_is_read_earns_what_the_page_says(response: str, label: str, reward: float) -> None:
    assert verify("math_verify", response, Reference(label)) == reward


@table(("label", "words"), REFUSED)
def test_what_cannot_be_compared_is_refused_in_words(label: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        verify("math_verify", "42", Reference(label))


def test_an_empty_label_is_refused() -> None:
    with pytest.raises(ValueError, match="is read in the label ''"):
        verify("math_verify", "", Reference(""))
