"""A release: its version, its workflow, and the names and labels of images."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import shared

ROOT = Path(__file__).resolve().parents[3]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
COMPOSE = ROOT / "deploy" / "compose"


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
