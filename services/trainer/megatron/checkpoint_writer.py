"""Writing a checkpoint's shards, in the background if so wanted, and publishing them when all ranks have written theirs.

The ranks agree on who writes what, and copy it to host memory, together and at once. From there on a thread of each rank
writes its file without further communication: its index entries are in a small file beside the shards, and rank
0's thread publishes the directory when it has seen all of them. Training goes on meanwhile, in memory of its own.
"""

import contextlib
import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from services.trainer.megatron import DEVICE_TYPE
from services.trainer.megatron.runtime import deadline, gather_json, host_copy, together
from shared.runtime.atomic_files import replace_file
from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.runtime.failures import log_error

_FULL_BYTES = 16 << 20
"""A disk with less room than this, once a write has failed, counts as full."""

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 60.0
_RESTART = "the checkpoint is not there; the run goes on from the one before it"


class SaveFailed(MyxoError):
    """A checkpoint could not be written; the ones before it stand."""


class StagedShards(TorchDistSaveShardedStrategy):
    """This rank's shards, as torch_dist writes them, one file a rank: planned with the other ranks, written later.

    Megatron's own strategies start a process to write and another that re-imports ``__main__`` for the queue between them,
    which a service with threads and connections cannot afford.

    Args:
        copied: whether to copy live tensors, so that training may change them before they are written.
    """

    def __init__(self, copied: bool) -> None:
        super().__init__("torch_dist", 1)
        self.copied = copied
        self._metadata: Any = None

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Plans and copies the shards. The name is Megatron's. This is a collective of all ranks."""
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        state = mcore_to_pyt_state_dict(flat, False)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        writer = FileSystemWriter(checkpoint_dir, single_file_per_rank=True, thread_count=1, sync_files=True)
        first = dist.get_rank() == 0

        def own() -> SavePlan:
            planner.set_up_planner(state, writer.storage_meta(), first)
            writer.set_up_storage_writer(first)
            return writer.prepare_local_plan(planner.create_local_plan())

        def everyones(plans: list[SavePlan]) -> list[SavePlan]:
            plans, self._metadata = planner.create_global_plan(plans)
            return writer.prepare_global_plan(plans)

        self._plan = planner.finish_plan(_DistWrapper(None, True, 0).reduce_scatter("plan", own, everyones))
        self._writer = writer
        found = {item.index: planner.resolve_data(item) for item in self._plan.items}
        self._data = {index: _on_host(value) if self.copied else value for index, value in found.items()}
        if self.copied and DEVICE_TYPE == "cuda":
            torch.cuda.synchronize()

    def write(self) -> list[list[Any]]:
        """Writes this rank's file and returns what it now holds, as JSON data."""
        written = self._writer.write_data(self._plan, cast(SavePlanner, self)).value()
        self._data = {}
        return [_encoded(result) for result in written]

    def resolve_data(self, write_item: Any) -> Any:
        """Returns an item's data to the file writer, which calls this when it writes it, as a method of its planner."""
        return self._data[write_item.index]

    def finish(self, everyone: list[list[list[Any]]]) -> None:
        """Writes the index, on rank 0, of all ranks' files, given what :meth:`write` returned on each."""
        self._writer.finish(self._metadata, [[_decoded(result) for result in written] for written in everyone])


def _on_host(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.device.type != DEVICE_TYPE:
        return value  # serialized already, or gathered to the host a moment ago
    return host_copy(value)


def _encoded(result: WriteResult) -> list[Any]:
    index, stored = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, result.size_in_bytes, stored.relative_path, stored.offset, stored.length]


def _decoded(result: list[Any]) -> WriteResult:
    name, offset, index, size, path, start, length = result
    key = MetadataIndex(name, None if offset is None else torch.Size(offset), index)
    return WriteResult(key, size, _StorageInfo(path, start, length))


def _attributed(error: Exception, directory: Path) -> Exception:
    """Returns the error of writing into a directory, or where its disk is full an OSError that says so: torch names a wrong position."""
    full = not isinstance(error, OSError) and directory.is_dir() and shutil.disk_usage(directory).free < _FULL_BYTES
    return OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({error})", str(directory)) if full else error


class Save:
    """A checkpoint on its way to the disk.

    Args:
        target: what it will be called. partial: the directory that is written, the same for all ranks.
        shards: staged. publish: on rank 0, run when all shards are written; it makes the checkpoint appear.
        timeout_seconds: how long rank 0 waits for the other ranks' shards, and a rank in :meth:`finish` for its own.
    """

    def __init__(self, target: Path, partial: Path, shards: StagedShards, publish: Callable[[], None], timeout_seconds: float) -> None:
        self.target = target
        self._partial, self._shards, self._publish, self._timeout = partial, shards, publish, timeout_seconds
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._written, self._told = threading.Event(), threading.Event()
        self._results: list[list[Any]] = []
        self._everyone: list[list[list[Any]]] | None = None
        self._error: Exception | None = None
        # no daemon: a process that ends without an error ends after its checkpoint is complete
        self._thread = threading.Thread(target=self._work, name=f"checkpoint {target.name}")
        self._thread.start()

    def finish(self) -> Path:
        """Waits until the checkpoint is published, and returns where. This is a collective of all ranks.

        Raises:
            SaveFailed: it could not be written, on whichever rank; the text names rank and cause.
            DeadlineExceeded, PeerLost: a rank was too slow, or went away.
        """
        what = f"writing checkpoint {self.target}"
        if not self._written.wait(self._timeout):
            raise DeadlineExceeded(what, "the disk", self._timeout, _RESTART)
        with deadline(what):
            everyone = gather_json({"error": self._cause(), "results": self._results})
        failed = [f"rank {rank}: {each['error']}" for rank, each in enumerate(everyone) if each["error"]]
        if not failed:
            self._everyone = [each["results"] for each in everyone]
        self._told.set()
        if failed:
            self._thread.join(self._timeout)
            self._discard()
            raise SaveFailed(f"checkpoint {self.target} could not be written; {'; '.join(failed)}; {_RESTART}") from self._error
        with together(f"publishing checkpoint {self.target}"):
            self._thread.join(self._timeout)
            if self._thread.is_alive():
                raise DeadlineExceeded(f"publishing checkpoint {self.target}", "the disk", self._timeout, _RESTART)
            if self._error is not None:
                self._discard()
                raise SaveFailed(f"checkpoint {self.target} could not be published: {self._cause()}; {_RESTART}") from self._error
        return self.target

    def _discard(self) -> None:
        """Removes what was written: on a disk that is full, others need the room."""
        if self._rank == 0:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _cause(self) -> str | None:
        return None if self._error is None else f"{type(self._error).__name__}: {self._error}"

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Keeps an error of the body: this rank tells the others in `finish`, which may be many steps away."""
        try:
            yield
        except Exception as error:
            self._error = self._error or _attributed(error, self._partial)
            log_error("checkpoint_failed", f"checkpoint {self.target}", self._error)

    def _work(self) -> None:
        with self._noted():
            self._results = self._shards.write()
        with self._noted():
            word = json.dumps({"error": self._cause(), "results": self._results})
            replace_file(self._word(self._rank), word.encode())
        self._written.set()
        if self._rank or self._error is not None:
            return
        with self._noted():
            if (everyone := self._wait_for_the_others()) is not None:
                self._shards.finish(everyone)
                for rank in range(self._world):
                    self._word(rank).unlink(missing_ok=True)
                self._publish()

    def _word(self, rank: int) -> Path:
        return self._partial / f".written_{rank}.json"

    def _wait_for_the_others(self) -> list[list[list[Any]]] | None:
        """Returns what every rank has written; None if one of them could not."""
        ends = time.monotonic() + self._timeout
        said: dict[int, Any] = {}
        leaving = False
        while len(said) < self._world:
            if self._told.wait(_POLL_SECONDS):  # `finish` knows at once what a network file system shows later
                return self._everyone
            for rank in range(self._world):
                if rank not in said and self._word(rank).exists():
                    said[rank] = json.loads(self._word(rank).read_text())
                    if said[rank]["error"]:
                        return None
            if not leaving and not threading.main_thread().is_alive():  # this process ends: the other ranks end too, or are dead
                leaving, ends = True, min(ends, time.monotonic() + _GRACE_SECONDS)
            if time.monotonic() > ends:
                missing = sorted(set(range(self._world)) - said.keys())
                raise DeadlineExceeded(f"the shards of ranks {missing}", str(self._partial), self._timeout, _RESTART)
        return [said[rank]["results"] for rank in range(self._world)]
