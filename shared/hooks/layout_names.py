"""Makes Myxo's modules importable under the names that they have in its repository, where they are installed below ``myxo``.

A wheel has ``myxo.shared`` and ``myxo.services`` (docs/packaging.md). A user's files that import ``shared.hooks``, and configs that name
``shared.agents.mcp_agent:play``, work there as in a checkout: it is the same module under both names. Another ``shared`` that can be
imported wins.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

PREFIX = __name__.rpartition("shared")[0]
"""What stands before the names of the repository: nothing in a checkout, ``myxo.`` in a wheel."""

_PACKAGES = ("shared", "services")


def import_module(name: str) -> ModuleType:
    """Returns the module that a config or a function calls ``name``. Raises ImportError, and whatever importing it raises."""
    install()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        own = _own(name)
        if own is None or not f"{name}.".startswith(f"{error.name}."):  # something else is missing, inside the module
            raise
        return importlib.import_module(own)


def install() -> None:
    """Adds the finder, once; in a checkout there is nothing for it to do."""
    if PREFIX and not any(isinstance(finder, LayoutNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, LayoutNames())


def _own(name: str) -> str | None:
    """Returns the name of a module of Myxo's in this layout, by its name in the repository."""
    return f"{PREFIX}{name}" if PREFIX and name.partition(".")[0] in _PACKAGES else None


class LayoutNames(MetaPathFinder):
    """Finds Myxo's packages by their names in the repository, unless another package has such a name, and all that is in those it found.

    It comes before the finder of files, which would load a second ``shared.hooks.loading`` from the path of the first.
    """

    def __init__(self) -> None:
        self._found: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        own, package = _own(name), name.rpartition(".")[0]
        if own is None or (package not in self._found if package else PathFinder.find_spec(name) is not None):
            return None
        if importlib.util.find_spec(own) is None:
            return None
        self._found.add(name)
        return ModuleSpec(name, SameModule(own))


class SameModule(Loader):
    """Gives the module ``ours`` under another name."""

    def __init__(self, ours: str) -> None:
        self._ours = ours
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._ours)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # of its own name, where the other had been put
