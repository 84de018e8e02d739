"""How the repository is worked on: its Makefile, the order of its tests, its tables of them, the page for who reads it."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import grimp
import pytest

from docs.size import walks
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
INDEX = "https://wheels.example/cpu"

INTERPRETER = """#!{python}
import pathlib, sys
sys.version_info, sys.version = {version}, ".".join(map(str, {version})) + " (a stranger's)"
for name in {missing}:
    sys.modules[name] = None
if sys.argv[1] == "-c":
    exec(sys.argv[2])
    sys.exit()
if "--help" in sys.argv:
    print("" if "pip" in {missing} else "  --python <python>")
    sys.exit()
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
if sys.argv[2] == "venv":
    (made := pathlib.Path(sys.argv[-1], "bin")).mkdir(parents=True, exist_ok=True)
    (made / "python").unlink(missing_ok=True)
    (made / "python").symlink_to(pathlib.Path(__file__).resolve())
"""


class Checkout:
    """The files that ``make install`` reads, in a directory of their own."""

    def __init__(self, path: Path) -> None:
        self.path, self.log = path, path / "asked"
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, path)
        self.tools = path / "tools"
        self.tools.mkdir()
        for tool in ("bash", "cat", "grep", "sed", "rm", "make"):
            found = shutil.which(tool)
            assert found is not None, tool
            (self.tools / tool).symlink_to(found)

    def interpreter(self, name: str, version: tuple[int, int, int], missing: tuple[str, ...] = ()) -> None:
        """Puts a Python of that version on the PATH, without the ``missing`` modules."""
        program = self.tools / name
        program.write_text(INTERPRETER.format(python=sys.executable, version=version, missing=missing, log=str(self.log)))
        program.chmod(0o755)

    def install(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "--no-print-directory", "install", *arguments]
        clean = {"PATH": str(self.tools), "HOME": str(self.path)} | environment
        return subprocess.run(command, cwd=self.path, env=clean, capture_output=True, text=True, timeout=60, check=False)

    def asked(self) -> list[str]:
        """What was asked of interpreters since the last call, beside ``-c``."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line.removeprefix("-m ").replace("--disable-pip-version-check ", "") for line in lines]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a call said that changed nothing."""
    (line,) = (done.stdout + done.stderr).splitlines()
    assert done.returncode == 2
    return line


@pytest.mark.parametrize("version", [(3, 11, 7), (3, 12, 1), (3, 13, 0)])
def test_every_version_that_runs_this_makes_the_environment(checkout: Checkout, version: tuple[int, int, int]) -> None:
    checkout.interpreter("python3", version)
    done = checkout.install()
    assert done.returncode == 0, done.stderr
    assert "with python3 ({}.{}.{})".format(*version) in done.stdout
    assert "GB to download" in done.stdout
    venv, first, *_ = checkout.asked()
    assert (venv, first) == ("venv .venv", "pip install --no-compile -c constraints.txt -e .[all]")


def test_the_first_that_is_new_enough_is_taken(checkout: Checkout) -> None:
    checkout.interpreter("python3", (3, 10, 13))
    checkout.interpreter("python3.12", (3, 12, 1))
    assert "with python3.12 (3.12.1)" in checkout.install().stdout


@pytest.mark.parametrize("version", [(3, 9, 2), (3, 10, 13), (3, 14, 0)])
def test_a_version_that_does_not_run_this_is_refused_in_a_line(checkout: Checkout, version: tuple[int, int, int]) -> None:
    checkout.interpreter("python3", version)
    assert "myxo needs Python 3.11, 3.12 or 3.13, and none of python3 " in refusal(checkout.install())
    assert "python3 is {}.{}.{}".format(*version) in refusal(checkout.install(PYTHON="python3"))
    assert "/nowhere/python does not start" in refusal(checkout.install("PYTHON=/nowhere/python"))
    assert checkout.asked() == []


def test_a_python_without_ensurepip_takes_its_own_pip(checkout: Checkout) -> None:
    checkout.interpreter("python3", (3, 11, 7), missing=("ensurepip",))
    done = checkout.install()
    assert done.returncode == 0, done.stderr
    assert checkout.asked()[:3] == [
        "venv --without-pip .venv",
        "pip --python .venv/bin/python install --quiet pip",
        "pip install --no-compile -c constraints.txt -e .[all]",
    ]


def test_a_python_with_neither_says_what_to_install(checkout: Checkout) -> None:
    checkout.interpreter("python3", (3, 11, 7), missing=("ensurepip", "pip"))
    assert "`apt install python3-venv`" in refusal(checkout.install())


def test_an_index_of_cpu_wheels_gives_torch_alone_and_is_remembered(checkout: Checkout) -> None:
    checkout.interpreter("python3", (3, 11, 7))
    torch = f"pip install --no-compile --no-deps -c constraints.txt --index-url {INDEX} torch"
    assert checkout.install(TORCH_INDEX=INDEX).returncode == 0
    _, *pip = checkout.asked()
    assert pip[0] == torch
    assert INDEX not in " ".join(pip[1:])

    assert checkout.install().returncode == 0
    assert checkout.asked() == []  # as it is

    newer = (checkout.path / ".venv" / "ready").stat().st_mtime + 10
    os.utime(checkout.path / "constraints.txt", (newer, newer))
    checkout.install()
    assert checkout.asked()[:2] == ["venv .venv", torch]

    os.utime(checkout.path / "constraints.txt", (newer - 100, newer - 100))
    checkout.install(TORCH_INDEX="")
    assert checkout.asked()[:2] == ["venv --clear .venv", "pip install --no-compile -c constraints.txt -e .[all]"]


# --- how `make test` gives the files of tests to its workers

ENGINE = SHARED[0]


def test_a_piece_is_a_file_or_files_that_share_an_engine() -> None:
    assert piece_of("tests/e2e/test_objectives.py::test_a[tests/unit/x.py::y]") == "tests/e2e/test_objectives.py"
    assert [piece_of(f"{ENGINES}{name}.py::test_a") for name in ("turns", "router", "process")] == [*SHARED[::-1], f"{ENGINES}process.py"]
    assert [piece_of(f"{OF_RANKS}{name}.py::test_a") for name in ("lora", "cpu")] == [*RANKS]
    assert all((ROOT / f"{ENGINES}{name}.py").is_file() for name in (*OWN_ENGINES, *OF_WEIGHTS))
    assert all((ROOT / f"{OF_RANKS}{name}.py").is_file() for name in COMPARED)
    assert all((ROOT / piece).is_file() for piece in LONGEST if piece not in (*SHARED, *RANKS))
    assert all(folder.endswith("/") and list((ROOT / folder).glob("test_*.py")) for folder in WHOLE_RUNS)


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


# --- a table as one test fails where a row does, and names it


def test_all_rows_are_tried_and_those_that_fail_are_named(tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []

    @table("number", [1, 2, 3])
    @table(("word", "good"), [("a", True), ("b", False)])
    def tried(number: int, word: str, good: bool, tmp_path: Path) -> None:
        (tmp_path / "own").mkdir()
        seen.append((number, word))
        assert good or number == 1

    with pytest.raises(AssertionError, match=r"(?s)2 of 3:\n\(2,\): .*1 of 2:\n\('b', False\).*\n\(3,\): "):
        tried(tmp_path=tmp_path)
    assert seen == [(number, word) for number in (1, 2, 3) for word in ("a", "b")]


# --- docs/reading.md names files and names that exist, as few as it promises, and each file of a walk is next to another one of it

PAGE = (ROOT / "docs" / "reading.md").read_text()
WALKS = PAGE.split("\n## ")[1:]
STATION = re.compile(r"^\d+\. `([\w/]+\.py)` (.*?)(?=^\d+\. |^$)", re.MULTILINE | re.DOTALL)
MOST_FILES = {"One sample": 45, "One version of the weights": 25, "One value of a config": 12}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("services", "shared", "myxo", exclude_type_checking_imports=False)


@pytest.mark.parametrize(("title", "files"), walks())
def test_a_walk_is_short_and_its_files_know_each_other(title: str, files: list[str], graph: grimp.ImportGraph) -> None:
    assert len(set(files)) == len(files) <= MOST_FILES[title]
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files}
    for module in modules:
        near = graph.find_modules_directly_imported_by(module) | graph.find_modules_that_directly_import(module)
        assert near & modules, f"{module} neither imports another file of the walk nor is it imported by one"


@table(("path", "text"), [station for walk in WALKS for station in STATION.findall(walk)])
def test_a_station_is_there_and_has_what_the_page_names(path: str, text: str) -> None:
    source = (ROOT / path).read_text()
    named = [name for group in re.findall(r"\(((?:`\w+`(?:, )?)+)\)", text) for name in re.findall(r"`(\w+)`", group)]
    assert named, "a station says where to look"
    for name in named:
        assert re.search(rf"^(class|def|async def) {name}\b", source, re.MULTILINE), f"{path} has no {name}"
