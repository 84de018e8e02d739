"""Makes slime's import names importable where slime is not installed, so that files written for it run as they are.

``slime.utils.types`` and the others of `MODULES` are modules of `shared.hooks.slime`, one object under both names. The finder comes last,
so that a slime that is installed wins.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
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
    "slime.rollout.rm_hub.f1": "shared.rewards.f1",
    "slime.rollout.rm_hub.gpqa": "shared.rewards.gpqa",
    "slime.rollout.rm_hub.ifbench": "shared.rewards.ifbench",
    "slime.rollout.rm_hub.math_dapo_utils": "shared.rewards.dapo",
    "slime.rollout.rm_hub.math_utils": f"{_OURS}.math_rewards",
    "slime.rollout.sglang_rollout": f"{_OURS}.rollout_loop",
}
"""slime's module → ours. Those that are `shared.hooks.slime` itself are packages and hold nothing but the others."""


def install() -> None:
    """Adds the finder, once."""
    if not any(isinstance(finder, SlimeNames) for finder in sys.meta_path):
        sys.meta_path.append(SlimeNames())


INSTEAD = {
    "slime.agent": "an agent is a program that speaks to the engine's address, named in rollout.agent",
    "slime.observability": "what is measured is in docs/metrics.md",
}
"""Packages of slime's that there is nothing of, and what there is instead."""


class SlimeNames(MetaPathFinder):
    """Finds the modules of `MODULES`. Raises ModuleNotFoundError for others of slime's, which says what there is."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "slime" or (name != "slime" and not _is_ours(sys.modules.get("slime"))):
            return None
        if name not in MODULES:
            there = ", ".join(sorted(other for other in MODULES if MODULES[other] != _OURS))
            if (instead := INSTEAD.get(".".join(name.split(".")[:2]))) is not None:
                raise ModuleNotFoundError(f"No module named {name!r}: Myxo has nothing of it; {instead}", name=name)
            raise ModuleNotFoundError(f"No module named {name!r}: slime is not installed, and Myxo has of its modules {there}", name=name)
        ours = MODULES[name]
        return ModuleSpec(name, _EmptyPackage() if ours == _OURS else SameModule(ours), is_package=_is_package(name))


class _EmptyPackage(Loader):
    """Makes a package that holds nothing but the modules that the finder finds in it."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        pass


def _is_package(name: str) -> bool:
    return any(other.startswith(f"{name}.") for other in MODULES)


def _is_ours(module: ModuleType | None) -> bool:
    return module is not None and isinstance(getattr(module.__spec__, "loader", None), _EmptyPackage)
