"""Makes slime's import names importable, and in a wheel the names that Myxo's modules have in its repository.

A wheel has ``myxo.shared`` and ``myxo.services`` (docs/packaging.md). A user's files that import ``shared.hooks``, and configs that name
``shared.agents.mcp_agent:play``, work there as in a checkout: it is the same module under both names. Another ``shared`` that can be
imported wins.

``slime.utils.types`` and the others of `MODULES` are modules of Myxo's, one object under both names, so that files written for slime run as
they are. They win over those of a slime that can be imported, in whose modules is Ray; what Myxo has nothing of comes from there.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

PREFIX = __name__.rpartition("shared")[0]  # What stands before the names of the repository: nothing in a checkout, ``myxo.`` in a wheel

_PACKAGES = ("shared", "services")


def import_module(name: str) -> ModuleType:
    """Returns the module that a config or a function calls ``name``. Raises ImportError, and whatever importing it raises."""
    install_layout_names()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        own = _own(name)
        if own is None or not f"{name}.".startswith(f"{error.name}."):  # something else is missing, inside the module
            raise
        return importlib.import_module(own)


def install_layout_names() -> None:
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


_OURS = "shared.hooks.slime"

MODULES = {
    "slime": _OURS,
    "slime.backends": _OURS,
    "slime.backends.megatron_utils": _OURS,
    "slime.backends.megatron_utils.cp_utils": "shared.hooks.slime.model_functions",
    "slime.utils": _OURS,
    "slime.utils.async_utils": "shared.hooks.slime.http_requests",
    "slime.utils.data": "shared.hooks.slime.prompt_sources",
    "slime.utils.http_utils": "shared.hooks.slime.http_requests",
    "slime.utils.mask_utils": "shared.hooks.slime.turn_masks",
    "slime.utils.misc": "shared.hooks.loading",
    "slime.utils.processing_utils": "shared.hooks.slime.model_functions",
    "slime.utils.types": "shared.hooks.hook_sample",
    "slime.rollout": _OURS,
    "slime.rollout.data_source": "shared.hooks.slime.prompt_sources",
    "slime.rollout.base_types": "shared.hooks.returned_output",
    "slime.rollout.filter_hub": _OURS,
    "slime.rollout.filter_hub.base_types": "shared.hooks.filters",
    "slime.rollout.filter_hub.dynamic_sampling_filters": "shared.hooks.filters",
    "slime.rollout.on_policy_distillation": "shared.hooks.slime.model_functions",
    "slime.rollout.rm_hub": "shared.hooks.slime.reward_dispatch",
    "slime.rollout.rm_hub.deepscaler": "shared.rewards.boxed_math",
    "slime.rollout.rm_hub.f1": "shared.rewards.text_rewards",
    "slime.rollout.rm_hub.gpqa": "shared.rewards.text_rewards",
    "slime.rollout.rm_hub.ifbench": "shared.rewards.text_rewards",
    "slime.rollout.rm_hub.math_dapo_utils": "shared.rewards.text_rewards",
    "slime.rollout.rm_hub.math_utils": "shared.rewards.boxed_math",
    "slime.rollout.sample_hooks": "shared.hooks.slime.rollout_loop",
    "slime.rollout.sglang_rollout": "shared.hooks.slime.rollout_loop",
}
"""slime's module → ours. Those that are `shared.hooks.slime` itself are packages and hold nothing but the others."""


def install_slime_names() -> None:
    """Adds the finder, once, before that of files."""
    if not any(isinstance(finder, SlimeNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, SlimeNames())


INSTEAD = {
    "slime.agent": "an agent is a program that speaks to the engine's address, named in rollout.agent; with slime's checkout on "
    "PYTHONPATH it is slime's own",
    "slime.observability": "what is measured is in docs/metrics.md",
}
"""Packages of slime's that there is nothing of, and what there is instead."""


class SlimeNames(MetaPathFinder):
    """Finds the modules of `MODULES`, and others in a slime that can be imported. Raises ModuleNotFoundError, which says what there is."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "slime":
            return None
        if (ours := MODULES.get(name)) is not None:
            is_package = any(other.startswith(f"{name}.") for other in MODULES)
            spec = ModuleSpec(name, _EmptyPackage() if ours == _OURS else SameModule(ours), is_package=is_package)
            if spec.submodule_search_locations is not None:
                spec.submodule_search_locations += _directories(name)
            return spec
        if (theirs := _installed(name, path)) is not None:
            theirs.loader = _OfSlime(theirs.loader) if theirs.has_location and theirs.loader is not None else theirs.loader
            return theirs
        instead = INSTEAD.get(".".join(name.split(".")[:2]))
        lacks = "slime's own package has none" if _directories("slime") else "slime is not installed"
        reason = f"Myxo has nothing of it; {instead}" if instead is not None else f"{lacks}, and Myxo has {_there()}"
        raise ModuleNotFoundError(f"No module named {name!r}: {reason}", name=name)


class _OfSlime(Loader):
    """Loads a module of slime's own, and says what it lacks: slime's packages need not be installed here."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._loader.exec_module(module)
        except ImportError as error:
            if "slime's own" in str(error):  # of a module that this one imports
                raise
            needs = f"slime's own {module.__name__} ({module.__file__}) needs it, and Myxo has {_there()}"
            raise type(error)(f"{error}; {needs}", name=error.name) from error


class _EmptyPackage(Loader):
    """Makes a package that holds nothing but the modules that the finder finds in it."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        pass


def _installed(name: str, path: Sequence[str] | None = None) -> ModuleSpec | None:
    """Returns what the other finders have: that of paths, and those of packages that are installed to be edited."""
    others = (finder for finder in sys.meta_path if hasattr(finder, "find_spec") and not isinstance(finder, SlimeNames))
    return next((spec for finder in others if (spec := finder.find_spec(name, path)) is not None), None)


def _directories(package: str) -> list[str]:
    """Returns the directories of a package of slime's, where one can be imported: from inside a checkout, or beside it."""
    found = _installed("slime")
    roots = [Path(root) for root in (found and found.submodule_search_locations) or ()]
    roots = [root / "slime" if (root / "slime").is_dir() else root for root in roots]
    return [str(inner) for root in roots if (inner := root.joinpath(*package.split(".")[1:])).is_dir()]


def _there() -> str:
    return "of its modules " + ", ".join(sorted(other for other in MODULES if MODULES[other] != _OURS))
