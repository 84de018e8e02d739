"""The engine's end of a channel over mapped memory: the trainer's flat buffers, opened once and read where they lie.

For engines on the trainer's own GPUs. Its store says where the buffers are and which bucket lies in one of them; a bucket that has
been loaded is reported there, and its buffer filled anew. What comes from the store is JSON.
"""

from __future__ import annotations

import base64
import datetime
import json
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from services.rollout.engine.receiver.channel_receiver import ChannelBroken, ReceiveDeadline, run_in_thread
from shared.runtime.errors import BadMessage
from shared.schema.messages import WeightChannelAddress
from shared.transfer import mapped_files
from shared.transfer.manifest import Manifest

SOURCE = "the trainer"


class MemoryReceiver:
    """See `ChannelReceiver`.

    Args:
        rank: this process's in the channel, from 1: one of the handles of each buffer is made for it. device: the model's.
    """

    def __init__(self, channel: WeightChannelAddress, rank: int, device: torch.device) -> None:
        self.name, self._channel, self._rank, self._device = channel.name, channel, rank, device
        self._store: TCPStore | None = None
        self._opened: dict[str, Tensor] = {}
        self._buffers: list[Tensor] = []
        self._copy: Tensor | None = None
        self._manifest: Manifest | None = None
        self._push = -1
        self._loading: deque[tuple[int, torch.cuda.Event]] = deque()
        self._watch: ReceiveDeadline | None = None

    def join(self, watch: ReceiveDeadline) -> None:
        self._watch, channel = watch, self._channel
        limit = datetime.timedelta(seconds=max(1.0, watch.left))
        connecting = run_in_thread(
            lambda: TCPStore(channel.address, channel.port, channel.world_size, is_master=False, timeout=limit, wait_for_workers=False),
            f"join-{self.name}",
        )
        watch.until(connecting.done, f"the store of channel {self.name}", SOURCE)
        try:
            self._store = connecting.result()
            self._store.add("joined", 1)
        except RuntimeError as error:
            raise ChannelBroken(f"channel {self.name}: its store at {channel.address}:{channel.port} does not answer: {error}") from error

    def missing(self) -> str:
        return SOURCE if self._store is None else "nobody"

    def manifest(self, push: int, watch: ReceiveDeadline) -> Manifest:
        self._watch, self._push = watch, push
        self._loading.clear()
        encoded = self._awaited(f"manifest/{push}", watch)
        if encoded != b"=":
            self._manifest = Manifest.decode(encoded[1:])
        if self._manifest is None:
            raise ChannelBroken(f"channel {self.name}: push {push} repeats a manifest that never came")
        self._open(self._awaited(f"buffers/{push}", watch))
        return self._manifest

    def take(self, number: int, nbytes: int, watch: ReceiveDeadline) -> Tensor:
        self._watch = watch
        self._until(f"full/{self._push}/{number}", f"bucket {number}", watch)
        buffer = self._buffers[number % len(self._buffers)]
        if buffer.numel() < nbytes:
            raise ChannelBroken(f"channel {self.name}: bucket {number} of {nbytes} bytes does not lie in a buffer of {buffer.numel()}")
        if buffer.device == self._device:
            return buffer[:nbytes]
        if self._copy is None or self._copy.numel() < buffer.numel():
            with torch.inference_mode(False):
                self._copy = torch.empty(buffer.numel(), dtype=torch.uint8, device=self._device)
        # one is enough: who reads it does so on the stream that fills it
        return self._copy[:nbytes].copy_(buffer[:nbytes], non_blocking=True)

    def release(self, number: int) -> None:
        if self._device.type != "cuda":
            self._told(number)
            return
        event = torch.cuda.Event()
        event.record()
        self._loading.append((number, event))
        self._tell_loaded()

    def finish(self, watch: ReceiveDeadline) -> None:
        watch.until(lambda: self._tell_loaded() == 0, "the loading of the last buckets", "the engine's GPU", eager=True)

    def abort(self) -> None:
        if self._watch is not None:
            self._watch.abort()

    def close(self) -> None:
        self._opened, self._buffers, self._copy, self._store = {}, [], None, None

    # --- the store

    def _tell_loaded(self) -> int:
        """Reports the buckets whose loading is done; returns how many are left."""
        while self._loading and self._loading[0][1].query():
            self._told(self._loading.popleft()[0])
        return len(self._loading)

    def _told(self, number: int) -> None:
        try:
            self._joined().add(f"taken/{self._push}/{number}", 1)
        except RuntimeError as error:
            raise self._gone(error) from error

    def _awaited(self, key: str, watch: ReceiveDeadline) -> bytes:
        self._until(key, key.partition("/")[0], watch)
        try:
            return self._joined().get(key)
        except RuntimeError as error:
            raise self._gone(error) from error

    def _until(self, key: str, what: str, watch: ReceiveDeadline) -> None:
        watch.until(lambda: self._has(key), f"{what} of channel {self.name}", SOURCE, self._look, eager=True)

    def _has(self, key: str) -> bool:
        try:
            return self._joined().check([key])
        except RuntimeError as error:
            raise self._gone(error) from error

    def _look(self) -> None:
        """Between two looks: what is loaded by now, and whether the source has given up."""
        self._tell_loaded()
        if self._has(f"aborted/{self._push}"):
            reason = self._joined().get(f"aborted/{self._push}").decode(errors="replace")
            raise ChannelBroken(f"channel {self.name}: the trainer has called the push off: {reason}")

    def _joined(self) -> TCPStore:
        if self._store is None:
            raise ChannelBroken(f"channel {self.name} was not joined, or was left")
        return self._store

    def _gone(self, error: Exception) -> ChannelBroken:
        return ChannelBroken(f"channel {self.name}: the trainer is gone: {error}")

    # --- the buffers

    def _open(self, encoded: bytes) -> None:
        """Opens the buffers of a push; those that are open already are kept. Raises BadMessage, WireBroken."""
        opened: dict[str, Tensor] = {}
        buffers = []
        try:
            for handles in json.loads(encoded):
                handle = handles[self._rank - 1]
                key = json.dumps(handle, sort_keys=True)
                if key not in opened:
                    with torch.inference_mode(False):
                        opened[key] = self._opened[key] if key in self._opened else _opened(handle)
                buffers.append(opened[key])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise BadMessage(f"buffers of channel {self.name} that cannot be read: {type(error).__name__}: {error}") from error
        except (OSError, RuntimeError) as error:
            raise ChannelBroken(f"channel {self.name}: the trainer's buffers cannot be mapped, is it on another host? {error}") from error
        self._opened, self._buffers = opened, buffers


def _opened(handle: dict[str, Any]) -> Tensor:
    """uint8 [bytes], the source's own memory."""
    if handle["kind"] == "file":
        path = Path(handle["path"])
        if not mapped_files.is_buffer(path):
            raise BadMessage(f"{path} is no buffer of a trainer's")
        return torch.from_file(str(path), shared=True, size=int(handle["bytes"]), dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared_cuda(
        _gpu(handle["gpu"]),
        base64.b64decode(handle["handle"]),
        int(handle["bytes"]),
        int(handle["offset"]),
        base64.b64decode(handle["counter"]),
        int(handle["counter_offset"]),
        base64.b64decode(handle["event"]),
        bool(handle["event_sync"]),
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _gpu(uuid: str) -> int:
    """This process's number of a GPU."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise RuntimeError(f"the trainer's GPU {uuid} is not among this engine's {torch.cuda.device_count()} (CUDA_VISIBLE_DEVICES)")
