"""The build backend of the package: setuptools', but a wheel is built from a tree that `wheel_layout` has laid out.

Editable installations and source distributions keep the repository's layout.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
)
from wheel_layout import lay_out

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, Any] | None


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Builds the wheel; returns its name."""
    wheels = os.path.abspath(wheel_directory)
    with _laid_out():
        return build_meta.build_wheel(wheels, config_settings)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    """Writes the wheel's metadata; returns the name of their directory."""
    metadata = os.path.abspath(metadata_directory)
    with _laid_out():
        return build_meta.prepare_metadata_for_build_wheel(metadata, config_settings)


@contextlib.contextmanager
def _laid_out() -> Iterator[None]:
    """Makes the wheel's tree the working directory, from which setuptools builds."""
    with tempfile.TemporaryDirectory(prefix="myxo-wheel-") as tree:
        lay_out(Path.cwd(), Path(tree))
        with contextlib.chdir(tree):
            yield
