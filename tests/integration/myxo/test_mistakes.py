"""The table of mistakes: each is refused with the words that help, before anything is started, in seconds.

Rows run as the command does, most of them in this process, for a process of their own would cost each a second.
"""

import re

import pytest

from myxo.commands import up
from tests.integration.myxo import mistakes_of_data, mistakes_of_model, mistakes_of_newcomers
from tests.integration.myxo.command import Myxo, ended
from tests.integration.myxo.mistakes import LIMIT_S, Input, Mistake, grade, processor_seconds

NEWCOMERS = mistakes_of_newcomers.MISTAKES
MISTAKES = [*mistakes_of_model.MISTAKES, *mistakes_of_data.MISTAKES]
ROWS = [*MISTAKES, *(pytest.param(row, marks=pytest.mark.extra) for row in NEWCOMERS)]
assert len({row.name for row in (*MISTAKES, *NEWCOMERS)}) == len(ROWS) > 100

GRADED = [*NEWCOMERS, *(row for row in MISTAKES if row.name.startswith("a prompt "))]
"""Rows that are told with their place and what to do (`grade`)."""

LONGEST_LINE = 700
"""Characters of a line that is told: a mistake is not found in a whole object."""

AS_PROCESS = [row for row in MISTAKES if row.name in ("a misspelt flag of SGLang's", "three mistakes, each told once")]
"""Rows that run as a process of their own, too."""


def told(row: Mistake, given: Input, words: list[str], code: int, out: str, err: str) -> None:
    """Fails unless the command refused the row's mistake as it should."""
    assert (code, bool(out)) == ((0, True) if row.runs else (2, False)), f"{code}\n{out}\n{err}"
    lines = err.splitlines()
    assert all(line.startswith("myxo: ") and len(line) < LONGEST_LINE for line in lines), err
    # the other rows name the fields alone, which stand beside the flags that were typed
    fields = "" if row in NEWCOMERS else re.sub(r"--[\w-]+ \(([^()]*)\)", r"\1", err)
    assert [word for word in row.says if word not in err and word not in fields] == [], err
    assert len(lines) == row.lines, err
    assert not (given.directory / "runs").exists(), "nothing is left of a launch that never was"
    grades = {line: grade(line, given, [*words, *row.environment]) for line in lines if row in GRADED}
    assert set(grades.values()) <= {"A"}, grades


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_mistake_is_refused(row: Mistake, given: Input, myxo: Myxo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "Launch", lambda *_, **__: pytest.fail("the run would have started"))
    words, before = row.prepare(given), processor_seconds()
    found = myxo.run(*words, environment=row.environment)
    assert processor_seconds() - before < LIMIT_S
    told(row, given, words, *found)


@pytest.mark.parametrize("row", AS_PROCESS, ids=lambda row: row.name)
def test_a_mistake_is_refused_by_the_command_itself(row: Mistake, given: Input, myxo: Myxo) -> None:
    words, before = row.prepare(given), processor_seconds()
    told(row, given, words, *ended(myxo.start(*words, environment=row.environment)))
    assert processor_seconds() - before < LIMIT_S


def test_without_the_mistake_the_input_is_good(given: Input, myxo: Myxo) -> None:
    assert myxo.dry_run(given.write()) == (0, "")


def test_a_grade_needs_a_place_that_is_there_and_a_remedy(given: Input) -> None:
    given.write()
    good = "myxo: data.prompt_data = 'prompts.jsonl:3': expected text"
    assert [grade(good, given, (), told_after) for told_after in (None, 2.0)] == ["A", "B"]
    assert grade(good, given, (), 100.0).startswith("no ")
    for worse in (
        "myxo: it failed; give text",
        "myxo: data.promts = 1: expected text",
        good.replace(":3", ":300"),
        good.partition(": exp")[0],
    ):
        assert grade(worse, given, ()).startswith("no "), worse
