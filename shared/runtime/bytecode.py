"""Keeps the bytecode of what an engine imports, where Python itself would not.

SGLang's processes import some ten thousand modules, one process after the other. Without bytecode on disk each compiles all of them again,
and most of an engine's start is that (seen: 53 s of 73). It is not there in an environment that was unpacked rather than installed, and
Python does not write it where PYTHONDONTWRITEBYTECODE is set or the packages are read-only.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from shared.runtime import user_cache

PREFIX, OFF = "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"


def bytecode_variables(environment: Mapping[str, str], package: str = "sglang.srt") -> dict[str, str]:
    """Returns the variables by which a child keeps bytecode in the user's cache; none where it lies beside the sources, or will.

    Args:
        environment: the child's, otherwise. package: its largest one; the directory of a package that is not installed is nobody's.
    """
    parent, _, name = package.partition(".")
    spec, cache = importlib.util.find_spec(parent), user_cache.directory()
    if spec is None or cache is None or environment.get(PREFIX):
        return {}
    folders = [Path(root, name) for root in spec.submodule_search_locations or ()]
    if any(any(folder.glob("__pycache__/*.pyc")) for folder in folders):
        return {}
    if not environment.get(OFF) and all(os.access(folder, os.W_OK) for folder in folders):
        return {}
    return {PREFIX: str(cache / "bytecode"), OFF: ""}
