"""A run's policies in Hugging Face's format: where its config asks for them, and whether they lie there."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from shared.config.run_config import RunConfig
from shared.config.service_sections import STEP
from shared.runtime.safe_files import replace_file
from shared.schema.versions import crossed, is_periodic, newest_due

MARK = "trained.json"
"""The file of an exported checkpoint that tells whose it is, and after how many steps: a run exports to the same place once more."""


def mark_of(config: RunConfig, steps: int) -> dict[str, Any]:
    """Returns the content of the mark of this run's policy after ``steps`` steps."""
    return {"steps": steps, "run": config.run.name}


def hf_directory(config: RunConfig) -> Path:
    """Returns where `save_final_hf` writes."""
    return config.trained / "hf"


def final_exports(config: RunConfig) -> list[Path]:
    """Returns the directories that the policy after the last step is written to."""
    final = hf_directory(config) if config.trainer.save_final_hf and not config.debug.debug_rollout_only else None
    return [path for path in (final, export_target(config, config.rollout.num_rollout)) if path is not None]


def missing_exports(config: RunConfig) -> list[Path]:
    """Returns those of `final_exports` that are not there, or of an earlier step."""
    return [path for path in final_exports(config) if exported_steps(config, path) != config.rollout.num_rollout]


def export_directory(template: Path, steps: int) -> Path:
    """Returns where `save_hf` puts the policy after ``steps`` steps: its rollout id, as slime counts, is that of the last one."""
    return Path(str(template).replace(STEP, str(steps - 1)))


def export_target(config: RunConfig, steps: int) -> Path | None:
    """Returns where `save_hf` puts the policy after ``steps`` steps; None where no export is due then."""
    trainer, total, per_epoch = config.trainer, config.rollout.num_rollout, config.rollout.num_rollout_per_epoch
    before, interval = newest_due(steps - 1, trainer.save_interval, per_epoch), trainer.save_hf_interval  # before: the last checkpoint
    due = is_periodic(steps, trainer.save_interval, per_epoch) and (interval is None or crossed(before, steps, interval))
    due = (due or steps == total) and steps > 0 and not config.debug.debug_rollout_only
    return export_directory(trainer.save_hf, steps) if trainer.save_hf is not None and due else None


def exported_steps(config: RunConfig, directory: Path) -> int | None:
    """Returns the steps of this run's policy that lies there, whole as it always appears; None where there is none."""
    try:
        mark = json.loads((directory / MARK).read_text())
        return int(mark["steps"]) if mark.get("run", config.run.name) == config.run.name else None  # earlier releases told no run
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def retire_exports(config: RunConfig, steps: int) -> None:
    """Has policies of ``steps`` steps that this run has written count no more: they are made anew, after ``--fresh`` or a step back."""
    for path in (export_target(config, steps), hf_directory(config)):
        if path is not None and exported_steps(config, path) == steps:
            content = json.dumps(mark_of(config, -1), separators=(",", ":")).encode()
            try:
                replace_file(path / MARK, content)
            except OSError:  # a full disk has room for what is no longer than what is there; the export that follows reports the rest
                with contextlib.suppress(OSError), open(path / MARK, "r+b") as mark:
                    mark.write(content.ljust(os.fstat(mark.fileno()).st_size))


def occupant(config: RunConfig, directory: Path) -> str:
    """Returns what an export to that place would remove that is no export of this run; empty where it would not."""
    needed = config.trained, config.run.root, config.model.hf_checkpoint
    own = [str(path) for path in needed if path.resolve().is_relative_to(directory.resolve())]
    free = not os.path.exists(directory) or (os.path.isdir(directory) and os.access(directory, os.R_OK) and not os.listdir(directory))
    free = free or exported_steps(config, directory) is not None
    return own[0] if own else "" if free else "something that is no export of this run"
