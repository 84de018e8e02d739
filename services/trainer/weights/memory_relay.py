"""Colocated engines on several machines: each machine has a memory channel of each pipeline stage, and one of its ranks fills it.

A stage's source fills the channel of its own machine. A rank on each other machine, its *relay*, takes the same buckets from the source
over a group channel, and fills the channel there. Relays work on threads of their own: a rank may be the source of one stage and the relay
of another, and the export of the one must not wait for the other.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from shared.runtime.errors import MyxoError
from shared.runtime.tasks import run_in_thread
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer.group_channel import GroupReceiver, GroupSender, on_stream
from shared.transfer.manifest import Manifest
from shared.transfer.memory_channel import MemorySender
from shared.transfer.weight_channel import ChannelBroken, ChannelSender, TransferDeadline, abort_channel

MARGIN_SECONDS = 5.0
"""The seconds beyond its deadline that a relay has to end: it checks its deadline itself."""


def relays_of(machines: Sequence[str], sources: Mapping[int, int], engines: Mapping[str, int]) -> dict[int, list[int]]:
    """Returns the ranks that relay each pipeline stage, in the order of machines: one on each that has engines and not the stage's source.

    A machine's ranks relay stages by turns, first those that are no stage's source.

    Args:
        machines: the address of each rank's. sources: by stage, the rank that sends it. engines: by machine, the ranks of its engines.
    """
    relays: dict[int, list[int]] = {stage: [] for stage in sources}
    for machine in dict.fromkeys(machines):
        here = [rank for rank, address in enumerate(machines) if address == machine]
        here.sort(key=lambda rank: rank in sources.values())  # stable
        foreign = [stage for stage in sorted(sources) if machines[sources[stage]] != machine and engines.get(machine)]
        for turn, stage in enumerate(foreign):
            relays[stage].append(here[turn % len(here)])
    return relays


class RelayedSender:
    """The source's end of one stage: it fills the memory of its own machine, and sends the same to the relays.

    It has what `StageSender` asks of a `ChannelSender`.

    Args:
        local: of this machine's engines. relays: to the other machines' relays.
    """

    def __init__(self, local: MemorySender, relays: GroupSender) -> None:
        self._local, self._relays = local, relays
        self.address = local.address

    def join(self, seconds: float) -> None:
        """As `ChannelSender.join`, for relays and engines."""
        with self._breaking_both():
            self._relays.join(seconds)
            self._local.join(seconds)

    def announce(self, push: int, manifest: Manifest, seconds: float) -> None:
        """As `ChannelSender.announce`."""
        with self._breaking_both():
            self._relays.announce(push, manifest, seconds)
            self._local.announce(push, manifest, seconds)

    def buffer(self, index: int, nbytes: int) -> Tensor:
        """As `ChannelSender.buffer`."""
        with self._breaking_both():
            return self._local.buffer(index, nbytes)

    def send(self, index: int, flat: Tensor) -> None:
        """As `ChannelSender.send`. The relays get a copy: the engines may be done with the bucket before it has arrived there."""
        with self._breaking_both():
            copy = self._relays.buffer(index, flat.numel())
            copy.copy_(flat)
            self._relays.send(index, copy)
            self._local.send(index, flat)

    def finish(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """As `ChannelSender.finish`."""
        with self._breaking_both():
            self._relays.finish(meanwhile)
            self._local.finish(meanwhile)

    @contextlib.contextmanager
    def _breaking_both(self) -> Iterator[None]:
        """Ends both channels where the body breaks one: the others would wait for what does not come."""
        try:
            yield
        except ChannelBroken as error:
            self.abort(str(error))
            raise

    def abort(self, reason: str) -> None:
        """As `ChannelSender.abort`."""
        self._relays.abort(reason)
        self._local.abort(reason)

    def close(self) -> None:
        """As `ChannelSender.close`."""
        self._relays.close()
        self._local.close()


class MemoryRelay:
    """A relay's end of one stage: what comes from the source goes into the memory of this machine.

    Args:
        source: of the channel to the relays. rank: this one's in it, from 1. local: to this machine's engines.
    """

    def __init__(self, source: WeightChannelAddress, rank: int, local: MemorySender) -> None:
        self._source, self._local = source, local
        self._receiver = GroupReceiver(source, rank, local.device)
        self._stream = torch.cuda.Stream(local.device) if local.device.type == "cuda" else None
        self._working: Future[None] | None = None
        self.address = local.address

    def begin_join(self, seconds: float) -> None:
        """Begins to join the source's channel and to wait for the engines."""
        self._begin(lambda: self._join(seconds), "join")

    def begin(self, push: int, seconds: float) -> None:
        """Begins to pass on a push."""
        self._begin(lambda: self._pass_on(push, seconds), "relay")

    def wait(self, seconds: float) -> None:
        """Returns once what was begun is done. Raises ChannelBroken."""
        if self._working is None:
            return
        try:
            self._working.result(seconds + MARGIN_SECONDS)
        except TimeoutError:
            raise ChannelBroken(f"the relay of channel {self._source.name} did not end within {seconds + MARGIN_SECONDS:g} s") from None

    def abort(self, reason: str) -> None:
        """Ends what is under way, from any thread."""
        self._local.abort(reason)
        self._receiver.close()

    def close(self) -> None:
        """Leaves both channels."""
        self._receiver.close()
        self._local.close()

    def _begin(self, work: Callable[[], None], name: str) -> None:
        def done() -> None:
            try:
                with on_stream(self._stream):
                    if self._stream is not None:
                        torch.cuda.set_device(self._local.device)  # of this thread
                    work()
            except MyxoError as error:
                reason = self._local.broken or str(error)  # this end's own is the cause, whatever it was met by
                self.abort(reason)
                abort_channel(self._source, reason)  # the source would wait for this end until its deadline
                raise ChannelBroken(reason) from error

        self._working = run_in_thread(done, f"{name}-{self._source.name}")

    def _join(self, seconds: float) -> None:
        self._receiver.join(TransferDeadline(seconds))
        self._local.join(seconds)

    def _pass_on(self, push: int, seconds: float) -> None:
        deadline = TransferDeadline(seconds)
        manifest = self._receiver.manifest(push, deadline)
        self._local.announce(push, manifest, seconds)
        for index, bucket in enumerate(manifest.buckets):
            taken = self._receiver.take(index, bucket.nbytes, deadline)
            flat = self._local.buffer(index, bucket.nbytes)
            flat.copy_(taken)
            self._receiver.release(index)
            self._local.send(index, flat)
        self._receiver.finish(deadline)
        self._local.finish()


StageChannel = ChannelSender | RelayedSender
