"""On the PYTHONPATH of an engine, makes SGLang report the version of a request's end alone, as its releases before 0.5.20 do.

Python imports a module of this name at its start, in every process.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _older_scheduler(module: Any) -> None:
    del module.Scheduler.record_weight_version_change
    module.Scheduler.handle_update_weight_version = lambda self, request: module.UpdateWeightVersionReqOutput()


def _older_updater(module: Any) -> None:
    module.SchedulerWeightUpdaterManager.record_weight_version_after_update = lambda self, version: None


def _older_tokenizer(module: Any) -> None:
    module.add_weight_versions_to_meta_info = lambda *arguments, **options: None


OLDER: dict[str, Callable[[Any], None]] = {
    "sglang.srt.managers.scheduler": _older_scheduler,
    "sglang.srt.managers.scheduler_components.weight_updater": _older_updater,
    "sglang.srt.managers.tokenizer_manager": _older_tokenizer,
}


class OlderModules(importlib.abc.MetaPathFinder):
    """Finds modules as Python does, and changes those of `OLDER` once they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname in OLDER else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                OLDER[fullname](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, OlderModules())
