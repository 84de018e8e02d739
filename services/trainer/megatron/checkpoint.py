"""Training checkpoints: Megatron's distributed format, published atomically, resumed exactly.

``ROOT/step_00000012/`` holds one checkpoint: the shards of model and optimizer (torch_dist), every rank's random state, and
``checkpoint.json`` with the step, the model's architecture, the layout, the schedule's position and the caller's own data.
The directory is written under another name and renamed when all of it is on the disk, so whatever bears the final name is
complete (see :mod:`.directory`).

The shards are read back by ``torch.load`` inside Megatron and PyTorch: a checkpoint directory is trusted storage of the
operator, like the code, and never a place for files that came over the wire.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as write_shards

from services.trainer.megatron import DEVICE_TYPE
from services.trainer.megatron.directory import fsync_tree, publish, replaced_by, scratch, settle
from services.trainer.megatron.model import Model
from services.trainer.megatron.optimizer import Optimizer
from services.trainer.megatron.runtime import deadline, together
from services.trainer.megatron.schedule import LearningRateSchedule
from shared.errors import ConfigError, MyxoError

FORMAT = 1
_MARKER = "checkpoint.json"
_NAME = re.compile(r"step_(\d{8,})")


class CheckpointMissing(MyxoError):
    """There is no complete checkpoint where one was asked for."""


class InProcessSave(TorchDistSaveShardedStrategy):
    """Writes torch_dist shards from the calling process, one file a rank.

    Megatron's own strategy starts a process to write and another that re-imports ``__main__`` for the queue between them,
    which a service with threads and connections cannot afford.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        write_shards(
            mcore_to_pyt_state_dict(flat, False),
            storage_writer=FileSystemWriter(checkpoint_dir, single_file_per_rank=True, thread_count=1, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save_checkpoint(
    model: Model, optimizer: Optimizer, root: Path, step: int, extra: dict[str, Any], keep: int | None = None
) -> Path:
    """Write and publish a checkpoint. A collective of all ranks; ``root`` must be the same directory for all.

    Args:
        step: names the checkpoint; an older one of the same step is replaced. extra: JSON data handed back by the load.
        keep: how many of the newest checkpoints stay, this one included; None for all.

    Returns:
        The checkpoint's directory.

    Raises:
        ConfigError: ``keep`` or ``step`` has no meaning, or ``extra`` is no JSON.
        MyxoError: another rank failed, went away or was too slow. OSError: the disk refused.
    """
    if keep is not None and keep < 1:
        raise ConfigError("trainer.keep_checkpoints", keep, "at least 1, or none to keep all")
    if step < 0:
        raise ConfigError("step", step, "at least 0")
    marker = _describe(model, optimizer, step, extra)
    target = root / f"step_{step:08d}"
    first = dist.get_rank() == 0
    partial = target.with_name(f".{target.name}.partial")
    with together(f"the preparation of checkpoint {target}"):
        if first:
            partial = scratch(target)
    with deadline(f"writing checkpoint {target}"):
        dist_checkpointing.save(_sharded_state(model, optimizer, loading=False), str(partial), InProcessSave())
    with together(f"publishing checkpoint {target}"):
        if first:
            (partial / _MARKER).write_text(marker)
            fsync_tree(partial)
            publish(partial, target)
            _remove_old(root, keep)
    return target


def load_checkpoint(model: Model, optimizer: Optimizer, root: Path, step: int | None = None) -> dict[str, Any]:
    """Bring model, optimizer, schedule and random state to where a checkpoint left them. A collective of all ranks.

    The layout may differ from the one that saved; the random states are restored only where it is the same.

    Args:
        step: which checkpoint; None for the newest.

    Returns:
        The ``extra`` that was saved with it.

    Raises:
        CheckpointMissing: there is none (of this step). ConfigError: it is of another model, dtype or optimizer.
    """
    found = checkpoints(root)
    wanted = step if step is not None else max(found, default=None)
    if wanted is None or wanted not in found:
        which = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise CheckpointMissing(f"{root} holds no complete {which}; complete steps: {sorted(found) or 'none'}")
    path = found[wanted]
    marker = json.loads((path / _MARKER).read_text())
    _check(path, marker, model, optimizer)
    same_layout = marker["layout"] == _layout(model)
    state = _sharded_state(model, optimizer, loading=True, with_random=same_layout)
    with deadline(f"reading checkpoint {path}"):
        loaded = dist_checkpointing.load(state, str(path), strict="raise_all" if same_layout else "assume_ok_unexpected")
    for index, module in enumerate(model.modules):
        module.load_state_dict(loaded[f"model{index}"])
    optimizer.megatron.load_state_dict(loaded["optimizer"])
    optimizer.resume(LearningRateSchedule(**marker["schedule"]), marker["updates"])
    if same_layout:
        _set_random_state(loaded["random"])
    extra: dict[str, Any] = marker["extra"]
    return extra


def latest_step(root: Path) -> int | None:
    """Step of the newest complete checkpoint below ``root``, or None. Needs no other rank."""
    return max(checkpoints(root), default=None)


def checkpoints(root: Path) -> dict[int, Path]:
    """Complete checkpoints below ``root`` by step. One that was being replaced when its writer died counts as complete."""
    if not root.is_dir():
        return {}
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir(), reverse=True):  # a directory proper comes before one put aside
        target = replaced_by(path) or path
        named = _NAME.fullmatch(target.name)
        if named and (path / _MARKER).is_file():
            found.setdefault(int(named[1]), path)
    return found


def _describe(model: Model, optimizer: Optimizer, step: int, extra: dict[str, Any]) -> str:
    marker = {
        "format": FORMAT,
        "step": step,
        "architecture": model.architecture.as_json(),
        "dtype": str(model.config.params_dtype).removeprefix("torch."),
        "use_distributed_optimizer": optimizer.settings.use_distributed_optimizer,
        "layout": _layout(model),
        "schedule": asdict(optimizer.settings.schedule),
        "updates": optimizer.updates,
        "extra": extra,
    }
    try:
        return json.dumps(marker, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ConfigError("extra", type(extra).__name__, f"JSON data without NaN or infinities ({error})") from error


def _layout(model: Model) -> dict[str, Any]:
    return {**asdict(model.layout), "world_size": dist.get_world_size(), "device": DEVICE_TYPE}


def _check(path: Path, marker: dict[str, Any], model: Model, optimizer: Optimizer) -> None:
    """Raises ConfigError naming the first entry in which the checkpoint is not one of this model and optimizer."""
    if marker.get("format") != FORMAT:
        raise ConfigError(f"{path}:format", marker.get("format"), f"{FORMAT}; written by another version of Myxo")
    own = json.loads(_describe(model, optimizer, 0, {}))
    mine, saved = own["architecture"], marker["architecture"]
    for key in sorted(mine.keys() | saved.keys()):
        if mine.get(key) != saved.get(key):
            raise ConfigError(f"{path}:{key}", saved.get(key), f"{mine.get(key)!r}, as in the model that would be resumed")
    for key in ("dtype", "use_distributed_optimizer"):
        if own[key] != marker[key]:
            raise ConfigError(f"{path}:{key}", marker[key], f"{own[key]!r}, as configured for this run")


def _sharded_state(model: Model, optimizer: Optimizer, loading: bool, with_random: bool = True) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    modules: dict[str, Any] = {
        f"model{index}": module.sharded_state_dict(metadata=metadata) for index, module in enumerate(model.modules)
    }
    state = dict(modules)
    source = modules["model0"] if len(modules) == 1 else modules
    state["optimizer"] = optimizer.megatron.sharded_state_dict(source, is_loading=loading, metadata=metadata)
    if with_random:
        rank, world = dist.get_rank(), dist.get_world_size()
        state["random"] = ShardedObject("random", _random_state(), (world,), (rank,), replica_id=0)
    return state


def _random_state() -> dict[str, Any]:
    """Every generator that this rank draws from, as tensors and plain values."""
    numpy_state = np.random.get_state(legacy=True)
    assert isinstance(numpy_state, tuple)
    version, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
        "python": [version, list(words), gauss],
        "numpy": [numpy_state[0], torch.from_numpy(numpy_state[1].astype(np.int64)), *numpy_state[2:]],
    }
    if DEVICE_TYPE == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if DEVICE_TYPE == "cuda":
        torch.cuda.set_rng_state(state["cuda"])


def _remove_old(root: Path, keep: int | None) -> None:
    for step in checkpoints(root):
        settle(root / f"step_{step:08d}")
    for path in root.glob(".step_*.partial"):
        shutil.rmtree(path)  # of a writer that died; this one's has its final name already
    found = checkpoints(root)
    for step in sorted(found)[: -keep if keep is not None else 0]:
        shutil.rmtree(found[step])
