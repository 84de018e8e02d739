"""The weight versions of a run that lie on disk, and how each becomes a Hugging Face checkpoint."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared.config.debug_section import STEP
from shared.config.run_config import RunConfig
from shared.runtime.errors import ConfigError, MyxoError
from shared.schema.versions import is_pushed, version_after
from shared.transfer.weight_checkpoint import BrokenCheckpoint, LocalCheckpoint, WeightCheckpoints

CONVERT = "services.trainer.convert_command"
_CHECKPOINT = re.compile(r"step_(\d{8,})\Z")


@dataclass(frozen=True)
class VersionOnDisk:
    """A version and where it lies. ``make``: takes an empty directory's path and returns that of a Hugging Face checkpoint."""

    version: int
    what: str
    make: Callable[[Path], Path]


def versions_on_disk(config: RunConfig) -> dict[int, VersionOnDisk]:
    """Returns the versions of a run that can be had, by their number, each from where it costs least."""
    found = [*_checkpoints(config), *_snapshots(config), *_exports(config), *_initial(config)]
    return {item.version: item for item in sorted(found, key=lambda item: item.version)}


def chosen_version(config: RunConfig, version: int | None) -> VersionOnDisk:
    """Returns a version of a run, the newest where none is named. Raises ConfigError that names those that there are."""
    there = versions_on_disk(config)
    if not there:
        raise ConfigError("RUN", config.run.name, f"a run with weights on disk; there are none in {config.trained}")
    if version is not None and version not in there:
        shown = ", ".join(map(str, there))
        raise ConfigError("--version", version, f"one that lies on disk: {shown} (save_interval, save_hf and snapshot_interval keep more)")
    return there[max(there) if version is None else version]


def _initial(config: RunConfig) -> list[VersionOnDisk]:
    path = config.model.hf_checkpoint
    return [] if config.sft.sft_data is not None else [VersionOnDisk(0, "the initial model", lambda _: path)]


def _exports(config: RunConfig) -> list[VersionOnDisk]:
    """Returns the exports of ``save_hf``, and the run's last."""
    found = []
    for steps in range(1, config.rollout.num_rollout + 1):
        paths = [Path(str(config.trainer.save_hf).replace(STEP, str(steps - 1)))] if config.trainer.save_hf is not None else []
        paths += [config.trained / "hf"] if steps == config.rollout.num_rollout else []
        for path in paths:
            if (version := _version(config, steps)) is not None and (path / "config.json").is_file():
                found.append(VersionOnDisk(version, f"the export {path}", lambda _, path=path: path))  # type: ignore[misc]
    return found


def _snapshots(config: RunConfig) -> list[VersionOnDisk]:
    source = WeightCheckpoints.of_run(config)

    def make(version: int) -> Callable[[Path], Path]:
        def copy(target: Path) -> Path:
            local, chain = LocalCheckpoint(target), source.chain(version)
            held = local.follow(source, version)
            if len(chain) == 1:  # it is the run's own, which may remove it
                local.copy_from(held)
                held = local.held() or held
            return held.path

        return copy

    return [VersionOnDisk(found.version, f"the snapshot {found.path}", make(found.version)) for found in source.readable()]


def _checkpoints(config: RunConfig) -> list[VersionOnDisk]:
    root = config.trained / "checkpoints"
    steps = [int(match[1]) for path in (root.iterdir() if root.is_dir() else ()) if (match := _CHECKPOINT.match(path.name))]

    def make(step: int) -> Callable[[Path], Path]:
        def convert(target: Path) -> Path:
            words = [sys.executable, "-m", CONVERT, str(root), str(target), "--step", str(step), "--hf", str(config.model.hf_checkpoint)]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode:
                raise MyxoError(
                    f"the checkpoint of step {step} in {root} was not converted: {(done.stderr.strip().splitlines() or [''])[-1]}"
                )
            return target

        return convert

    numbered = [(step, _version(config, step)) for step in steps]
    return [VersionOnDisk(version, f"the checkpoint of step {step}", make(step)) for step, version in numbered if version is not None]


def _version(config: RunConfig, steps: int) -> int | None:
    """Returns the version that the policy after ``steps`` steps is; None where it lies between two."""
    interval, total = config.weights.update_weights_interval, config.rollout.num_rollout
    return version_after(steps, interval, total) if is_pushed(steps, interval, total) else None


def materialized(item: VersionOnDisk, target: Path) -> Path:
    """Returns a Hugging Face checkpoint of a version, made below ``target`` where it has to be made. Raises MyxoError."""
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        return item.make(target)
    except BrokenCheckpoint as error:
        raise ConfigError("--version", item.version, str(error)) from error
