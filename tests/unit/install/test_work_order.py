"""How `make test` gives the files of tests to its workers."""

import ast
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.support.tables import table
from tests.support.work_order import (
    COMPARED,
    ENGINES,
    LONGEST,
    OF_RANKS,
    OF_WEIGHTS,
    OWN_ENGINES,
    RANKS,
    SHARED,
    WHOLE_RUNS,
    next_piece,
    piece_of,
)

ROOT = Path(__file__).resolve().parents[3]
ENGINE = SHARED[0]


@table("folder", WHOLE_RUNS)
def test_its_folders_hold_tests(folder: str) -> None:
    assert folder.endswith("/") and list((ROOT / folder).glob("test_*.py"))


def test_a_piece_is_a_file_or_files_that_share_an_engine() -> None:
    assert piece_of("tests/e2e/test_ppo.py::test_a[tests/unit/x.py::y]") == "tests/e2e/test_ppo.py"
    assert [piece_of(f"{ENGINES}{name}.py::test_a") for name in ("turns", "router", "process")] == [*SHARED[::-1], f"{ENGINES}process.py"]
    assert [piece_of(f"{OF_RANKS}{name}.py::test_a") for name in ("lora", "cpu")] == [*RANKS]
    assert all((ROOT / f"{ENGINES}{name}.py").is_file() for name in (*OWN_ENGINES, *OF_WEIGHTS))
    assert all((ROOT / f"{OF_RANKS}{name}.py").is_file() for name in COMPARED)
    assert all((ROOT / piece).is_file() for piece in LONGEST if piece not in (*SHARED, *RANKS))


def test_what_processes_are_forked_with_is_there() -> None:
    """The server of forks says nothing of a module that it does not find, and would start without any."""
    tree = ast.parse((ROOT / "tests" / "support" / "preloaded.py").read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert len(names) > 15 and [name for name in names if find_spec(name) is None] == []


@table(
    ("waiting", "whole_runs", "given"),
    [
        (["tests/e2e/a.py", ENGINE, "tests/unit/b.py", "tests/unit/c.py"], True, ENGINE),
        (["tests/e2e/a.py", *LONGEST[:1:-1]], True, LONGEST[2]),
        (["tests/e2e/a.py", "tests/unit/b.py", "tests/e2e/d.py"], True, "tests/e2e/a.py"),
        (["tests/e2e/a.py", ENGINE, "tests/unit/b.py", "tests/unit/c.py"], False, "tests/unit/b.py"),
        (["tests/unit/b.py", "tests/unit/c.py"], True, "tests/unit/b.py"),
        (["tests/e2e/a.py"], False, "tests/e2e/a.py"),
    ],
)
def test_a_worker_goes_on_with_its_kind_while_there_is_one(waiting: Sequence[str], whole_runs: bool, given: str) -> None:
    assert next_piece(waiting, whole_runs=whole_runs) == given
