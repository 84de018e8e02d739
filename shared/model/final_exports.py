"""A run's final policy in Hugging Face's format: where its config asks for it, and whether it lies there."""

import json
from pathlib import Path

from shared.config.run_config import RunConfig
from shared.config.service_sections import STEP

MARK = "trained.json"
"""The file of an exported checkpoint that tells after how many steps it is: a run that continues exports to the same place once more."""


def hf_directory(config: RunConfig) -> Path:
    """Returns where `save_final_hf` writes."""
    return config.trained / "hf"


def final_exports(config: RunConfig) -> list[Path]:
    """Returns the directories that the policy after the last step is written to."""
    trainer, steps = config.trainer, config.rollout.num_rollout
    if config.debug.debug_rollout_only:
        return []
    found = [hf_directory(config)] if trainer.save_final_hf else []
    if trainer.save_hf is not None and steps:
        found.append(export_directory(trainer.save_hf, steps))
    return found


def missing_exports(config: RunConfig) -> list[Path]:
    """Returns those of `final_exports` that are not there, or of an earlier step."""
    return [path for path in final_exports(config) if exported_steps(path, config.rollout.num_rollout) != config.rollout.num_rollout]


def export_directory(template: Path, steps: int) -> Path:
    """Returns where `save_hf` puts the policy after ``steps`` steps: its rollout id, as slime counts, is that of the last one."""
    return Path(str(template).replace(STEP, str(steps - 1)))


def exported_steps(directory: Path, unmarked: int) -> int | None:
    """Returns the steps of the policy that lies there, whole as it always appears; None where there is none. ``unmarked``: those of one
    without a mark, of an earlier release."""
    try:
        return int(json.loads((directory / MARK).read_text())["steps"])
    except FileNotFoundError:
        return unmarked if directory.is_dir() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
