"""How names of modules are changed on their way into the wheel."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.tables import table

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def layout() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wheel_layout", ROOT / "deploy" / "wheel" / "wheel_layout.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "shared" / "bus").mkdir(parents=True)
    (tmp_path / "services" / "reward").mkdir(parents=True)
    for name in ("shared/__init__", "shared/bus/__init__", "shared/bus/runs", "services/__init__", "services/reward/worker"):
        (tmp_path / f"{name}.py").touch()
    return tmp_path


@table(
    ("source", "expected"),
    [
        ("from shared.bus import runs", "from myxo.shared.bus import runs"),
        ("from shared import bus", "from myxo.shared import bus"),
        ("from shared.bus.runs import (\n    create,\n    phase,\n)", "from myxo.shared.bus.runs import (\n    create,\n    phase,\n)"),
        ("def f():\n    from services.reward import worker", "def f():\n    from myxo.services.reward import worker"),
        ("import shared", "from myxo import shared"),
        ("import shared.bus.runs as r", "import myxo.shared.bus.runs as r"),
        ("import shared.bus.runs\nshared.bus.runs", "import myxo.shared.bus.runs; from myxo import shared\nshared.bus.runs"),
        ('a = "µ"; from shared import bus', 'a = "µ"; from myxo.shared import bus'),
        ('"µ", "services.reward.worker"', '"µ", "myxo.services.reward.worker"'),
        ('"services.reward.worker.main"', '"myxo.services.reward.worker.main"'),
        ("x = {'shared.bus': 1}", "x = {'myxo.shared.bus': 1}"),
        ('"""``python -m services.reward``: one."""', '"""``python -m myxo.services.reward``: one."""'),
        ('f"python -m services.reward {x}"', 'f"python -m myxo.services.reward {x}"'),
    ],
)
def test_a_name_of_a_module_is_changed(source: str, expected: str, layout: ModuleType, project: Path) -> None:
    assert layout.moved(source, project) == expected


@table(
    "source",
    [
        "from .shared import bus",
        "from . import shared",
        "import shared_memory",
        "from sharedlib.bus import runs",
        "from myxo.run import shared",
        "x.shared.bus",
        '"shared.nothing.there"',
        '"shared"',
        '"shared.agents.mcp_agent:play"',  # as a config has it
        '"see shared.bus for more"',
        'f"{x}shared.bus"',
        'b"shared.bus"',
        "# from shared import bus",
    ],
)
def test_anything_else_stays(source: str, layout: ModuleType, project: Path) -> None:
    assert layout.moved(source, project) == source


@pytest.mark.parametrize(
    ("source", "words"), [('\nf"services.{x}"', "2: .*plain string"), ("import os, shared.bus", "1: .*one module a line")]
)
def test_a_name_that_cannot_be_followed_is_refused_with_its_line(source: str, words: str, layout: ModuleType, project: Path) -> None:
    with pytest.raises(layout.CannotBeMoved, match=words):
        layout.moved(source, project)


def test_the_description_has_no_links_into_the_repository(layout: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    assert "](docs/" in readme
    description = layout.without_relative_links(readme)
    assert not [link for link in re.findall(r"\]\(([^)]*)\)", description) if not link.startswith(("https:", "#"))]
    assert (
        layout.without_relative_links("see [there](https://a.example/b) and [here](docs/x.md)")
        == "see [there](https://a.example/b) and here"
    )
    assert layout.without_relative_links("a\n\n[![picture](docs/p.png)](docs/c.md)\n\nb\n") == "a\n\nb\n"
    assert "do the same (the package)" in description


def test_every_module_of_the_project_can_be_laid_out(layout: ModuleType, tmp_path: Path) -> None:
    layout.lay_out(ROOT, tmp_path)
    assert not (tmp_path / "shared").exists()
    assert (tmp_path / "myxo" / "shared" / "config" / "run_config.py").is_file()
