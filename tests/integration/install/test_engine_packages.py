"""What `myxo quickstart` installs beside Myxo, by a real pip from a folder of wheels; and what it says where it cannot."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from myxo.commands import quickstart as engine_packages
from myxo.commands.quickstart import ENGINE_PACKAGES, ENGINE_SITE, SITE_VARIABLE, NotPrepared, pinned, provide


def write_wheel(folder: Path, requirement: str) -> None:
    """A wheel of one module, which asks for what is nowhere."""
    name, _, version = requirement.partition("==")
    described = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: a-kernel-for-cuda\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", f"version = {version!r}\n")
        archive.writestr(f"{described}/METADATA", metadata)
        archive.writestr(f"{described}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{described}/RECORD", "")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place that pip looks at, empty."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, value in {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """This environment as one of a stranger's, who has only what an extra can bring."""
    find_spec: Callable[..., object] = engine_packages.importlib.util.find_spec
    monkeypatch.setattr(
        engine_packages.importlib.util, "find_spec", lambda name, *rest: None if name in ENGINE_PACKAGES else find_spec(name, *rest)
    )
    monkeypatch.setattr(sys, "prefix", "/nowhere")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("PYTHONPATH", SITE_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("without_sglang")
def test_the_tested_versions_are_installed_once_and_seen_by_children(wheels: Path, tmp_path: Path) -> None:
    for name in ENGINE_PACKAGES + ENGINE_SITE:
        write_wheel(wheels, pinned(name))
    provide(tmp_path / "engine")
    packages, site = tmp_path / "engine" / "packages", tmp_path / "engine" / "engine-site"
    assert sys.path[-1] == os.environ["PYTHONPATH"] == str(packages) and os.environ[SITE_VARIABLE] == str(site)
    program = "import sglang, xgrammar; print(sglang.version, sglang.__file__)"
    version, path = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert (f"sglang=={version}", Path(path).parent) == (pinned("sglang"), packages / "sglang")
    assert not (packages / "torchvision").exists() and (site / "torchvision").is_dir()
    for wheel in wheels.iterdir():
        wheel.unlink()
    provide(tmp_path / "engine")  # nothing is left that it could install


@pytest.mark.extra
@pytest.mark.usefixtures("without_sglang")
def test_what_was_cut_off_or_is_of_another_version_is_installed_anew(wheels: Path, tmp_path: Path) -> None:
    packages = tmp_path / "engine" / "packages"
    (packages / "sglang").mkdir(parents=True)
    (packages / "installed").write_text("sglang==0.0.1")
    for name in ENGINE_PACKAGES + ENGINE_SITE:
        write_wheel(wheels, pinned(name))
    provide(tmp_path / "engine")
    assert (packages / "sglang" / "__init__.py").is_file()
    assert (packages / "installed").read_text().split() == [pinned(name) for name in ENGINE_PACKAGES]


@pytest.mark.extra
@pytest.mark.usefixtures("without_sglang")
def test_what_cannot_be_installed_is_named_with_the_command_and_nothing_counts_as_installed(wheels: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(NotPrepared, match=r"pip install .*--no-deps.*ended with 1:.*sglang") as raised:
            provide(tmp_path / "engine")
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "engine" / "packages" / "installed").exists()


@pytest.mark.usefixtures("wheels", "without_sglang")
def test_without_an_installer_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = engine_packages.importlib.util.find_spec
    monkeypatch.setattr(engine_packages.importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else found(name, *rest))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotPrepared, match=rf"neither pip nor uv.*{pinned('sglang')} {pinned('xgrammar')}"):
        provide(tmp_path / "engine")


def test_an_environment_that_has_all_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SITE_VARIABLE, str(tmp_path))
    before = (list(sys.path), os.environ.get("PYTHONPATH"))
    provide(tmp_path / "engine")
    assert (sys.path, os.environ.get("PYTHONPATH")) == before and not (tmp_path / "engine").exists()
