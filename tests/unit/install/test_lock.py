"""What the images install: the versions of constraints.txt, each with hashes, on bases named by digest; and the page on security."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
