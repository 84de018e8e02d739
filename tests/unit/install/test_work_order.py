"""How `make test` gives the files of tests to its workers."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.work_order import SHARED, WHOLE_RUNS, next_piece, piece_of

ROOT = Path(__file__).resolve().parents[3]
ENGINE = "tests/integration/engine/"


@pytest.mark.parametrize("folder", (*WHOLE_RUNS, *SHARED))
def test_its_folders_hold_tests(folder: str) -> None:
    assert folder.endswith("/") and list((ROOT / folder).glob("test_*.py"))


def test_a_piece_is_a_file_or_a_folder_that_shares() -> None:
    assert piece_of("tests/e2e/test_ppo.py::test_a[tests/unit/x.py::y]") == "tests/e2e/test_ppo.py"
    assert piece_of(f"{ENGINE}test_turns.py::test_a") == piece_of(f"{ENGINE}test_router.py::test_b") == ENGINE


@pytest.mark.parametrize(
    ("waiting", "whole_runs", "given"),
    [
        (["tests/e2e/a.py", ENGINE, "tests/unit/b.py", "tests/unit/c.py"], True, ENGINE),
        (["tests/e2e/a.py", "tests/unit/b.py", "tests/e2e/d.py"], True, "tests/e2e/a.py"),
        (["tests/e2e/a.py", ENGINE, "tests/unit/b.py", "tests/unit/c.py"], False, "tests/unit/b.py"),
        (["tests/unit/b.py", "tests/unit/c.py"], True, "tests/unit/b.py"),
        (["tests/e2e/a.py"], False, "tests/e2e/a.py"),
    ],
)
def test_a_worker_goes_on_with_its_kind_while_there_is_one(waiting: Sequence[str], whole_runs: bool, given: str) -> None:
    assert next_piece(waiting, whole_runs=whole_runs) == given
