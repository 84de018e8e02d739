"""Training checkpoints: PyTorch's distributed format, written by every rank for itself, published atomically, resumed exactly.

``ROOT/step_00000012/`` holds one checkpoint: the shards of model and optimizer (torch_dist), every rank's random state, and
``checkpoint.json`` with the step, the model's architecture, the layout, the schedule's position, the caller's own data, and which ranks'
files lie where. The directory is written under another name and renamed when all of it is on the disk, so whatever bears the final name
is complete (see :mod:`.joint_write`). ``ROOT`` may be on a disk that all ranks see, or on one of each node: then each node has the files
of its ranks, which are enough for the same layout on the same nodes.

``digests.json`` has the size and digest of each file, and is written beside the marker, before the directory appears under its name. A
checkpoint without one (of an earlier version, or converted) counts as sound.

The pickles of a checkpoint run no code, wherever the directory came from. PyTorch unpickles ``.metadata``, and would unpickle the entries
that are no tensors (random states, say). The former is read here first, by an unpickler that knows the dozen names which such a file has;
for the latter `torch.load` is held to ``weights_only``.
"""

import contextlib
import enum
import json
import os
import pickle
import random
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
import torch.distributed as dist

from services.trainer.backend import ScheduledOptimizer
from services.trainer.parallel import DEVICE_TYPE, runtime
from services.trainer.parallel.joint_write import JointWrite, find_places
from services.trainer.parallel.runtime import deadline, gather_json, timeout_seconds, together
from services.trainer.parallel.staged_shards import StagedShards
from services.trainer.parallel.trained_model import TrainedModel
from shared.config.trainer_section import LearningRateSchedule
from shared.model.architecture import Architecture
from shared.runtime.errors import ConfigError, MyxoError
from shared.runtime.safe_files import (
    fsync_tree,
    is_plain_name,
    open_regular,
    parse_json,
    publish,
    read_regular,
    replaced_by,
    scratch,
    settle,
)
from shared.transfer.weight_checkpoint import FileSum

DIGESTS = "digests.json"
_MOST_BYTES = 16 * 1024**2
SHARD = re.compile(r"__(\d+)_\d+\.distcp")


class CheckpointDamaged(MyxoError):
    """The last checkpoint that is left has files that are not as they were written."""


def write_digests(directory: Path) -> None:
    """Writes size and digest of every file of a directory into it. Raises OSError."""
    files = sorted(path for path in directory.iterdir() if path.is_file() and path.name != DIGESTS)
    entries = {path.name: FileSum.read(path) for path in files}
    (directory / DIGESTS).write_text(json.dumps(entries, indent=1) + "\n")


def damage(directory: Path, rank: int = 0, world: int = 1) -> str | None:
    """Returns what is wrong with a checkpoint's directory; None where nothing is.

    Args:
        rank, world: all ranks check all sizes, but of the digests each at its share: the shards that it (or, in another layout, a
            rank of the same number modulo ``world``) wrote, and rank 0 at what is no shard.
    """
    if not (directory / DIGESTS).exists():
        return None
    try:
        entries = dict(parse_json(read_regular(directory / DIGESTS, _MOST_BYTES)))
        for name, (size, _) in entries.items():
            path = directory / name
            if not path.is_file():
                return f"{name} is gone"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, {size} were written"
        for name, (_, digest) in entries.items():
            shard = SHARD.fullmatch(name)
            if (int(shard[1]) if shard else 0) % world == rank and FileSum.read(directory / name).xxh3 != digest:
                return f"the content of {name} is not what was written"
    except (OSError, ValueError, TypeError) as error:
        return f"{DIGESTS} or a file that it names cannot be read ({error})"
    return None


def set_aside(directory: Path) -> None:
    """Renames a damaged checkpoint, which no longer counts then; the next checkpoint that is complete removes it."""
    try:
        directory.rename(directory.with_name(f".{directory.name}.{secrets.token_hex(2)}.damaged"))
    except FileNotFoundError:  # another rank on the same disk was faster
        return


METADATA, MARKER = ".metadata", "checkpoint.json"
_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_DCP = "torch.distributed.checkpoint"
# What the ``.metadata`` of a checkpoint may name, besides torch's dtypes
_NAMES = {
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    *((f"{_DCP}.metadata", name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
}  # fmt: skip


def _enum_member(kind: Any, name: str) -> Any:
    """Does for the members of enums what ``getattr`` would do for anything: by it the early releases of Python 3.11 pickle them."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError("it takes attributes of what is no enum")
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module, name) in _NAMES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint consists of")


def check_checkpoint_files(path: Path) -> None:
    """Raises ConfigError for a checkpoint that is not made of plain files, or whose ``.metadata`` names anything foreign."""
    for entry in os.scandir(path):
        if not (stat.S_ISREG(mode := entry.stat(follow_symlinks=False).st_mode) or stat.S_ISDIR(mode)):
            raise ConfigError(str(path), entry.name, "a plain file; a checkpoint holds no links, pipes or devices")
    shard_files(path)


def shard_files(path: Path) -> set[str]:
    """Returns the names of the files that the ``.metadata`` of a checkpoint refers to. Raises ConfigError."""
    try:
        with open_regular(path / METADATA, links=True) as file:  # the operator may have linked the directory
            metadata = _MetadataUnpickler(file).load()
        for info in metadata.storage_data.values():
            if not is_plain_name(info.relative_path) or info.transform_descriptors:
                raise ValueError(f"its tensors lie in {info.relative_path!r}")
        return {info.relative_path for info in metadata.storage_data.values()}
    except Exception as error:  # whatever bytes make an unpickler raise
        expected = f"readable metadata of a checkpoint ({type(error).__name__}: {error})"
        raise ConfigError(str(path), METADATA, expected) from error


@contextlib.contextmanager
def weights_only() -> Iterator[None]:
    """Holds every `torch.load` in this process to tensors and plain data."""
    before = os.environ.get(_WEIGHTS_ONLY)
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        os.environ.pop(_WEIGHTS_ONLY) if before is None else os.environ.update({_WEIGHTS_ONLY: before})


class CheckpointParts:
    """One checkpoint on one rank.

    Args:
        target: what it will be called. partial: the directory that is written. shards: staged.
        marker: its content, without the directories. publish: makes ``partial`` appear as ``target``. tidy: removes older checkpoints.
    """

    def __init__(
        self,
        target: Path,
        partial: Path,
        shards: StagedShards,
        marker: dict[str, Any],
        publish: Callable[[], None],
        tidy: Callable[[], None],
    ) -> None:
        self.target, self.partial = target, partial
        self._shards, self._marker, self._publish, self.tidy = shards, marker, publish, tidy

    def write(self) -> list[list[Any]]:
        return self._shards.write()

    def beside(self, everyone: list[list[list[Any]]]) -> list[bytes]:
        directories = self._shards.places.as_json()
        common = {path.name: path.read_bytes() for path in self.partial.iterdir() if path.is_file() and path.suffix != ".distcp"}
        contents = []
        for number in range(len(directories)):
            marker = {**self._marker, "directories": directories, "here": number}
            files = {**common, METADATA: self._shards.index(everyone, number), MARKER: (json.dumps(marker, indent=2) + "\n").encode()}
            contents.append(msgpack.packb(files))
        return contents

    def publish(self, content: bytes) -> None:
        for name, data in msgpack.unpackb(content).items():
            (self.partial / name).write_bytes(data)
        write_digests(self.partial)
        fsync_tree(self.partial)
        self._publish()


FORMAT = 3
MAX_MARKER = 16 * 1024**2  # The most bytes of a ``checkpoint.json``
RESTART = "the checkpoint is not there; the run continues from the one before it"
_NAME = re.compile(r"step_(\d{8,})")


class CheckpointMissing(MyxoError):
    """No complete checkpoint was found in the directory (or of the step) that was asked for."""


class CheckpointElsewhere(MyxoError):
    """A part of a checkpoint that is needed lies on another node's disk."""


def start_saving(
    model: TrainedModel,
    optimizer: ScheduledOptimizer,
    root: Path,
    step: int,
    extra: dict[str, Any],
    keep: int | None = None,
    copied: bool = True,
) -> JointWrite:
    """Begins to write a checkpoint. A collective of all ranks; ``root`` may be one directory for all, or one on each node.

    Args:
        step: names the checkpoint; an older one of the same step is replaced. extra: JSON data handed back by the load.
        keep: how many of the newest checkpoints stay, this one included; None for all.
        copied: whether training may continue before :meth:`JointWrite.finish`. One save at a time: finish it before the next.

    Raises:
        ConfigError: ``extra`` is no JSON.
        MyxoError: another rank failed, went away or was too slow. OSError: the disk refused.
    """
    marker = _describe(model, optimizer, step, extra)
    target = root / f"step_{step:08d}"
    partial = target.with_name(f".{target.name}.partial")
    places = find_places(root)
    with together(f"the preparation of checkpoint {target}"):
        if places.leaders[dist.get_rank()] == dist.get_rank():
            scratch(target)
    shards = StagedShards(copied, places)
    with deadline(f"staging checkpoint {target}"):
        state = model.sharded_state()
        state["optimizer"], _ = optimizer.sharded_state(model, loading=False, steps=0)
        model.stage_state(state, _random_state(), shards, partial)
    parts = CheckpointParts(target, partial, shards, marker, lambda: publish(partial, target), lambda: _remove_old(root, step, keep))
    return JointWrite(f"checkpoint {target}", parts, places, RESTART, timeout_seconds())


def load_checkpoint(
    model: TrainedModel, optimizer: ScheduledOptimizer, root: Path, step: int | None = None, reset_optimizer: bool = False
) -> dict[str, Any]:
    """Brings model, optimizer, schedule and random state to where a checkpoint left them. This is a collective of all ranks.

    The layout may differ from the one that saved; the random states are restored only where it is the same.

    Args:
        step: which checkpoint; None for the newest.
        reset_optimizer: load weights only; moments are zero then, and the configured schedule is at its beginning.

    Returns:
        The ``extra`` that was saved with it.

    Raises:
        CheckpointMissing: there is none (of this step). ConfigError: it is of another model, dtype or optimizer.
    """
    with deadline(f"the choice of a checkpoint in {root}"):
        chosen = gather_json(max(checkpoints(root), default=None) if step is None else step)[0]  # rank 0's choice
    with together(f"finding a checkpoint in {root}"):
        path, marker = find_checkpoint(root, chosen)
    same_layout = marker.get("layout") == _layout(model)
    if reset_optimizer or marker.get("weights_only"):  # a converted checkpoint has nothing else
        _check(path, marker, model)
        _check_within_reach(path, marker, same_layout)
        with deadline(f"reading the weights of checkpoint {path}"), weights_only():
            loaded = model.read_state(model.sharded_state(), path, with_random=False, exact=False)
        model.load_state(loaded)
        optimizer.weights_loaded()
        optimizer.reset(optimizer.schedule)
        return dict(marker["extra"])
    _check(path, marker, model, optimizer)
    _check_within_reach(path, marker, same_layout)
    steps = marker.get("moment_steps", marker["updates"])  # earlier versions did not count those after a reset apart
    state = model.sharded_state()
    state["optimizer"], take_loaded = optimizer.sharded_state(model, loading=True, steps=steps)
    with deadline(f"reading checkpoint {path}"), weights_only():
        loaded = model.read_state(state, path, with_random=same_layout, exact=same_layout)
    model.load_state(loaded)
    for role, take in take_loaded.items():
        take(loaded.get("optimizer", {}).get(role))  # nothing where this rank updates nothing
    optimizer.resume(LearningRateSchedule(**marker["schedule"]), marker["updates"], steps)
    if same_layout:
        _set_random_state(loaded["random"])
    return dict(marker["extra"])


def _check_within_reach(path: Path, marker: Mapping[str, Any], same_layout: bool) -> None:
    """Raises CheckpointElsewhere, on all ranks alike, if one of them needs files that its directory lacks. A collective of all ranks.

    In the layout that saved, a rank needs the files of the ranks that wrote to the same directory; in another one, all of them.
    """
    missing = missing_ranks(path)
    rank, directories = dist.get_rank(), marker.get("directories", [])
    own: list[int] = next((each["ranks"] for each in directories if rank in each["ranks"]), [])
    needed = [other for other in missing if other in own or not own] if same_layout else missing
    with deadline(f"the look at {path}"):
        everyone = gather_json(needed)
    for reader, lacking in enumerate(everyone):
        if lacking:
            raise CheckpointElsewhere(_elsewhere(path, directories, reader, lacking, same_layout))


def missing_ranks(path: Path) -> list[int]:
    """Returns the ranks whose files a checkpoint's index names and its directory lacks."""
    found = {name: SHARD.fullmatch(name) for name in shard_files(path) if not (path / name).is_file()}
    return sorted({int(match[1]) if match else -1 for match in found.values()})


def _elsewhere(path: Path, directories: list[Any], reader: int, lacking: list[int], same_layout: bool) -> str:
    where = [f"ranks {sorted({*each['ranks']} & {*lacking})} on {each['host']}" for each in directories if {*each["ranks"]} & {*lacking}]
    why = "this rank was on another node when it saved" if same_layout else "another layout than the one that saved needs all files"
    return (
        f"{path} lacks, for rank {reader}, the files of {'; '.join(where) or f'ranks {lacking}'}: {why}. Copy the files __*.distcp of "
        f"this step from every node to a directory that all ranks see, with the rest of rank 0's; or start with the saved layout, its "
        f"ranks on the nodes that hold their files"
    )


def find_checkpoint(root: Path, step: int | None) -> tuple[Path, dict[str, Any]]:
    """Returns a checkpoint's directory and marker; the newest if ``step`` is None. Raises CheckpointMissing, ConfigError."""
    found = checkpoints(root)
    wanted = step if step is not None else max(found, default=None)
    if wanted is None or wanted not in found:
        which = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise CheckpointMissing(f"{root} holds no complete {which}; complete steps: {sorted(found) or 'none'}")
    return found[wanted], read_marker(found[wanted])


def policy_checkpoint(source: Path, step: int | None) -> tuple[Path, dict[str, Any]]:
    """Returns the directory and marker of a whole checkpoint of a policy.

    Args:
        source: a directory of checkpoints, or one of them. step: which; None for the newest.

    Raises:
        CheckpointMissing, CheckpointElsewhere: there is none, or a part of it. ConfigError: it is a critic's.
    """
    path, marker = (source, read_marker(source)) if (source / MARKER).is_file() else find_checkpoint(source, step)
    if lacking := missing_ranks(path):
        raise CheckpointElsewhere(_elsewhere(path, marker.get("directories", []), 0, lacking, same_layout=False))
    if marker["value_head"]:
        raise ConfigError(f"{path}:value_head", True, "a policy's checkpoint; a critic has no output layer")
    return path, marker


def read_marker(path: Path) -> dict[str, Any]:
    """Returns the marker of the checkpoint at ``path``, whose files may then be read.

    Raises ConfigError: it is of another format, or holds what no checkpoint does.
    """
    try:
        marker: dict[str, Any] = parse_json(read_regular(path / MARKER, MAX_MARKER, links=True))
        version = marker.get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(str(path), MARKER, f"a readable JSON object ({error})") from error
    if version != FORMAT:
        raise ConfigError(f"{path}:format", version, f"{FORMAT}; written by another version of Myxo")
    check_checkpoint_files(path)
    return marker


def checkpoints(root: Path) -> dict[int, Path]:
    """Returns the complete checkpoints below ``root`` by step. One that was being replaced when its writer died counts as complete."""
    if not root.is_dir():
        return {}
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir(), reverse=True):  # a directory proper comes before one put aside
        target = replaced_by(path) or path
        named = _NAME.fullmatch(target.name)
        if named and (path / MARKER).is_file():
            found.setdefault(int(named[1]), path)
    return found


def _describe(model: TrainedModel, optimizer: ScheduledOptimizer, step: int, extra: dict[str, Any]) -> dict[str, Any]:
    marker = {
        "format": FORMAT,
        "step": step,
        **model_entries(model),
        **_optimizer_entries(model, optimizer),
        "layout": _layout(model),
        "schedule": asdict(optimizer.schedule),
        "updates": optimizer.updates,
        "moment_steps": optimizer.steps,
        "extra": extra,
    }
    try:
        json.dumps(marker, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError("extra", type(extra).__name__, f"JSON data without NaN or infinities ({error})") from error
    return marker


def model_entries(model: TrainedModel) -> dict[str, Any]:
    """Returns what ``checkpoint.json`` says of a model, which the one that resumes from it is compared with."""
    return {
        "architecture": model.architecture.as_json(),
        "value_head": model.value_head,
        "lora": None if model.lora is None else asdict(model.lora),
        "dtype": str(model.dtype).removeprefix("torch."),
        "backend": model.backend,
    }


def _optimizer_entries(model: TrainedModel, optimizer: ScheduledOptimizer) -> dict[str, Any]:
    return {
        "use_distributed_optimizer": optimizer.trainer.use_distributed_optimizer,
        "freezing": None if model.freezing.nothing else asdict(model.freezing),
    }


def _layout(model: TrainedModel) -> dict[str, Any]:
    layout = asdict(model.layout)
    if model.layout.vocabulary_multiple == 1:
        del layout["vocabulary_multiple"]  # earlier versions of this trainer have no such entry, and the same layout
    return {**layout, "world_size": dist.get_world_size(), "device": DEVICE_TYPE}


def _check(path: Path, marker: dict[str, Any], model: TrainedModel, optimizer: ScheduledOptimizer | None = None) -> None:
    if marker.get("backend") != model.backend:
        writer = marker.get("backend") or "megatron"
        raise ConfigError("trainer.trainer_backend", model.backend or "megatron", f"{writer}, which wrote {path}; `hf` exports fit either")
    check_architecture(path, marker, model.architecture)
    own = {**model_entries(model), **({} if optimizer is None else _optimizer_entries(model, optimizer))}
    for key, value in json.loads(json.dumps(own)).items():
        if key != "architecture" and (value or False) != (marker.get(key) or False):
            raise ConfigError(f"{path}:{key}", marker.get(key, False), f"{value!r}, as configured for this run")


def check_architecture(path: Path, marker: dict[str, Any], architecture: Architecture) -> None:
    """Raises ConfigError naming the first entry in which a checkpoint is of another architecture.

    Draft layers count where they train; a converted checkpoint may have some for which the model has no use.
    """
    mine, saved = architecture.as_json(), marker["architecture"]
    unused = {"trained_drafts"} if marker.get("weights_only") and not architecture.trained_drafts else set()
    for key in sorted((mine.keys() | saved.keys()) - {"draft_layers"} - unused):
        if (mine.get(key) or None) != (saved.get(key) or None):  # an older one lacks the entries of features that its model has not
            source = "with the run's enable_mtp_training" if key == "trained_drafts" else "in the model's config.json"
            raise ConfigError(f"{path}:{key}", saved.get(key), f"{mine.get(key)!r}, as {source}")


def _random_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        **runtime.groups().random_states(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        **({"cuda": torch.cuda.get_rng_state()} if DEVICE_TYPE == "cuda" else {}),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    runtime.groups().set_random_states(state)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if DEVICE_TYPE == "cuda":
        torch.cuda.set_rng_state(state["cuda"])


def _remove_old(root: Path, newest: int, keep: int | None) -> None:
    for step in checkpoints(root):
        settle(root / f"step_{step:08d}")
    for path in (*root.glob(".step_*.partial"), *root.glob(".step_*.damaged")):
        shutil.rmtree(path)  # left by a writer that died, for this one's directory has its final name already; a resume has passed over it
    found = checkpoints(root)  # a later one is of a history that a resume has left, or, at step 0, what a run that lost a disk has left
    kept = found if keep is None or not newest else sorted(step for step in found if step <= newest)[-keep:]
    for step in found.keys() - kept:
        shutil.rmtree(found[step])
