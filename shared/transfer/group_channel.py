"""A channel over a process group (NCCL, gloo on CPUs): the source is rank 0 and broadcasts; the engine ranks are the others.

Two broadcasts are on their way while a bucket is being filled at the one end and loaded at the other. A collective that a member's death
has left hanging does not end by itself with NCCL, nor can gloo call one off: both ends only check whether it is done, until their
deadline.

As a program (``python -m shared.transfer.group_channel``, settings as a line of JSON on its input) it sends a checkpoint in a weight group
of SGLang's own (`send_checkpoint`), to an engine without a reader's end of ours. A process can be killed, whatever a collective waits for.
"""

import atexit
import concurrent.futures
import contextlib
import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store

from shared.runtime.addresses import address_towards
from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.runtime.tasks import SupervisedThread, run_in_thread
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer import digest
from shared.transfer.bucket_ring import BUFFERS, BucketRing
from shared.transfer.channel_store import BoundStore, StoreFollower
from shared.transfer.manifest import Manifest
from shared.transfer.tensor_file import TensorFiles
from shared.transfer.weight_channel import POLL_INTERVAL_S, ChannelBroken, ChannelReceiver, ChannelSender, TransferDeadline, breaking
from shared.transfer.weight_checkpoint import load_checkpoint

# the longest that a push which has begun may wait until somebody asks for it: a rollout service has as long for a step of its own
CLAIM_SECONDS = 10.0
GROUP_SECONDS = 24 * 3600.0  # NCCL's own limit for a collective, after which it would end the process: far beyond any deadline
# the seconds after its deadline at which a gloo broadcast ends by itself: only then is the buffer of an abandoned one released
OVERDUE_SECONDS = 5.0
ABORT_SECONDS = 5.0  # the seconds for NCCL to end a communicator's kernels
END_SECONDS = 3.0  # the seconds for which a process that exits waits for a group to be destroyed
# Variables read when a group is made: no watchdog may end this process because a peer has died. Deadlines are checked here.
NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class BroadcastGroup:
    """A process group in which rank 0 broadcasts bytes, and which can be given up at any moment.

    The constructor blocks until every member is in it, and raises RuntimeError.

    Args:
        stock: it is a weight group of SGLang's own: torch's names in the store, and nothing is sent before the first tensor.
    """

    def __init__(
        self, address: WeightChannelAddress, store: Store, rank: int, device: torch.device, seconds: float, *, stock: bool = False
    ) -> None:
        self._name, self._device = address.name, device
        kind = "cpu" if address.backend == "gloo" else "cuda"
        prefix = f"{address.name}/{address.name}//{kind}/" if stock else f"{address.name}/group/"
        prefixed, size = PrefixStore(prefix, store), address.world_size
        self._group: Any
        if address.backend == "gloo":
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = datetime.timedelta(seconds=max(1.0, seconds))
            here = address.address if rank == 0 else address_towards(address.address)
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=here)]  # by itself gloo takes what the host's name means
            self._group = dist.ProcessGroupGloo(prefixed, rank, size, gloo)
        else:
            torch.cuda.set_device(device)  # of this thread
            with _environment(NCCL_SETTINGS):
                # of high priority: a broadcast's kernel would otherwise wait until one that loads or hashes has left the processors
                options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
                options._timeout = datetime.timedelta(seconds=GROUP_SECONDS)
                self._group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        self._group._set_sequence_number_for_group()
        if stock:
            return
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with on_stream(stream):  # NCCL makes its communicator at the first collective
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), seconds).wait()
        if stream is not None:
            stream.synchronize()

    @classmethod
    def form(cls, end: "GroupSender | GroupReceiver", store: Store, rank: int, deadline: TransferDeadline) -> "BroadcastGroup":
        """Returns the group of one end of a channel. It is formed on a thread, because forming cannot be cancelled.

        Raises ChannelBroken, TransferAborted, DeadlineExceeded; the end is broken then, and a group that comes late is given up.
        """

        def give_up_late(late: Future[BroadcastGroup]) -> None:
            if end.broken is not None and late.exception() is None:
                late.result().end()

        what, awaited_from = f"the joining of channel {end.name}", "the channel's other members"
        forming = run_in_thread(lambda: cls(end.address, store, rank, end.device, deadline.left), f"join-{end.name}")
        try:
            deadline.until(forming.done, what, awaited_from, end.raise_if_broken)  # the store answers nothing else meanwhile
            with breaking(f"channel {end.name} was not joined"):
                return forming.result()
        except MyxoError as error:
            end.broken = end.broken or str(error)
            raise
        finally:
            forming.add_done_callback(give_up_late)

    def broadcast(self, flat: Tensor, seconds: float) -> Any:
        """Begins a broadcast and returns torch's work. On a GPU it follows the current stream, which ``wait()`` makes wait for it."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if self._device.type != "cuda":  # NCCL's would end the process
            options.timeout = datetime.timedelta(seconds=seconds)
        if (group := self._group) is None:
            raise RuntimeError("the group was left")
        return group.broadcast([flat], options)

    def end(self, settled: Callable[[], bool] = lambda: True) -> None:
        """Ends NCCL's kernels and waits until ``settled``; gloo's broadcasts end with their own limit, beside everything."""
        group, self._group = self._group, None
        if group is None:
            return
        ended = run_in_thread(group.abort if self._device.type == "cuda" else lambda: None, f"leave-{self._name}")
        if self._device.type == "cuda":  # what follows on this device must not meet a broadcast that still writes
            until = time.monotonic() + ABORT_SECONDS
            while time.monotonic() < until and not (ended.done() and settled()):
                time.sleep(0.001)
        # the last reference to a group waits for what it still has to do: it is to be this thread's
        dropping = threading.Thread(target=_outlive, args=(group, ended), name=f"drop-{self._name}", daemon=True)
        del group
        dropping.start()
        atexit.register(dropping.join, END_SECONDS)  # a process that exits in the middle of it would crash


class GroupSender(ChannelSender):
    """The source's end. `ChannelSender` has the other arguments.

    Args:
        paced: this thread waits for buffers on a GPU, too, so that an abort stops what is sent.
    """

    kind = "group"

    def __init__(self, name: str, host: str, world_size: int, device: torch.device, *, paced: bool = False) -> None:
        super().__init__(name, host, world_size, device, "nccl" if device.type == "cuda" else "gloo")
        self._paced = paced or self.backend == "gloo"
        self._ending: Future[None] | None = None
        self._group: BroadcastGroup | None = None
        self._ring = BucketRing(device)
        self._works: dict[int, Any] = {}

    def join(self, seconds: float) -> None:
        super().join(seconds)
        try:
            self._group = BroadcastGroup.form(self, self.store, 0, self._deadline)
        except DeadlineExceeded as error:
            self.abort(str(error))
            raise ChannelBroken(str(error)) from error
        if self.broken is not None:
            self._end_group()
            self.raise_if_broken()

    def announce(self, push: int, manifest: Manifest, seconds: float) -> None:
        super().announce(push, manifest, seconds)
        self._ring.reserve(manifest)

    def buffer(self, index: int, nbytes: int) -> Tensor:
        before = self._works.pop(index - len(self._ring), None)
        if before is not None:
            if self._paced:
                self._until(before.is_completed, f"the taking of bucket {index - len(self._ring)}")
            with self._breaking():
                before.wait()  # raises what went wrong; with NCCL the current stream waits, this thread does not
        return self._ring.flat(index, nbytes)

    def send(self, index: int, flat: Tensor) -> None:
        self.raise_if_broken()
        group = self._group
        if group is None:
            raise ChannelBroken(f"channel {self.name} was not joined")
        with self._breaking():
            self._works[index] = group.broadcast(flat, self._deadline.left + OVERDUE_SECONDS)

    def finish(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        works, self._works = self._works, {}
        for index, work in works.items():
            self._until(work.is_completed, f"the taking of bucket {index}", meanwhile)
            if self.backend == "gloo":
                with self._breaking():
                    work.wait()
        self.raise_if_broken()

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self._end_group()

    def close(self) -> None:
        super().close()
        self._ring.forget()
        self._works = {}
        self._end_group()
        if self._ending is not None:
            concurrent.futures.wait([self._ending], END_SECONDS)

    def _end_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._ending = run_in_thread(group.end, f"end-{self.name}")


class GroupReceiver(ChannelReceiver):
    """A reader's end. NCCL's broadcasts are issued on a stream of their own; each waits, on the GPU, until its buffer has been read.

    Args:
        ring: buffers of an earlier channel, to take over. undisturbed: pushes after the first begin when their source announces them, each
            in this context; None: when `manifest` is called.
    """

    def __init__(
        self,
        address: WeightChannelAddress,
        rank: int,
        device: torch.device,
        ring: BucketRing | None = None,
        undisturbed: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
    ) -> None:
        super().__init__(address, rank, device)
        self._undisturbed, self._receiving = undisturbed, False
        self._announcements: StoreFollower | None = None
        self._lock = threading.Lock()
        self._asked_for = -1  # the newest push that somebody has asked for
        self._begun: int | None = None  # the push that has begun early and has not been asked for
        self._ring = ring or BucketRing(device)
        self._group: BroadcastGroup | None = None
        self._works: dict[int, Any] = {}
        self._arrived: dict[int, torch.cuda.Event] = {}
        self._free: dict[int, torch.cuda.Event] = {}  # by buffer
        self._posted = 0
        self._deadline = TransferDeadline(0.0)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def join(self, deadline: TransferDeadline) -> None:
        if self.address.backend not in ("gloo", "nccl"):
            raise ChannelBroken(f"channel {self.name} was not joined: backend {self.address.backend!r}, not 'gloo' or 'nccl'")
        super().join(deadline)
        # forming the group cannot be cancelled, so no member begins before all are there
        others = [f"{self.name}/here/{rank}" for rank in range(1, self.address.world_size) if rank != self.rank]
        self.awaited_from = f"the other engines of channel {self.name}"
        self._ask(lambda store: not others or store.check(others), f"the joining of channel {self.name}", deadline)
        self.awaited_from = self.source
        self.read(f"{self.name}/here/0", f"the joining of channel {self.name}", deadline)
        self._group = BroadcastGroup.form(self, self.store, self.rank, deadline)
        if self._undisturbed is not None:
            with breaking(f"{self.source} is gone"):
                self._announcements = StoreFollower(self.address.address, self.address.port, self.address.secret, deadline.left)
                SupervisedThread(self._follow, f"follow-{self.name}").start()
        if self.broken is not None:
            self.close()
            self.raise_if_broken()

    def manifest(self, push: int, deadline: TransferDeadline, known: str = "") -> Manifest:
        self.raise_if_broken()
        with self._lock:
            begun, self._begun = self._begun, None
            self._asked_for = max(self._asked_for, push)
        self._receiving = True
        if begun == push and self._manifest is not None:
            self._deadline, self._asked_at = deadline, time.monotonic()
            return self._manifest
        manifest = super().manifest(push, deadline, known)
        self._begin(manifest, deadline)
        return manifest

    def _follow(self) -> None:
        """Begins pushes as the source announces them, until it hangs up. Leaves the channel where one has begun and no one asks for it."""
        assert self._announcements is not None
        while True:
            try:
                said = self._announcements.heard(None if self._begun is None else CLAIM_SECONDS)
            except TimeoutError:
                if self._begun is None:  # it was asked for meanwhile
                    continue
                break
            if said is None:
                break
            push, manifest, seconds = said
            with self._lock, contextlib.suppress(MyxoError, RuntimeError):  # whoever asks for the push meets the same
                if self._begun is None and push > self._asked_for and self._begin_early(manifest, seconds):
                    self._begun = push
        with self._lock:
            push, self._begun = self._begun, None
        if push is not None:
            reason = f"push {push} has begun over channel {self.name}, and this engine was not asked to receive it"
            self.broken = self.broken or reason
            self.close()

    def _begin_early(self, manifest: str, seconds: float) -> bool:
        """Issues a push's first broadcasts where its manifest is the one that came last, and that push is over. Returns whether it did."""
        if self._receiving or self._manifest is None or self._manifest.id != manifest or self._undisturbed is None:
            return False
        if self._stream is not None:
            torch.cuda.set_device(self.device)  # of this thread
        with self._undisturbed():
            self._begin(self._manifest, TransferDeadline(seconds))
        return True

    def _begin(self, manifest: Manifest, deadline: TransferDeadline) -> None:
        self._ring.reserve(manifest)
        self._works, self._arrived, self._free, self._posted, self._deadline = {}, {}, {}, 0, deadline
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._post(BUFFERS)
        self.begun_at = time.monotonic()

    def take(self, index: int, nbytes: int, deadline: TransferDeadline) -> Tensor:
        self._post(index + BUFFERS)
        what, work = f"bucket {index}", self._works[index]
        if self._stream is None:
            deadline.until(work.is_completed, what, self.source, self.check_source)
            with breaking(f"{what} did not come from {self.source}"):
                work.wait()
        else:
            arrived = self._arrived.pop(index)
            deadline.until(arrived.query, what, self.source, self.check_source, eager=True)
            torch.cuda.current_stream(self.device).wait_event(arrived)
        del self._works[index]
        return self._ring.flat(index, nbytes)

    def release(self, index: int) -> None:
        if self._stream is not None:
            event = self._free.setdefault(index % len(self._ring), torch.cuda.Event())
            event.record(torch.cuda.current_stream(self.device))

    def finish(self, deadline: TransferDeadline) -> None:
        self._receiving = False

    def _post(self, end: int) -> None:
        """Issues the broadcasts of the buckets before number ``end``, whose buffers have been released by then."""
        group = self._group
        if group is None or self._manifest is None:
            raise ChannelBroken(self.broken or f"channel {self.name} was not joined")
        buckets = self._manifest.buckets
        for index in range(self._posted, min(end, len(buckets))):
            flat = self._ring.flat(index, buckets[index].nbytes)
            with breaking(f"bucket {index} cannot come from {self.source}"), on_stream(self._stream):
                if self._stream is not None and (free := self._free.get(index % len(self._ring))) is not None:
                    self._stream.wait_event(free)
                self._works[index] = group.broadcast(flat, self._deadline.left + OVERDUE_SECONDS)
                if self._stream is not None:
                    self._works[index].wait()  # of the stream for NCCL's own, not of this thread
                    self._arrived[index] = torch.cuda.Event()
                    self._arrived[index].record(self._stream)
            self._posted = index + 1

    def close(self) -> None:
        super().close()
        if self._announcements is not None:
            self._announcements.close()
        group, self._group = self._group, None
        if group is not None:
            group.end(lambda: self._stream is None or self._stream.query())
            if self._works:  # somebody may still write into them
                self._ring.forget()


def on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Makes a stream the current one in the body; None on CPUs."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _outlive(group: Any, ended: Future[None]) -> None:
    """Holds a group until all other references to it are most likely gone."""
    with contextlib.suppress(Exception):
        ended.result(ABORT_SECONDS)
    time.sleep(POLL_INTERVAL_S)


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ[name] for name in settings if name in os.environ}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def send_checkpoint(settings: dict[str, Any]) -> None:
    """Sends a checkpoint's tensors, each by a broadcast, in the order of a manifest of them all, as rank 0 of a group that it forms.

    The group's port is printed first. Each tensor's digest is compared before it is sent. It ends with its input, since what was sent may
    be in transit. Raises BrokenCheckpoint; RuntimeError, torch's.
    """
    path, seconds = Path(settings["checkpoint"]), float(settings["seconds"])
    checkpoint, files = load_checkpoint(path), TensorFiles(sorted(path.glob("*.safetensors")))
    host, size, backend = str(settings["master_address"]), int(settings["world_size"]), str(settings["backend"])
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    store = BoundStore(host, 0, size, True, datetime.timedelta(seconds=seconds), wait_for_workers=False)
    print(store.port, flush=True)
    name, secret = str(settings["group_name"]), "0" * 32  # SGLang's groups know none
    place = {"kind": "group", "address": host, "port": store.port, "backend": backend, "world_size": size}
    address = WeightChannelAddress.model_validate({**place, "name": name, "secret": secret})
    group = BroadcastGroup(address, store, 0, device, seconds, stock=True)
    for slot in checkpoint.manifest(1).slots():
        if digest.of_bytes(files[slot.name]) != checkpoint.tensors[slot.name].digest:
            raise checkpoint.broken(f"{slot.name} is not what it was written as")
        group.broadcast(torch.from_numpy(files[slot.name]).view(getattr(torch, slot.dtype)).to(device), seconds).wait()
    sys.stdin.read()


if __name__ == "__main__":
    if line := sys.stdin.readline():
        send_checkpoint(json.loads(line))
