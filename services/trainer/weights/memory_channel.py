"""A channel over memory that both sides map: the engines' processes read the source's flat buffers where they lie.

For engines on the trainer's own GPUs (`colocate`): nothing goes over a wire. On CUDA the buffers are opened by IPC handles, from other GPUs
of the host, too; on a CPU they are files in memory. The channel's store says where the buffers are, which bucket lies in one, and who has
loaded it. Handles travel as JSON; nothing is unpickled.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from services.trainer.megatron.runtime import device
from services.trainer.weights.weight_channel import WeightChannelBroken
from shared.runtime.own_address import own_address
from shared.schema.messages import WeightChannelAddress
from shared.transfer.manifest import Manifest
from shared.transfer.mapped_files import FILE_PREFIX, directory

BUFFERS = 2
"""Flat buffers of a channel: one is filled while the other is loaded. On a GPU they stay between pushes, so there are no more."""

POLL_INTERVAL_S = 0.0005
JOIN_LOOK_SECONDS = 0.02

Handle = dict[str, Any]

_on_gpu: list[Tensor] = []
"""The buffers of this process on its GPU. They outlive their channels: memory that a dead engine had mapped is never returned to torch's
allocator, which counts readers, so that each channel's own buffers would be lost with its first dead engine."""


class MemoryWeightChannel:
    """See `WeightChannel`.

    Args:
        name: known to all members. world_size: this rank and all engines' ranks. seconds: that joining may take.
    """

    def __init__(self, name: str, world_size: int, seconds: float) -> None:
        self.name, self._world_size = name, world_size
        self._readers = world_size - 1
        self._store = TCPStore(
            own_address(), 0, world_size, is_master=True, timeout=datetime.timedelta(seconds=seconds), wait_for_workers=False
        )
        self._buffers: list[Tensor] = []
        self._handles: list[list[Handle]] = []  # buffer → reader → handle
        self._files: list[Path] = []
        self._push, self._announced, self._end = -1, "", 0.0
        self._sent = 0
        self._aborted: str | None = None

    def address(self) -> WeightChannelAddress:
        return WeightChannelAddress(
            kind="memory",
            name=self.name,
            address=own_address(),
            port=self._store.port,
            backend=device().type,
            world_size=self._world_size,
        )

    def join(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._until(lambda: self._count("joined") >= self._readers, "join", JOIN_LOOK_SECONDS)

    def announce(self, push: int, manifest: Manifest, seconds: float) -> None:
        self._forget(self._push)
        self._push, self._sent, self._end = push, 0, time.monotonic() + seconds
        self._make_room(max(bucket.nbytes for bucket in manifest.buckets))
        self._store.set(f"buffers/{push}", json.dumps(self._handles))
        repeated = manifest.id == self._announced
        self._store.set(f"manifest/{push}", b"=" if repeated else b"M" + manifest.encoded)  # type: ignore[arg-type]  # bytes are fine
        self._announced = manifest.id

    def buffer(self, number: int, nbytes: int) -> Tensor:
        if number >= len(self._buffers):
            self._until(lambda: self._is_taken(number - len(self._buffers)), f"take bucket {number - len(self._buffers)} of")
        return self._buffers[number % len(self._buffers)][:nbytes]

    def send(self, number: int, flat: Tensor) -> None:
        if self._aborted is not None:
            raise WeightChannelBroken(self._aborted)
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()  # who is told that it is full reads it at once, on a stream of its own
        self._store.set(f"full/{self._push}/{number}", "1")
        self._sent = number + 1

    def finish(self) -> None:
        for number in range(max(self._sent - len(self._buffers), 0), self._sent):
            self._until(lambda number=number: self._is_taken(number), f"take bucket {number} of")  # type: ignore[misc]
        self._unlink()  # all readers have them open

    def abort(self, reason: str) -> None:
        if self._aborted is None:
            self._aborted = reason
            with contextlib.suppress(RuntimeError):
                self._store.set(f"aborted/{self._push}", reason)

    def close(self) -> None:
        self.abort("closed")
        self._unlink()
        self._buffers, self._handles = [], []

    # --- the buffers

    def _make_room(self, nbytes: int) -> None:
        """Buffers that hold the largest bucket, and their handles for each reader; those that are there stay if they are large enough."""
        if self._buffers and self._buffers[0].numel() >= nbytes:
            return
        if device().type == "cuda":
            self._buffers = _gpu_buffers(nbytes)
            # a handle each: torch counts the readers of what it has handed out
            self._handles = [[_cuda_handle(buffer) for _ in range(self._readers)] for buffer in self._buffers]
            return
        self._unlink()
        try:
            made = [_file_buffer(nbytes, self.name) for _ in range(BUFFERS)]
        except OSError as error:
            what = f"{BUFFERS} buffers of {nbytes} bytes (update_weight_buffer_size) cannot be had in {directory()}"
            raise WeightChannelBroken(f"{what}: {error}") from error
        self._buffers, self._files = [buffer for buffer, _ in made], [path for _, path in made]
        self._handles = [[{"kind": "file", "path": str(path), "bytes": nbytes}] * self._readers for path in self._files]

    def _unlink(self) -> None:
        """A name is needed only until every reader has the file open: what dies later leaves nothing behind."""
        files, self._files = self._files, []
        for path in files:
            path.unlink(missing_ok=True)

    # --- the store

    def _count(self, key: str) -> int:
        return int(self._store.add(key, 0))

    def _is_taken(self, number: int) -> bool:
        return self._count(f"taken/{self._push}/{number}") >= self._readers

    def _forget(self, push: int) -> None:
        """Takes what is over out of the store. Its readers are past it, or gone."""
        for number in range(self._sent):
            self._store.delete_key(f"full/{push}/{number}")
            self._store.delete_key(f"taken/{push}/{number}")
        for key in ("manifest", "buffers") if push >= 0 else ():
            self._store.delete_key(f"{key}/{push}")

    def _until(self, done: Callable[[], bool], what: str, look: float = POLL_INTERVAL_S) -> None:
        while not done():
            if self._aborted is not None:
                raise WeightChannelBroken(self._aborted)
            if time.monotonic() > self._end:
                raise WeightChannelBroken(f"{self._readers} engine ranks did not all {what} channel {self.name} in time")
            time.sleep(look)


def _gpu_buffers(nbytes: int) -> list[Tensor]:
    global _on_gpu
    if not _on_gpu or _on_gpu[0].numel() < nbytes:
        _on_gpu = []
        _on_gpu = [torch.empty(nbytes, dtype=torch.uint8, device=device()) for _ in range(BUFFERS)]
    return _on_gpu


def _cuda_handle(buffer: Tensor) -> Handle:
    """What another process needs to open the buffer; the GPU by its id, for processes number their GPUs differently."""
    storage = buffer.untyped_storage()
    index, handle, nbytes, offset, counter, counter_offset, event, event_sync = storage._share_cuda_()
    return {
        "kind": "cuda",
        "gpu": str(torch.cuda.get_device_properties(index).uuid),
        "handle": base64.b64encode(handle).decode(),
        "bytes": nbytes,
        "offset": offset,
        "counter": base64.b64encode(counter).decode(),
        "counter_offset": counter_offset,
        "event": base64.b64encode(event).decode(),
        "event_sync": event_sync,
    }


def _file_buffer(nbytes: int, name: str) -> tuple[Tensor, Path]:
    """uint8 [nbytes] in a file of this user's alone. Raises OSError where there is no room, now and not when a byte is written."""
    number, path = tempfile.mkstemp(prefix=f"{FILE_PREFIX}{name}-", dir=directory())
    try:
        os.posix_fallocate(number, 0, nbytes)
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8), Path(path)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(number)
