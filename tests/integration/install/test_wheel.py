"""The wheel, built as `python -m build` builds it and installed beside other people's `shared` and `services`."""

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("shared", "services", "myxo", "deploy/wheel", "examples/arithmetic")
FILES = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CITATION.cff", "constraints.txt")

pytestmark = pytest.mark.timeout(1200)

FOREIGN = "raise AssertionError(__name__ + ' is another project, and was imported')\n"

ALL_THAT_NEED_NO_TORCH = """
import importlib, pkgutil, sys
import myxo
WITH_TORCH = ("myxo.shared.transfer", "myxo.services.trainer", "myxo.services.rollout.engine", "myxo.services.rollout.function_worker")
imported = 0
for found in pkgutil.walk_packages(myxo.__path__, "myxo.", onerror=lambda name: None):
    if not found.name.startswith((*WITH_TORCH, "myxo.examples")) and not found.name.endswith("__main__"):
        importlib.import_module(found.name)
        imported += 1
assert imported > 300, imported
assert not {"shared", "services"} & sys.modules.keys()
assert all("/myxo/" in module.__file__ for name, module in sys.modules.items() if name.startswith("myxo.") and module.__file__)
"""


def built(project: Path, out: Path) -> Path:
    """Builds source distribution and wheel from it, without a network; returns the wheel."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(project)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,) = out.glob("myxo-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        shutil.copytree(ROOT / name, room / "project" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, room / "project")
    return built(room / "project", room / "dist")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and foreign packages of the names that it must not have; dependencies are this environment's."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=300)
    (site,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for name in ("shared", "services"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(FOREIGN)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment


def run(installed: Path, *words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    command = [str(installed / "bin" / "python"), *words]
    return subprocess.run(command, cwd=cwd, env=inherited | environment, capture_output=True, text=True, timeout=600)


def test_it_puts_one_package_at_top_level(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        top_level = next(name for name in names if name.endswith("top_level.txt"))
        assert archive.read(top_level).decode().split() == ["myxo"]
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"myxo"}
    for name in ("services/console/web/index.html", "services/console/web/vendor/uPlot/LICENSE", "shared/config/megatron_flags.json"):
        assert f"myxo/{name}" in names
    assert {"myxo/constraints.txt", "myxo/examples/arithmetic/quickstart.toml"} < set(names)


def test_nothing_in_it_names_a_module_as_the_repository_does(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sources = {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")}
    modules = {name.removesuffix(".py").removesuffix("/__init__").removeprefix("myxo/").replace("/", ".") for name in sources}
    modules = {name for name in modules if name.startswith(("shared.", "services."))}
    assert len(modules) > 300
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                assert (node.module or "").partition(".")[0] not in ("shared", "services"), f"{name}:{node.lineno}"
            elif isinstance(node, ast.Import):
                assert not {alias.name.partition(".")[0] for alias in node.names} & {"shared", "services"}, f"{name}:{node.lineno}"
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in modules, f"{name}:{node.lineno}"
                assert not any(f"python -m {root}." in node.value for root in ("shared", "services")), f"{name}:{node.lineno}"


@pytest.mark.extra
def test_all_that_needs_no_torch_imports_beside_foreign_packages(installed: Path, tmp_path: Path) -> None:
    done = run(installed, "-c", ALL_THAT_NEED_NO_TORCH, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-m", "myxo", "--version"], 0, "myxo 0."),
        pytest.param(["-m", "myxo", "quickstart", "--help"], 0, "No GPU, no checkout", marks=pytest.mark.extra),
        (["-m", "myxo.services.buffer"], 2, "NATS_URL"),
    ],
)
def test_commands_and_services_start_beside_foreign_packages(
    words: list[str], code: int, said: str, installed: Path, tmp_path: Path
) -> None:
    done = run(installed, *words, cwd=tmp_path)
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr


USERS_HOOK = """
import shared.hooks as theirs
from shared.hooks import Sample
from shared.hooks.filters import nonzero_std
import myxo.shared.hooks.filters as ours
import myxo.shared.hooks

def reward():
    return theirs is myxo.shared.hooks and Sample is myxo.shared.hooks.Sample and nonzero_std is ours.nonzero_std and theirs.__name__
"""


@pytest.mark.extra
def test_a_users_file_may_say_shared_where_nobody_else_is_called_so(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "of_a_user.py").write_text(USERS_HOOK)
    program = """

from myxo.shared.hooks import load
print(load("reward.custom_rm_path", "of_a_user:reward")())
"""
    (site,) = installed.glob("lib/python*/site-packages")
    alone = tmp_path / "alone"
    shutil.copytree(site / "myxo", alone / "myxo")
    done = run(Path(sys.prefix), "-c", program, cwd=tmp_path, PYTHONPATH=f"{alone}:{tmp_path}", PYTHONSAFEPATH="1")
    assert done.stdout == "myxo.shared.hooks\n", done.stderr


@pytest.mark.extra
def test_a_config_may_name_a_function_of_myxos_beside_a_foreign_package(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "__init__.py").touch()
    (tmp_path / "shared" / "rewards.py").write_text("def mine():\n    return 'theirs'\n")
    program = """
from myxo.shared.hooks import load
from myxo.shared.runtime.errors import ConfigError
print(load("reward.custom_rm_path", "shared.rewards:mine")())
print(load("rollout.agent", "shared.agents.mcp_agent:play").__module__)
try:
    load("rollout.agent", "shared.nothing:play")
except ConfigError as error:
    print(error)
"""
    done = run(installed, "-c", program, cwd=tmp_path)
    theirs, ours, refused = done.stdout.splitlines()
    assert (theirs, ours) == ("theirs", "myxo.shared.agents.mcp_agent"), done.stderr
    assert "rollout.agent" in refused and "shared.nothing" in refused
