"""Makes slime's import names importable, so that files written for it run as they are.

``slime.utils.types`` and the others of `MODULES` are modules of `shared.hooks.slime`, one object under both names. They win over those of a
slime that can be imported, in whose modules is Ray; what Myxo has nothing of comes from there.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from shared.hooks.layout_names import SameModule

_OURS = "shared.hooks.slime"

MODULES = {
    "slime": _OURS,
    "slime.backends": _OURS,
    "slime.backends.megatron_utils": _OURS,
    "slime.backends.megatron_utils.cp_utils": f"{_OURS}.whole_responses",
    "slime.utils": _OURS,
    "slime.utils.async_utils": f"{_OURS}.background_loop",
    "slime.utils.data": f"{_OURS}.prompt_dataset",
    "slime.utils.http_utils": f"{_OURS}.http_requests",
    "slime.utils.mask_utils": f"{_OURS}.turn_masks",
    "slime.utils.misc": f"{_OURS}.function_loading",
    "slime.utils.processing_utils": f"{_OURS}.model_processors",
    "slime.utils.types": f"{_OURS}.sample_types",
    "slime.rollout": _OURS,
    "slime.rollout.data_source": f"{_OURS}.prompt_sources",
    "slime.rollout.base_types": f"{_OURS}.rollout_output",
    "slime.rollout.filter_hub": _OURS,
    "slime.rollout.filter_hub.base_types": "shared.hooks.filters",
    "slime.rollout.filter_hub.dynamic_sampling_filters": "shared.hooks.filters",
    "slime.rollout.on_policy_distillation": f"{_OURS}.on_policy_distillation",
    "slime.rollout.rm_hub": f"{_OURS}.reward_dispatch",
    "slime.rollout.rm_hub.deepscaler": "shared.rewards.boxed_math",
    "slime.rollout.rm_hub.f1": "shared.rewards.text_rewards",
    "slime.rollout.rm_hub.gpqa": "shared.rewards.text_rewards",
    "slime.rollout.rm_hub.ifbench": "shared.rewards.text_rewards",
    "slime.rollout.rm_hub.math_dapo_utils": "shared.rewards.text_rewards",
    "slime.rollout.rm_hub.math_utils": f"{_OURS}.math_rewards",
    "slime.rollout.sglang_rollout": f"{_OURS}.rollout_loop",
}
"""slime's module → ours. Those that are `shared.hooks.slime` itself are packages and hold nothing but the others."""


def install() -> None:
    """Adds the finder, once, before that of files."""
    if not any(isinstance(finder, SlimeNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, SlimeNames())


INSTEAD = {
    "slime.agent": "an agent is a program that speaks to the engine's address, named in rollout.agent",
    "slime.observability": "what is measured is in docs/metrics.md",
}
"""Packages of slime's that there is nothing of, and what there is instead."""


class SlimeNames(MetaPathFinder):
    """Finds the modules of `MODULES`, and others in a slime that can be imported. Raises ModuleNotFoundError, which says what there is."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "slime":
            return None
        if (ours := MODULES.get(name)) is not None:
            spec = ModuleSpec(name, _EmptyPackage() if ours == _OURS else SameModule(ours), is_package=_is_package(name))
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


def _is_package(name: str) -> bool:
    return any(other.startswith(f"{name}.") for other in MODULES)
