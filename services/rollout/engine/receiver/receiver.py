"""Handles weights in one process of the engine: it joins channels, receives pushes, compares, and records which tensors it holds.

Invariant: `Receiver.digest` is that of exactly the tensors that the model holds, or empty. Digests that a failed push may have made invalid
are forgotten; a push of a part keeps the digests of the rest.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from services.rollout.engine.receiver import load_plan
from services.rollout.engine.receiver.reception import ManifestLayout, Reception
from shared.runtime.errors import BadMessage, DeadlineExceeded, MyxoError
from shared.runtime.tasks import run_in_thread
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer.bucket_ring import BucketRing
from shared.transfer.digest import TensorDigest, version_digest
from shared.transfer.group_channel import GroupReceiver
from shared.transfer.manifest import Manifest
from shared.transfer.memory_channel import MemoryReceiver
from shared.transfer.weight_channel import ChannelReceiver, TransferAborted, TransferDeadline

log = logging.getLogger(__name__)

KEPT_LAYOUTS = 16
"""The number of manifests whose plans are kept: for each channel that of a whole push, and that of a part."""


class ReceiveError(MyxoError):
    """A push was not received. ``touched``: parameters may hold some of it."""

    def __init__(self, reason: str, touched: bool) -> None:
        self.touched = touched
        super().__init__(reason)


def said_by(error: BaseException) -> str:
    """Returns what an error says, with its kind unless it is one of ours."""
    return str(error) if isinstance(error, MyxoError) else f"{type(error).__name__}: {error}"


class Receiver:
    """The receiver of one rank. `finish`, `receive`, `layout` and `on_stream` belong to the model's thread; others may use the rest.

    Args:
        model: any module with ``load_weights(names and tensors)``. rank: in the engine's tensor parallelism. model_path: the checkpoint
            that adapters are laid over, where there are any. engine_streams: returns the streams on which the engine computes; None: they
            are not known. undisturbed: a context in which the engine leaves the interpreter to other threads.
    """

    def __init__(
        self,
        model: Any,
        rank: int,
        device: torch.device | str,
        model_path: str | None = None,
        engine_streams: Callable[[], Sequence[torch.cuda.Stream]] | None = None,
        undisturbed: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.model, self.rank, self.device, self.model_path = model, rank, torch.device(device), model_path
        self.engine_streams, self._undisturbed = engine_streams, undisturbed
        self.known: dict[str, TensorDigest] = {}
        self.version = -1
        self.before_change: set[Callable[[str], None]] = set()  # callbacks of threads that read parameters; called with the reason to stop
        self._digest: str | None = ""
        self._channels: _JoinedChannels | None = None
        self._called_off: frozenset[str] = frozenset()  # channels that were left by an abort while they were being joined
        self._rings: list[BucketRing] = []
        self._layouts: dict[str, ManifestLayout] = {}  # by manifest
        self._parameters: list[int] = []
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    # ------------------------------------------------------------------------------------------------ held weights

    @property
    def digest(self) -> str:
        """Returns the digest of all known tensors; empty where none is known."""
        if self._digest is None:
            self._digest = version_digest(self.known) if self.known else ""
        return self._digest

    def adopt(self, version: int, known: Mapping[str, TensorDigest]) -> None:
        """Notes that the model now holds exactly these tensors. None: its tensors are unknown."""
        self.disturb("the weights are being replaced")
        self.known, self.version, self._digest = dict(known), version, None

    def learn(self, version: int, known: Mapping[str, TensorDigest]) -> None:
        """Notes that the model now holds these tensors, in addition to those already known."""
        self.known.update(known)
        self.version, self._digest = version, None

    def disturb(self, reason: str) -> None:
        """Stops all readers of parameters, because these are about to change."""
        for stop in list(self.before_change):
            stop(reason)

    # ------------------------------------------------------------------------------------------------------- channels

    @property
    def channels(self) -> list[str]:
        """Returns the channels that it has joined, or is joining."""
        return [] if self._channels is None else [channel.name for channel in self._channels.all]

    def join(self, addresses: Sequence[WeightChannelAddress], first_rank: int, seconds: float) -> None:
        """Leaves its present channels and joins these on a thread; `receive` waits for it.

        Args:
            first_rank: of the engine's first process, in all channels. seconds: for joining.
        """
        self.leave()
        while len(self._rings) < len(addresses):
            self._rings.append(BucketRing(self.device))
        rank = first_rank + self.rank
        # of several channels the broadcasts must begin in the same order on all engines
        early = self._undisturbed if len(addresses) == 1 and self._streams_known else None

        def channel(address: WeightChannelAddress, ring: BucketRing) -> ChannelReceiver:
            if address.kind == "memory":
                return MemoryReceiver(address, rank, self.device)
            return GroupReceiver(address, rank, self.device, ring, early)

        channels = [channel(address, ring) for address, ring in zip(addresses, self._rings, strict=False)]
        self._channels = _JoinedChannels(channels, TransferDeadline(seconds, "the channels are given up"))

    def leave(self, *, free: bool = False) -> None:
        """Leaves all channels. ``free``: also gives up the buffers that the next ones would take over."""
        channels, self._channels = self._channels, None
        if free:
            self._rings = []
        if channels is not None:
            channels.leave()
        for layout in list(self._layouts.values()):
            for loader in layout.loaders:
                loader.forget()

    def abort(self) -> None:
        """Leaves channels that are still being joined. A push that is being received is ended by its own deadline."""
        if self._channels is not None and not self._channels.joined:
            self._called_off = frozenset(self.channels)
            self.leave()

    # ------------------------------------------------------------------------------------------------------ receiving

    def prepare(
        self,
        version: int,
        push: int,
        channels: Sequence[str],
        deadline: TransferDeadline,
        *,
        check: bool = False,
        manifests: Mapping[str, str] | None = None,
    ) -> Reception:
        """Begins to receive a push, from any thread, while the engine may still generate: the transfer begins, nothing is loaded.

        What shares memory with the trainer, or comes to an engine whose streams are not known, begins only in `finish`.

        Args:
            check: for a comparison with the model's weights. manifests: see `Reception`.

        Raises:
            ReceiveError: for every failure; nothing was touched.
        """
        try:
            reception = Reception(self, version, push, check, self._joined(channels, deadline), deadline, manifests or {})
            if self._begins_early(reception):
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)  # of this thread
                reception.begin()
            return reception
        except Exception as error:
            self.leave()
            raise self._failure(error, push, version, touched=False) from error

    def finish(self, reception: Reception) -> dict[str, Any]:
        """Receives the push and loads it, or compares it with the model's weights; on the model's thread.

        Channels on which a push has failed are left, since data of the failed push may still be in transit over them. Returns the fields of
        `shared.schema.weight_messages.WeightsReceived`.

        Raises:
            ReceiveError: for every failure.
        """
        if not reception.check:
            self.disturb(f"a push of version {reception.version} begins")
        try:
            answer = reception.run()
            reception.tell_held(answer["digest"])
            return answer
        except Exception as error:
            if reception.touched:
                self.adopt(-1, {})
            self.leave()
            self._settle()
            raise self._failure(error, reception.push, reception.version, reception.touched) from error

    def receive(
        self, version: int, push: int, channels: Sequence[str], deadline: TransferDeadline, *, check: bool = False
    ) -> dict[str, Any]:
        """Receives a push as `prepare` and `finish` do together."""
        return self.finish(self.prepare(version, push, channels, deadline, check=check))

    def call_off(self, reception: Reception) -> None:
        """Gives up a push that was prepared and will not be finished; from any thread. Nothing was touched."""
        for channel in reception.channels if reception.begun else ():  # not by `leave`: others may have been joined meanwhile
            channel.close()

    @property
    def _streams_known(self) -> bool:
        return self.device.type != "cuda" or self.engine_streams is not None

    def _begins_early(self, reception: Reception) -> bool:
        return self._streams_known and all(isinstance(channel, GroupReceiver) for channel in reception.channels)

    def _failure(self, error: Exception, push: int, version: int, touched: bool) -> ReceiveError:
        if not isinstance(error, MyxoError):
            log.error("push %d of version %d was not received", push, version, exc_info=error)
        return ReceiveError(said_by(error), touched)

    def _joined(self, names: Sequence[str], deadline: TransferDeadline) -> list[ChannelReceiver]:
        channels = self._channels
        if channels is None and self._called_off.issuperset(names):  # the abort came before its command
            raise TransferAborted(f"the joining of channels {sorted(names)} was called off")
        if channels is None or set(names) - set(self.channels):
            raise BadMessage(f"channels {sorted(names)} are to be received from; this engine has joined {self.channels or 'none'}")
        channels.wait(deadline)
        return [channel for channel in channels.all if channel.name in names]

    def layout(self, manifest: Manifest) -> ManifestLayout:
        """Returns the kept layout of a manifest."""
        parameters = [tensor.data_ptr() for tensor in load_plan.parameters_of(self.model)]
        if parameters != self._parameters:  # a parameter was replaced since, so the traced copies would go elsewhere
            self._layouts, self._parameters = {}, parameters
        found = self._layouts.pop(manifest.id, None) or ManifestLayout(manifest, self.device)
        while len(self._layouts) >= KEPT_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        self._layouts[manifest.id] = found
        return found

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Makes the loading stream the current one on a GPU; it starts after all that the engine has submitted to the device before."""
        if self._stream is None:
            yield
            return
        if self.engine_streams is None:
            torch.cuda.synchronize(self.device)  # once per push: the engine's last step may be under way on any stream
        else:  # broadcasts that may never end are on their way, which a wait for the device would include
            for stream in (torch.cuda.current_stream(self.device), torch.cuda.default_stream(self.device), *self.engine_streams()):
                self._stream.wait_stream(stream)
        with torch.cuda.stream(self._stream):
            yield

    def _settle(self, seconds: float = 5.0) -> None:
        """Waits until the loading stream has done all of its work."""
        end = time.monotonic() + seconds
        while self._stream is not None and not self._stream.query() and time.monotonic() < end:
            time.sleep(0.001)


class _JoinedChannels:
    """The channels that are being joined, one after the other and in the same order on all engines, as NCCL's communicators require."""

    def __init__(self, channels: list[ChannelReceiver], deadline: TransferDeadline) -> None:
        self.all, self._deadline = channels, deadline
        self._present = channels[0]
        self._joining = run_in_thread(self._join, "join-channels")

    @property
    def joined(self) -> bool:
        """Returns whether all channels have been joined."""
        return self._joining.done() and self._joining.exception() is None

    def wait(self, deadline: TransferDeadline) -> None:
        """Returns once all are joined. Raises the error of joining, TransferAborted, or DeadlineExceeded that names the missing members."""
        members = "the channels' members"
        try:
            deadline.until(self._joining.done, "the channels' joining", members)
            if not self.joined:
                deadline.check("the channels' joining", members)  # an abort also leaves the channels, and is the reason then
        except DeadlineExceeded:
            present = self._present
            what = f"the joining of channel {present.name}"
            raise DeadlineExceeded(what, present.awaited_from, deadline.seconds, deadline.next_action) from None
        self._joining.result()

    def leave(self) -> None:
        self._deadline.abort()
        for channel in self.all:
            channel.close()

    def _join(self) -> None:
        for channel in self.all:
            self._present = channel
            channel.join(self._deadline)
