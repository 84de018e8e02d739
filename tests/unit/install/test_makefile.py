"""How the Makefile makes the environment, with an interpreter that only notes what it is asked to do."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
