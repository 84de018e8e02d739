"""What one rank does in the tests of saves that are killed, and of disks that ranks do not share."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from services.trainer.actor import StepResult
from services.trainer.parallel.staged_shards import StagedShards
from services.trainer.reference_policy import ReferencePolicy
from shared.runtime.errors import MyxoError
from tests.unit.trainer.megatron.rank_steps import actor, exported, resume, steps

_FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


def save_twice(hf_dir: Path, root: Path, victim: int | None = None, moment: int = 0) -> tuple[int, dict[int, dict[str, Tensor | None]]]:
    """Saves step 1, trains, and saves step 2 in the background, for which step 1 goes.

    Returns how many moments the second save had on this rank, each before an operation on a file, and the weights by step.

    Args:
        victim: the rank that is killed at that moment of its second save.
    """
    model = actor(hf_dir)
    steps(model, 1)
    model.save_checkpoint(root, 1, {"at": 1}, keep=1)
    weights = {1: exported(model)}
    steps(model, 1, first=1)
    weights[2] = exported(model)
    counted = [0]

    def count() -> None:
        counted[0] += 1
        if victim == dist.get_rank() and counted[0] == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: Any) -> None:
        if event in _FILE_EVENTS and str(root) in str(args[0]):
            count()

    fsync, resolve = os.fsync, StagedShards.resolve_data
    sys.addaudithook(hook)  # stays until this world ends, with its only case
    os.fsync = lambda descriptor: (count(), fsync(descriptor))[1]
    StagedShards.resolve_data = lambda self, item: (count(), resolve(self, item))[1]
    model.save_checkpoint(root, 2, {"at": 2}, keep=1, wait=False)
    model.finish_save()
    return counted[0], weights


def own_disk(base: Path, ranks_per_node: int) -> Path:
    return base / f"node{dist.get_rank() // ranks_per_node}"


def resume_from_own_disks(hf_dir: Path, config: dict[str, Any], base: Path, ranks_per_node: int) -> dict[str, Any]:
    actor(hf_dir, **config)  # the ranks meet
    return resume(hf_dir, config, own_disk(base, ranks_per_node))


def refused_load(hf_dir: Path, config: dict[str, Any], base: Path, ranks_per_node: int) -> str:
    model = actor(hf_dir, **config)
    try:
        model.load_checkpoint(own_disk(base, ranks_per_node))
    except MyxoError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def reference_on_own_disks(hf_dir: Path, base: Path) -> list[str]:
    """What is said of references on a disk of each rank's: version 0's, those that renew a given one, a given one; and on one disk."""
    model, outcomes, disk = actor(hf_dir), [], own_disk(base, 1)
    for root, interval, own in [(disk, None, None), (disk, 2, hf_dir), (disk, None, hf_dir), (base, 2, None)]:
        try:
            ReferencePolicy(model, root / "reference", interval, root / "checkpoints", own)
            outcomes.append("made")
        except MyxoError as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


def export_to_own_disks(hf_dir: Path, config: dict[str, Any], base: Path, ranks_per_node: int) -> None:
    model = actor(hf_dir, **config)
    model.save_hf(own_disk(base, ranks_per_node) / "out")


def train_on(hf_dir: Path, config: dict[str, Any], root: Path, first: int) -> list[StepResult]:
    """Two steps from the newest checkpoint."""
    model = actor(hf_dir, **config)
    model.load_checkpoint(root)
    return steps(model, 2, first=first)
