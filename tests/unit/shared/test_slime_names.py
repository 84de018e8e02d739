"""slime's import names: Myxo's own objects, and in a checkout of slime its own modules beside them."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from shared.hooks import HookSample, import_names, load
from shared.hooks.loading import split_path
from shared.runtime.errors import ConfigError
from tests.support.service_process import ROOT
from tests.support.tables import table


@table(
    ("path", "parts"),
    [
        ("package.module:function", ("package.module", "function")),
        ("package.module.function", ("package.module", "function")),
        ("module.function", ("module", "function")),
        ("module:function", ("module", "function")),
    ],
)
def test_a_path_has_a_colon_or_a_dot_before_its_function(path: str, parts: tuple[str, str]) -> None:
    assert split_path(path) == parts


def test_functions_are_found_by_slimes_paths_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_slimes_user.py").write_text(
        "from slime.utils.types import Sample\nimport slime.utils.types as types\n"
        "def f(args):\n    return Sample, types.Sample.Status.COMPLETED\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load("a.b", "of_slimes_user.f")(None) == (HookSample, HookSample.Status.COMPLETED)
    assert load("a.b", "of_slimes_user:f") is load("a.b", "of_slimes_user.f")


@table("name", sorted(import_names.MODULES))
def test_every_name_is_one_object_under_both_names(name: str) -> None:
    import_names.install_slime_names()
    found, ours = importlib.import_module(name), import_names.MODULES[name]
    assert found.__name__ == name if ours == "shared.hooks.slime" else found is importlib.import_module(ours)
    parent, _, member = name.rpartition(".")
    assert not parent or getattr(importlib.import_module(parent), member) is found


def test_a_module_that_is_not_there_is_refused_with_those_that_are() -> None:
    import_names.install_slime_names()
    words = r"No module named 'slime.ray': slime is not installed, and Myxo has of its modules .*slime.utils.types"
    with pytest.raises(ModuleNotFoundError, match=words):
        importlib.import_module("slime.ray.actor")
    with pytest.raises(ConfigError, match=r"cannot be imported: No module named 'slime.plugins'.*slime.utils.types"):
        load("a.b", "slime.plugins.f")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("from slime.agent.adapters import AnthropicAdapter", r"No module named 'slime.agent'.*nothing of it.*rollout\.agent"),
        ("from slime.observability.trace_utils import trace_span", r"No module named 'slime.observability'.*docs/metrics.md"),
        ("from slime.utils.processing_utils import encode_image_for_rollout_engine", "is for images: Myxo's prompts and models are text"),
    ],
)
def test_what_there_is_nothing_of_is_refused_with_what_there_is(
    line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_another.py").write_text(line)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "of_another", raising=False)
    with pytest.raises(ConfigError, match=words):
        load("a.b", "of_another.f")


CHECKOUT = {
    "slime/__init__.py": "",
    "slime/utils/__init__.py": "",
    "slime/utils/types.py": "import ray\n",
    "slime/utils/lengths.py": "from slime.utils.types import Sample\nlongest = max\n",
    "slime/rollout/__init__.py": "",
    "slime/rollout/rm_hub/__init__.py": "import ray\n",
    "slime/rollout/rm_hub/own_grader.py": "from slime.rollout.rm_hub.f1 import f1_score\ndef grade(args, sample): return 1.0\n",
    "slime/ray/__init__.py": "",
    "slime/ray/actor_group.py": "import ray\n",
    "slime/ray/inner.py": "import slime.ray.actor_group\n",
    "slime/agent/parsing.py": "def parsed(text): return text\n",
}
"""A checkout of slime, whose types and rewards want Ray."""


EDITED = """import sys
from importlib.util import spec_from_file_location
class Edited:
    find_spec = staticmethod(lambda name, *_: spec_from_file_location(name, FILE) if name == "slime" else None)
sys.meta_path.append(Edited)
"""
"""How setuptools finds a package that is installed to be edited."""


@pytest.mark.parametrize("place", ["", "..", "../.."], ids=["inside", "beside", "installed to be edited"])
def test_from_a_checkout_of_slime_our_names_win_and_its_helpers_load(place: str, tmp_path: Path) -> None:
    for name, text in CHECKOUT.items():
        file = tmp_path / "slime" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    program = (
        "import importlib\nfrom shared.hooks import HookSample, load\n"
        "load('a.b', 'slime.rollout.rm_hub.own_grader.grade'); load('a.b', 'slime.agent.parsing:parsed')\n"
        "from slime.utils.types import Sample\nassert Sample is HookSample\n"
        "from slime.utils import lengths\nassert (lengths.Sample, lengths.longest) == (HookSample, max), lengths\n"
        "for name in ('slime.ray.inner', 'slime.ray.absent'):\n"
        "    try: importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error: print(error)\n"
    )
    if place == "../..":
        program = EDITED.replace("FILE", repr(str(tmp_path / "slime" / "slime" / "__init__.py"))) + program
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path / "slime" / place, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    needs, absent = done.stdout.splitlines()
    assert needs.startswith("No module named 'ray'; slime's own slime.ray.actor_group (")
    assert "needs it, and Myxo has of its modules" in needs
    assert absent.startswith("No module named 'slime.ray.absent': slime's own package has none, and Myxo has of its modules slime.")


def test_the_names_are_there_without_torch() -> None:
    program = (
        "import sys, importlib\nfrom shared.hooks.import_names import MODULES, install_slime_names; install_slime_names()\n"
        "for name in MODULES: importlib.import_module(name)\n"
        "print(sorted({'torch', 'transformers', 'sglang'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
