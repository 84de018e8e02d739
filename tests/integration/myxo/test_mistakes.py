"""The table of mistakes: each is refused with the words that help, before anything is started, in seconds.

Rows run as the command does, most of them in this process, for a process of their own would cost each a second.
"""

import re
import resource
import time
from pathlib import Path

import pytest

from myxo.commands import up
from myxo.main import main
from tests.integration.myxo import mistakes_of_data, mistakes_of_model
from tests.integration.myxo.command import Myxo, ended
from tests.integration.myxo.mistakes import Input, Mistake

MISTAKES: list[Mistake] = [*mistakes_of_model.MISTAKES, *mistakes_of_data.MISTAKES]

LIMIT_S = 10.0
"""Processor time that a refusal may take, children included: what a wait in a busy machine's queue adds is no fault of the command."""

AS_PROCESS = [row for row in MISTAKES if row.name in ("a misspelt flag of SGLang's", "three mistakes, each told once")]
"""Rows that run as a process of their own, too."""


@pytest.fixture
def given(tmp_path: Path, tiny_model: Path) -> Input:
    return Input.make(tmp_path, tiny_model)


def processor_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def told(row: Mistake, given: Input, code: int, out: str, err: str) -> None:
    """Fails unless the command refused the row's mistake as it should."""
    assert (code, out) == (2, ""), f"{code}\n{out}\n{err}"
    lines = err.splitlines()
    assert all(line.startswith("myxo: ") for line in lines), err
    fields = re.sub(r"--[\w-]+ \(([^()]*)\)", r"\1", err)  # the rows name the fields alone, which stand beside the flags that were typed
    assert [word for word in row.says if word not in err and word not in fields] == [], err
    assert len(lines) == row.lines, err
    assert not (given.directory / "runs").exists(), "nothing is left of a launch that never was"


@pytest.mark.parametrize("row", MISTAKES, ids=lambda row: row.name)
def test_a_mistake_is_refused(row: Mistake, given: Input, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(up, "Launch", lambda *_, **__: pytest.fail("the run would have started"))
    for name in ("NATS_URL", "REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in row.environment.items():
        monkeypatch.setenv(name, value)
    words, before = row.prepare(given), processor_seconds()
    code = main(words)
    spent = processor_seconds() - before
    out, err = capsys.readouterr()
    told(row, given, code, out, err)
    assert spent < LIMIT_S


@pytest.mark.parametrize("row", AS_PROCESS, ids=lambda row: row.name)
def test_a_mistake_is_refused_by_the_command_itself(row: Mistake, given: Input, myxo: Myxo) -> None:
    before = processor_seconds()
    told(row, given, *ended(myxo.start(*row.prepare(given), environment=row.environment)))
    assert processor_seconds() - before < LIMIT_S


def test_without_the_mistake_the_input_is_good(given: Input, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", str(given.write()), "--dry-run"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().err == ""


def test_the_table_has_its_forty_rows() -> None:
    assert len(MISTAKES) >= 40
    assert len({row.name for row in MISTAKES}) == len(MISTAKES)
