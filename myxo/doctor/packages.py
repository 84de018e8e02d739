"""Examines Python, the installed packages, and whether torch is of a build that this machine can use."""

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from myxo.doctor.diagnosis import Diagnosis
from myxo.quickstart.bundled_files import pinned
from shared.config import devices

OLDEST, NEWEST = (3, 11), (3, 13)
"""Versions of Python that Myxo is tested with."""

NEEDED = {"": "every service", "embedded": "servers of a run on this machine", "trainer": "the trainer", "rollout": "engines"}
"""The extras without which `myxo up` starts nothing, and whom they are for."""

OWN_PACKAGES = ("sglang", "xgrammar")
"""Packages that no extra can bring: they are installed without what they ask for (see the Makefile)."""


def examine_python(_: Path) -> Iterator[Diagnosis]:
    """Yields the version of Python."""
    found = f"Python {sys.version.split()[0]}, {sys.executable}"
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        yield Diagnosis("python", "ok", found)
    else:
        wanted = " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))
        yield Diagnosis("python", "note", f"{found}; Myxo is tested with {wanted}", "python3.11 -m venv .venv")


def examine_packages(_: Path) -> Iterator[Diagnosis]:
    """Yields the packages that are missing, or of a version that Myxo does not take."""
    requirements = [Requirement(text) for text in importlib.metadata.requires("myxo") or []]
    faults = 0
    for extra, whom in NEEDED.items():
        wanted = [one for one in requirements if _of_extra(one, extra)]
        for problem in filter(None, map(_problem, wanted)):
            faults += 1
            yield Diagnosis("packages", "fault", f"{problem}; it is for {whom}", _install(extra))
    for package in OWN_PACKAGES:
        if importlib.util.find_spec(package) is None:
            faults += 1
            remedy = f"pip install --no-deps {pinned(package)}"
            yield Diagnosis("packages", "fault", f"{package} is not installed; it is for engines", remedy)
    if not faults:
        yield Diagnosis("packages", "ok", f"myxo {importlib.metadata.version('myxo')} and all that it needs")


def examine_torch(_: Path) -> Iterator[Diagnosis]:
    """Yields whether torch's build fits the machine. It is not imported: that takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return  # said among the packages
    cuda = cuda_of(Path(spec.origin).with_name("version.py"))
    version = importlib.metadata.version("torch")
    if devices.gpus() and cuda is None:
        found = f"torch {version} is built for CPUs alone, and this machine has {devices.gpus()} GPUs"
        yield Diagnosis("torch", "fault", found, "pip install --force-reinstall --no-deps torch==2.13.0")
    else:
        yield Diagnosis("torch", "ok", f"torch {version}, " + (f"for CUDA {cuda}" if cuda else "for CPUs"))


def cuda_of(version_file: Path) -> str | None:
    """Returns the version of CUDA that torch was built for, as its own ``version.py`` says; None: for CPUs."""
    found = re.search(r"^cuda\b[^=]*= *'([0-9.]+)'", version_file.read_text(), re.MULTILINE)
    return None if found is None else found[1]


def _of_extra(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    if marker is None:
        return extra == ""
    return bool(extra) and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _problem(requirement: Requirement) -> str:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed"
    fits = requirement.specifier.contains(version, prereleases=True)
    return "" if fits else f"{requirement.name} {version} is installed, {requirement.specifier} is needed"


def _install(extra: str) -> str:
    return f"pip install 'myxo[{extra}]'" if extra else "pip install myxo"
