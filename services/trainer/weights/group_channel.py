"""A channel over a process group: one of the trainer's ranks and the engines' ranks, apart from the trainer's own groups.

The source opens a TCP store whose prefix is the channel's name, and is rank 0. The store holds manifests; the group carries bytes alone.
Collectives of a group that a peer's death has left hanging do not end by themselves (NCCL), so they are never waited for: this side looks
whether they are done, until its deadline.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Iterator

import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from services.trainer.megatron.runtime import device
from services.trainer.weights.weight_channel import BUFFERS, WeightChannelBroken
from shared.runtime.own_address import own_address
from shared.schema.messages import WeightChannelAddress
from shared.transfer.manifest import Manifest

POLL_INTERVAL_S = 0.0002
STORE_LOOK_SECONDS = 0.1
JOIN_LOOK_SECONDS = 0.005
END_SECONDS = 3.0
GROUP_MARGIN = 600.0
"""Seconds beyond a channel's deadline after which NCCL itself would end a collective, and the process with it."""


class GroupWeightChannel:
    """See `WeightChannel`.

    Args:
        name: known to all members. world_size: this rank and all engines' ranks. backend: ``gloo`` or ``nccl``. seconds: a push may take.
    """

    def __init__(self, name: str, world_size: int, backend: str, seconds: float) -> None:
        self.name, self._world_size, self._backend, self._seconds = name, world_size, backend, seconds
        self._store = TCPStore(
            own_address(), 0, world_size, is_master=True, timeout=datetime.timedelta(seconds=seconds), wait_for_workers=False
        )
        self._group: dist.ProcessGroup | None = None
        self._buffers: list[Tensor] = []
        self._works: dict[int, dist.Work] = {}
        self._push, self._announced, self._end = -1, "", 0.0
        self._aborted: str | None = None
        self._waiting_for = ""

    def address(self) -> WeightChannelAddress:
        return WeightChannelAddress(
            kind="group",
            name=self.name,
            address=own_address(),
            port=self._store.port,
            backend=self._backend,
            world_size=self._world_size,
        )

    def join(self, seconds: float) -> None:
        """Nobody begins to make the group before all engines are there, as the store tells: neither backend's joining can be called off."""
        self._end = time.monotonic() + seconds
        self._until(self._all_here)
        done = threading.Event()
        error: list[BaseException] = []

        def work() -> None:
            try:
                self._group = self._made()
                first = torch.zeros(1, dtype=torch.uint8, device=device())
                dist.broadcast(first, src=0, group=self._group)  # NCCL makes its communicator at the first collective
                if first.is_cuda:
                    torch.cuda.current_stream().synchronize()
            except BaseException as raised:
                error.append(raised)
            done.set()
            if self._aborted is not None:
                self.close()

        threading.Thread(target=work, name=f"join-{self.name}", daemon=True).start()
        self._waiting_for = f"all of {self._world_size - 1} engine ranks to make the group"
        try:
            self._until(done.is_set)
        except WeightChannelBroken as broken:
            self.abort(str(broken))
            raise
        if error:
            raise WeightChannelBroken(f"channel {self.name} was not joined: {error[0]}") from error[0]

    def _all_here(self) -> bool:
        own, ranks = PrefixStore(self.name, self._store), range(1, self._world_size)
        missing = [rank for rank in ranks if not own.check([f"here/{rank}"])]
        self._waiting_for = f"engine ranks {', '.join(map(str, missing))}"
        if missing:
            time.sleep(JOIN_LOOK_SECONDS)
        return not missing

    def announce(self, push: int, manifest: Manifest, seconds: float) -> None:
        self._push, self._end, self._waiting_for = push, time.monotonic() + seconds, "the engines to take its buckets"
        repeated = manifest.id == self._announced
        with self._breaking():
            self._store.set(f"manifest/{push}", b"=" if repeated else b"M" + manifest.encoded)  # type: ignore[arg-type]  # bytes are fine
        self._announced = manifest.id
        largest, count = max(bucket.nbytes for bucket in manifest.buckets), min(BUFFERS, len(manifest.buckets))
        if len(self._buffers) < count or self._buffers[0].numel() < largest:
            self._buffers = [torch.empty(largest, dtype=torch.uint8, device=device()) for _ in range(count)]

    def buffer(self, number: int, nbytes: int) -> Tensor:
        before = self._works.pop(number - len(self._buffers), None)
        if before is not None:
            with self._breaking():
                if self._backend != "nccl":
                    self._until(before.is_completed)
                before.wait()  # raises what went wrong; with NCCL the current stream waits, this thread does not
        return self._buffers[number % len(self._buffers)][:nbytes]

    def send(self, number: int, flat: Tensor) -> None:
        if self._aborted is not None or self._group is None:
            raise WeightChannelBroken(self._aborted or f"channel {self.name} was not joined")
        with self._breaking():
            self._works[number] = dist.broadcast(flat, src=0, group=self._group, async_op=True)

    def finish(self) -> None:
        works, self._works = self._works, {}
        for work in works.values():
            with self._breaking():
                self._until(work.is_completed)
                if self._backend != "nccl":
                    work.wait()

    def abort(self, reason: str) -> None:
        if self._aborted is not None:
            return
        self._aborted = reason
        with contextlib.suppress(RuntimeError):
            self._store.set(f"aborted/{self._push}", reason)
        group = self._group
        if group is not None:
            self._ended(group.abort)

    def close(self) -> None:
        group, self._group = self._group, None
        self._buffers, self._works = [], {}
        if group is not None:
            self._ended(lambda: dist.destroy_process_group(group))

    def _made(self) -> dist.ProcessGroup:
        limit = self._seconds + (GROUP_MARGIN if self._backend == "nccl" else 0.0)
        with _peers_may_die():
            group, _ = _new_process_group_helper(
                self._world_size,
                0,
                [],
                dist.Backend(self._backend),
                PrefixStore(self.name, self._store),
                group_name=self.name,  # type: ignore[arg-type]  # a plain string in some releases of torch, a NewType of it in others
                backend_options=None,
                timeout=datetime.timedelta(seconds=limit),
            )
        _world.pg_group_ranks[group] = {index: index for index in range(self._world_size)}
        return group

    def _ended(self, work: Callable[[], object]) -> None:
        """Has a group's end done on a thread: it waits for what is under way where the backend cannot end that."""
        ending = threading.Thread(target=_quietly, args=(work,), name=f"end-{self.name}", daemon=True)
        ending.start()
        ending.join(END_SECONDS)  # a process that exits in the middle of it would crash

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """What torch raises in the body means that the channel is broken."""
        try:
            yield
        except WeightChannelBroken:
            raise
        except RuntimeError as error:
            raise WeightChannelBroken(f"channel {self.name} broke: {error}") from error

    def _until(self, done: Callable[[], bool]) -> None:
        looked = time.monotonic()
        while not done():
            if self._aborted is not None:
                raise WeightChannelBroken(self._aborted)
            if (at := time.monotonic()) > self._end:
                raise WeightChannelBroken(f"channel {self.name} waited in vain for {self._waiting_for}")
            if at - looked > STORE_LOOK_SECONDS:  # another rank may have said that it is over
                looked = at
                if self._store.check([f"aborted/{self._push}"]):
                    raise WeightChannelBroken(self._store.get(f"aborted/{self._push}").decode())
            time.sleep(POLL_INTERVAL_S)


@contextlib.contextmanager
def _peers_may_die() -> Iterator[None]:
    """NCCL groups made in the body do not take this process down when a member dies."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _quietly(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:
        structlog.get_logger().info("group_not_ended_well", error=str(error))
