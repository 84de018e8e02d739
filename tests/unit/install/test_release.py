"""A release: its version, its wheel, and what its images install."""

import importlib.util
import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import shared
from tests.support.tables import table

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = ROOT / "deploy" / "compose"
EXTRAS = ("buffer", "reward", "rollout", "gateway", "trainer", "engine-cpu", "parquet", "media", "hub", "report", "accounts", "router")
EXTRAS += ("wandb",)
"""The extras that lock.sh locks: those that an image may be built with."""


def locked() -> dict[str, tuple[str, int]]:
    """Name → version and number of hashes."""
    entries = re.split(r"\n(?=\S)", (COMPOSE / "requirements.lock").read_text())
    found = [(re.match(r"([\w.-]+)==([^ ;\\\n]+)", entry), entry.count("--hash=sha256:")) for entry in entries]
    return {canonicalize_name(match[1]): (match[2], hashes) for match, hashes in found if match}


def constrained() -> dict[str, str]:
    lines = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_the_lock_holds_the_versions_of_the_constraints_each_with_hashes() -> None:
    constraints = constrained()
    for name, (version, hashes) in locked().items():
        assert hashes > 0, f"{name} has no hash: run deploy/compose/lock.sh"
        assert constraints.get(name, version) == version, f"{name} is {version} in the lock: run deploy/compose/lock.sh"


def test_all_that_an_image_asks_for_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(text for extra in EXTRAS for text in project["optional-dependencies"][extra])]
    known, seen, waiting = locked(), set[tuple[str, str]](), [Requirement(text) for text in asked]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        assert name in known, f"{name} is not in the lock: run deploy/compose/lock.sh"
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                further = [Requirement(text) for text in requires(name) or ()]
            except PackageNotFoundError:  # of an extra that is not installed here
                continue
            here = [one for one in further if one.marker is None or one.marker.evaluate({"extra": extra})]
            waiting += [one for one in here if name != "torch" or canonicalize_name(one.name) in known]


def test_both_builds_of_torch_are_locked() -> None:
    version, hashes = locked()["torch"]
    cpu = (COMPOSE / "torch-cpu.lock").read_text()
    assert f"torch=={version}+cpu" in cpu and cpu.count("--hash=sha256:") and hashes


def test_what_installs_the_rest_is_locked_alike() -> None:
    assert (COMPOSE / "uv.lock").read_text().strip() in (COMPOSE / "requirements.lock").read_text()


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml"])
def test_base_images_are_named_by_digest(name: str) -> None:
    text = (COMPOSE / name).read_text()
    named = re.findall(r"(?:ARG \w+_IMAGE=|_IMAGE:-)(\S+?)[}\s]", text)
    assert named and all(re.search(r"@sha256:[0-9a-f]{64}$", image) for image in named), named


def test_every_claim_on_security_points_at_a_test_that_is_there() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    claims = [line for line in page.split("## What holds")[1].split("## What does not")[0].splitlines() if line.startswith("| ")][1:]
    assert len(claims) > 15
    for claim in claims:
        paths = re.findall(r"\]\((tests/[^)]+)\)", claim)
        assert paths and all((ROOT / path).is_file() for path in paths), claim


# --- a release: its version, its workflow, and the names and labels of images

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"


@pytest.fixture(scope="module")
def jobs() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load(WORKFLOW.read_text())["jobs"])


def needed(jobs: dict[str, dict[str, Any]], job: str) -> set[str]:
    """All jobs that have to succeed before ``job`` starts."""
    direct = jobs[job].get("needs", [])
    names = [direct] if isinstance(direct, str) else direct
    return set(names).union(*(needed(jobs, name) for name in names))


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == shared.__version__
    assert citation["cff-version"] == "1.2.0" and citation["authors"] and citation["title"] and citation["message"]


@pytest.mark.parametrize("job", ["pypi", "images", "github"])
def test_nothing_is_published_that_was_not_tested(job: str, jobs: dict[str, dict[str, Any]]) -> None:
    assert {"build", "checks", "quickstart"} <= needed(jobs, job)


def test_what_pypi_gets_is_the_wheel_that_was_tested(jobs: dict[str, dict[str, Any]]) -> None:
    for job in ("quickstart", "pypi", "github"):
        assert any("actions/download-artifact" in step.get("uses", "") and step["with"]["name"] == "dist" for step in jobs[job]["steps"])
    assert jobs["quickstart"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]


def test_rights_are_given_where_they_are_used_alone(jobs: dict[str, dict[str, Any]]) -> None:
    assert yaml.safe_load(WORKFLOW.read_text())["permissions"] == {"contents": "read"}
    writes = {job: {right for right, level in (jobs[job].get("permissions") or {}).items() if level == "write"} for job in jobs}
    assert {job: rights for job, rights in writes.items() if rights} == {
        "pypi": {"id-token"},
        "images": {"packages"},
        "github": {"contents"},
    }


def test_actions_are_named_by_commit_and_every_job_has_a_deadline(jobs: dict[str, dict[str, Any]]) -> None:
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", action) for action in used), used
    assert all(job["timeout-minutes"] > 0 for job in jobs.values())


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_images_of_ours_have_the_version_as_their_tag(name: str) -> None:
    images = re.findall(r"image: (\$\{MYXO_IMAGES\S+)", (COMPOSE / name).read_text())
    assert images and all(re.fullmatch(r"\$\{MYXO_IMAGES:-myxo\}-[a-z-]+:\$\{MYXO_VERSION:-latest\}", image) for image in images), images


def test_every_image_that_is_built_has_labels() -> None:
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    built = {name: service["build"]["labels"] for name, service in services.items() if "build" in service}
    assert len(built) >= 7
    for labels in built.values():
        assert labels["org.opencontainers.image.version"] == "${MYXO_VERSION:-unreleased}"
        assert {"org.opencontainers.image.licenses", "org.opencontainers.image.revision"} <= labels.keys()


# --- how names of modules are changed on their way into the wheel


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
