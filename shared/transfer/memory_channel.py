"""A channel over memory that both ends map: the engines' processes read the source's flat buffers where they lie.

It is for engines on the trainer's own GPUs (`colocate`): no byte crosses a network. On CUDA the buffers are opened by IPC handles, from
other GPUs of the host, too; on a CPU they are files in memory. The store says where the buffers are (``buffers/<push>``), that a bucket
lies in one (``full/<push>/<bucket>``), and how many readers have loaded it (``taken/…``). Handles are JSON; nothing is unpickled.
"""

import base64
import json
import os
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.runtime.errors import BadMessage
from shared.runtime.safe_files import parse_json
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer.bucket_ring import BucketRing
from shared.transfer.manifest import Manifest
from shared.transfer.weight_channel import POLL_INTERVAL_S, ChannelBroken, ChannelReceiver, ChannelSender, TransferDeadline

# Flat buffers of a channel: one is filled while the other is loaded. On a GPU they stay between pushes, so there are no more.
MEMORY_BUFFERS = 2
LOADING_POLL_S = 0.001  # the seconds between two looks at the GPU, while buckets that the source waits for are being loaded
FILE_PREFIX = "myxo-weights-"  # the prefix of the files' names: a reader opens no file without it, whatever the store names
Handle = list[Any]  # the kind of a buffer, ``cuda`` or ``file``, and what `_opened` needs
# The buffers of this process on its GPU, by purpose. They outlive their channels: memory that a dead engine had mapped is never returned
# to torch's allocator, which counts readers, so that each channel's own buffers would be lost with its first dead engine.
_gpu_rings: dict[tuple[torch.device, int], BucketRing] = {}


class MemorySender(ChannelSender):
    """The source's end. `ChannelSender` has the other arguments.

    Args:
        purpose: which of this process's channels on a GPU it is: those that are open at once must not share buffers.
    """

    kind = "memory"

    def __init__(self, name: str, host: str, world_size: int, device: torch.device, purpose: int = 0) -> None:
        super().__init__(name, host, world_size, device, device.type)
        self._readers = world_size - 1
        self._ring = BucketRing(device, MEMORY_BUFFERS, self._file_buffer)
        if device.type == "cuda":
            self._ring = _gpu_rings.setdefault((device, purpose), BucketRing(device, MEMORY_BUFFERS))
        self._handles: list[list[Handle]] = []  # buffer → reader → handle
        self._files: list[Path] = []
        self._push, self._sent = -1, 0

    def announce(self, push: int, manifest: Manifest, seconds: float) -> None:
        self._forget()
        self._push, self._sent = push, 0
        self._reserve(manifest)
        self.note(f"buffers/{push}", json.dumps(self._handles))
        super().announce(push, manifest, seconds)

    def buffer(self, index: int, nbytes: int) -> Tensor:
        self._wait_taken(index - len(self._ring))
        return self._ring.flat(index, nbytes)

    def send(self, index: int, flat: Tensor) -> None:
        self.raise_if_broken()
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()  # a reader that sees it full reads it at once, on its own stream
        self.note(f"full/{self._push}/{index}", "1")
        self._sent = index + 1

    def finish(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        for index in range(self._sent - len(self._ring), self._sent):
            self._wait_taken(index)
            meanwhile()
        self._unlink()  # all readers have them open

    def close(self) -> None:
        self.abort(f"channel {self.name} was closed")
        super().close()
        self._unlink()
        self._ring, self._handles = BucketRing(self.device), []

    def _reserve(self, manifest: Manifest) -> None:
        """Has buffers for the manifest, and a handle of each for every reader: torch counts the readers of what it has handed out."""
        try:
            renewed = self._ring.reserve(manifest)
        except OSError as error:
            self._unlink()
            what = f"buffers of {max(bucket.nbytes for bucket in manifest.buckets)} bytes (update_weight_buffer_size)"
            raise ChannelBroken(f"{what} cannot be had in {buffer_directory()}: {error}") from error
        if self.backend == "cuda" and (renewed or not self._handles):
            self._handles = [[_cuda_handle(buffer) for _ in range(self._readers)] for buffer in self._ring.buffers]
        elif renewed:
            unneeded = self._files[: -len(self._ring)]
            self._files = self._files[-len(self._ring) :]
            for path in unneeded:
                path.unlink(missing_ok=True)
            sizes = zip(self._files, self._ring.buffers, strict=True)
            self._handles = [[["file", str(path), len(buffer)]] * self._readers for path, buffer in sizes]

    def _file_buffer(self, nbytes: int) -> Tensor:
        """Returns uint8 [nbytes] in a file of this user's alone. Raises OSError where there is no room, now and not at the first write."""
        descriptor, path = tempfile.mkstemp(prefix=f"{FILE_PREFIX}{self.name}-", dir=buffer_directory())
        self._files.append(Path(path))
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        finally:
            os.close(descriptor)
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)

    def _unlink(self) -> None:
        """Removes the files' names, which are needed only until every reader has them open: a later death then leaves no file behind."""
        for path in self._files:
            path.unlink(missing_ok=True)

    def _wait_taken(self, index: int) -> None:
        key = f"taken/{self._push}/{index}"
        if index >= 0:
            self._until(lambda: self.store.add(key, 0) >= self._readers, f"the loading of bucket {index}")

    def _forget(self) -> None:
        """Takes the last push out of the store. Its readers are past it, or gone."""
        keys = [f"{key}/{self._push}/{index}" for index in range(self._sent) for key in ("full", "taken")]
        for key in [*keys, f"manifest/{self._push}", f"buffers/{self._push}"] if self._push >= 0 else []:
            self.store.delete_key(key)


class MemoryReceiver(ChannelReceiver):
    """A reader's end; one of the handles of each buffer is made for its rank."""

    def __init__(self, address: WeightChannelAddress, rank: int, device: torch.device) -> None:
        super().__init__(address, rank, device)
        self._opened: dict[str, Tensor] = {}
        self._buffers: list[Tensor] = []
        self._copies = BucketRing(device, count=1)  # one is enough: who reads it does so on the stream that fills it
        self._push = -1
        self._loading: deque[tuple[int, torch.cuda.Event]] = deque()

    def manifest(self, push: int, deadline: TransferDeadline, known: str = "") -> Manifest:
        self._push = push
        self._loading.clear()
        manifest = super().manifest(push, deadline, known)
        self._open(self.read(f"buffers/{push}", "the buffers", deadline))
        if any(buffer.device != self.device for buffer in self._buffers):
            self._copies.reserve(manifest)
        return manifest

    def take(self, index: int, nbytes: int, deadline: TransferDeadline) -> Tensor:
        key = f"full/{self._push}/{index}"
        deadline.until(lambda: self._has(key), f"bucket {index}", self.source, self._check, eager=True)
        buffer = self._buffers[index % len(self._buffers)]
        if buffer.numel() < nbytes:
            raise ChannelBroken(f"channel {self.name}: bucket {index} of {nbytes} bytes does not lie in a buffer of {buffer.numel()}")
        if buffer.device == self.device:
            return buffer[:nbytes]
        return self._copies.flat(index, nbytes).copy_(buffer[:nbytes], non_blocking=True)

    def release(self, index: int) -> None:
        if self.device.type != "cuda":
            self._report(index)
            return
        event = torch.cuda.Event()
        event.record()
        self._loading.append((index, event))
        self._report_loaded()

    def finish(self, deadline: TransferDeadline) -> None:
        deadline.until(lambda: self._report_loaded() == 0, "the loading of the last buckets", "the engine's GPU", eager=True)

    def close(self) -> None:
        super().close()
        self._opened, self._buffers = {}, []
        self._copies.forget()

    def _check(self) -> None:
        self._report_loaded()
        self.check_source()

    def _report_loaded(self) -> int:
        """Reports the buckets whose loading is done, and returns how many are left."""
        while self._loading and self._loading[0][1].query():
            self._report(self._loading.popleft()[0])
        return len(self._loading)

    def _report(self, index: int) -> None:
        with self._reaching():
            self.store.add(f"taken/{self._push}/{index}", 1)

    def _has(self, key: str) -> bool:
        """Returns whether a key is there, or comes soon: the source must not wait for buckets that have been loaded meanwhile."""
        with self._reaching():
            return self.store.check([key], LOADING_POLL_S if self._loading else POLL_INTERVAL_S)

    def _open(self, encoded: bytes) -> None:
        """Opens the buffers of a push; those that are open already stay so."""
        opened: dict[str, Tensor] = {}
        try:
            for handles in parse_json(encoded):
                key = json.dumps(handle := handles[self.rank - 1])
                with torch.inference_mode(False):
                    opened[key] = self._opened[key] if key in self._opened else _opened(*handle)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise BadMessage(f"buffers of channel {self.name} that cannot be read: {type(error).__name__}: {error}") from error
        except (OSError, RuntimeError) as error:
            raise ChannelBroken(f"channel {self.name}: the source's buffers cannot be mapped, is it on another host? {error}") from error
        self._opened, self._buffers = opened, list(opened.values())


def buffer_directory() -> Path:
    """Returns where the files lie: Linux's file system in memory, else what the system has for temporary files."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


def _cuda_handle(buffer: Tensor) -> Handle:
    """Returns what another process needs to open the buffer; the GPU by its id, for processes number their GPUs differently."""
    index, *fields = buffer.untyped_storage()._share_cuda_()
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return ["cuda", uuid, *(base64.b64encode(field).decode() if isinstance(field, bytes) else field for field in fields)]


def _opened(kind: str, where: str, *fields: Any) -> Tensor:
    """Returns uint8 [bytes], the source's own memory."""
    if kind == "cuda":
        decoded = (base64.b64decode(field) if isinstance(field, str) else field for field in fields)
        storage = torch.UntypedStorage._new_shared_cuda(_gpu_index(where), *decoded)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    path = Path(where)
    if path.parent != buffer_directory() or not path.name.startswith(FILE_PREFIX):
        raise BadMessage(f"{path} is no buffer of a trainer's")
    return torch.from_file(where, shared=True, size=int(fields[0]), dtype=torch.uint8)


def _gpu_index(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise RuntimeError(f"the trainer's GPU {uuid} is not among this engine's {torch.cuda.device_count()} (CUDA_VISIBLE_DEVICES)")
