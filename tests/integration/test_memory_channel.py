"""A channel over mapped memory, both ends, on one machine and on several: what is filled here is what engines read there."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from services.trainer.weights.stage_sender import MemoryRelay, RelayedSender
from shared.runtime.errors import BadMessage, DeadlineExceeded
from shared.transfer.bucket_ring import BUFFERS
from shared.transfer.group_channel import GroupSender
from shared.transfer.manifest import Manifest, lay_out
from shared.transfer.memory_channel import FILE_PREFIX, MEMORY_BUFFERS, MemoryReceiver, MemorySender, buffer_directory
from shared.transfer.weight_channel import ChannelBroken, TransferDeadline

SECONDS = 60.0
CPU = torch.device("cpu")
SHAPES = [("a", (64, 3)), ("b", (128,)), ("c", (7, 11)), ("d", (300,)), ("e", (2, 2, 2))]


def manifest(count: int = len(SHAPES)) -> Manifest:
    """A bucket each."""
    return lay_out([(name, "float32", shape) for name, shape in SHAPES[:count]], bucket_bytes=1)


def content(number: int, nbytes: int, push: int = 1) -> torch.Tensor:
    return torch.arange(nbytes, dtype=torch.int64).mul(31).add(number * 7 + push * 101).remainder(251).to(torch.uint8)


def send(channel: MemorySender, sent: Manifest, push: int) -> None:
    channel.announce(push, sent, SECONDS)
    for number, bucket in enumerate(sent.buckets):
        flat = channel.buffer(number, bucket.nbytes)
        flat.copy_(content(number, bucket.nbytes, push))
        channel.send(number, flat)
    channel.finish()


def receive(wire: MemoryReceiver, push: int) -> list[torch.Tensor]:
    watch = TransferDeadline(SECONDS)
    taken = []
    for number, bucket in enumerate(wire.manifest(push, watch).buckets):
        taken.append(wire.take(number, bucket.nbytes, watch).clone())
        wire.release(number)
    wire.finish(watch)
    return taken


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def joined(threads: ThreadPoolExecutor) -> Iterator[Callable[[int], tuple[MemorySender, list[MemoryReceiver]]]]:
    """``joined(readers)``: a channel whose readers have all joined."""
    channels: list[MemorySender] = []

    def make(readers: int) -> tuple[MemorySender, list[MemoryReceiver]]:
        channels.append(channel := MemorySender(f"channel-{len(channels)}", "127.0.0.1", 1 + readers, CPU))
        wires = [MemoryReceiver(channel.address, rank, CPU) for rank in range(1, 1 + readers)]
        joining = [threads.submit(wire.join, TransferDeadline(SECONDS)) for wire in wires]
        channel.join(SECONDS)
        for one in joining:
            one.result(SECONDS)
        return channel, wires

    yield make
    for channel in channels:
        channel.close()


def test_two_readers_get_every_bucket_of_every_push(joined: Callable, threads: ThreadPoolExecutor) -> None:
    channel, wires = joined(2)
    assert channel.address.kind == "memory"
    for push, sent in ((1, manifest()), (4, manifest()), (6, manifest(3))):
        reading = [threads.submit(receive, wire, push) for wire in wires]
        send(channel, sent, push)
        for one in reading:
            got = one.result(SECONDS)
            assert len(got) == len(sent.buckets)
            assert all(torch.equal(flat, content(n, b.nbytes, push)) for n, (flat, b) in enumerate(zip(got, sent.buckets, strict=True)))


def test_a_buffer_is_filled_anew_only_once_every_reader_has_loaded_it(joined: Callable, threads: ThreadPoolExecutor) -> None:
    channel, (wire, slow) = joined(2)
    sending = threads.submit(send, channel, sent := manifest(), 1)
    assert len(receive_some(wire, MEMORY_BUFFERS)) == MEMORY_BUFFERS
    assert not sending.done()
    watch = TransferDeadline(SECONDS)
    slow.manifest(1, watch)
    first = slow.take(0, sent.buckets[0].nbytes, watch)
    assert torch.equal(first, content(0, sent.buckets[0].nbytes)), "overwritten before it was released"
    rest = threads.submit(receive_rest, wire, MEMORY_BUFFERS, sent)
    for number, bucket in enumerate(sent.buckets):
        assert torch.equal(slow.take(number, bucket.nbytes, watch), content(number, bucket.nbytes))
        slow.release(number)
    rest.result(SECONDS)
    sending.result(SECONDS)


def receive_some(wire: MemoryReceiver, count: int) -> list[torch.Tensor]:
    watch = TransferDeadline(SECONDS)
    buckets = wire.manifest(1, watch).buckets[:count]
    taken = []
    for number, bucket in enumerate(buckets):
        taken.append(wire.take(number, bucket.nbytes, watch).clone())
        wire.release(number)
    return taken


def receive_rest(wire: MemoryReceiver, first: int, sent: Manifest) -> None:
    watch = TransferDeadline(SECONDS)
    for number in range(first, len(sent.buckets)):
        wire.take(number, sent.buckets[number].nbytes, watch)
        wire.release(number)


def test_nothing_of_it_is_left_in_memory(joined: Callable, threads: ThreadPoolExecutor) -> None:
    channel, (wire,) = joined(1)
    reading = threads.submit(receive, wire, 1)
    send(channel, manifest(), 1)
    reading.result(SECONDS)
    assert not list(buffer_directory().glob(f"{FILE_PREFIX}{channel.name}-*"))


def test_who_waits_is_ended_by_an_abort_of_either_side(joined: Callable, threads: ThreadPoolExecutor) -> None:
    channel, (wire,) = joined(1)
    channel.announce(1, manifest(), SECONDS)
    begun = threading.Event()

    def take() -> None:
        watch = TransferDeadline(SECONDS)
        wire.manifest(1, watch)
        begun.set()
        wire.take(0, 1, watch)

    waiting: Future[None] = threads.submit(take)
    assert begun.wait(SECONDS)
    channel.abort("rollout-1 is gone")
    with pytest.raises(ChannelBroken, match="rollout-1 is gone"):
        waiting.result(SECONDS)
    with pytest.raises(ChannelBroken, match="rollout-1 is gone"):
        channel.buffer(MEMORY_BUFFERS, 1)

    channel, (wire,) = joined(1)
    channel.announce(1, manifest(), SECONDS)
    begun.clear()
    waiting = threads.submit(take)
    assert begun.wait(SECONDS)
    wire.close()
    with pytest.raises(ChannelBroken, match="was left"):
        waiting.result(SECONDS)


def test_waits_end_with_their_deadlines_and_say_for_whom(joined: Callable) -> None:
    channel = MemorySender("lonely", "127.0.0.1", 3, CPU)
    with pytest.raises(ChannelBroken, match="engine ranks 1, 2 did not join channel lonely"):
        channel.join(0.1)
    channel.close()
    channel, (wire,) = joined(1)
    channel.announce(1, manifest(), 0.1)
    for number in range(MEMORY_BUFFERS):
        channel.send(number, channel.buffer(number, 256))
    with pytest.raises(ChannelBroken, match="the loading of bucket 0 did not come from the 1 engine ranks of channel"):
        channel.buffer(MEMORY_BUFFERS, 256)
    with pytest.raises(DeadlineExceeded, match="bucket 3 did not come from the source of channel"):
        wire.manifest(1, TransferDeadline(SECONDS))
        wire.take(3, 256, TransferDeadline(0.1))


def test_a_file_that_is_no_buffer_is_not_opened(joined: Callable, tmp_path: Path) -> None:
    channel, (wire,) = joined(1)
    other = tmp_path / "secret"
    other.write_bytes(b"x" * 4096)
    channel.announce(1, manifest(), SECONDS)
    channel.note("buffers/1", json.dumps([[["file", str(other), 4096]]]))
    with pytest.raises(BadMessage, match="no buffer of a trainer's"):
        wire.manifest(1, TransferDeadline(SECONDS))


HOME = "127.0.0.1"


class Machines:
    """A source with ``readers[0]`` engine ranks beside it, and a relay with ``readers[N]`` on each further machine; all have joined."""

    def __init__(self, readers: tuple[int, ...], threads: ThreadPoolExecutor) -> None:
        way = GroupSender("way", HOME, len(readers), CPU)
        memories = [MemorySender(f"memory-{place}", HOME, 1 + count, CPU) for place, count in enumerate(readers)]
        self.source = RelayedSender(memories[0], way)
        self.relays = [MemoryRelay(way.address, place, memory) for place, memory in enumerate(memories[1:], start=1)]
        self.engines = [
            MemoryReceiver(memory.address, rank, CPU)
            for memory, count in zip(memories, readers, strict=True)
            for rank in range(1, 1 + count)
        ]
        self._threads = threads
        joining = [threads.submit(engine.join, TransferDeadline(SECONDS)) for engine in self.engines]
        for relay in self.relays:
            relay.begin_join(SECONDS)
        self.source.join(SECONDS)
        for relay in self.relays:
            relay.wait(SECONDS)
        for one in joining:
            one.result(SECONDS)

    def begin(self, push: int) -> None:
        for relay in self.relays:
            relay.begin(push, SECONDS)

    def close(self) -> None:
        for end in (self.source, *self.relays, *self.engines):
            end.close()


@pytest.mark.parametrize(
    "readers",
    [pytest.param((1, 2, 1), id="engines on all machines"), pytest.param((0, 1), id="none beside the source", marks=pytest.mark.extra)],
)
def test_engines_on_every_machine_read_what_the_source_has_filled(readers: tuple[int, ...], threads: ThreadPoolExecutor) -> None:
    machines = Machines(readers, threads)
    for push, sent in ((1, manifest()), (3, manifest()), (4, manifest(3))):
        reading = [threads.submit(receive, engine, push) for engine in machines.engines]
        machines.begin(push)
        send(machines.source, sent, push)
        for relay in machines.relays:
            relay.wait(SECONDS)
        expected = [content(number, bucket.nbytes, push) for number, bucket in enumerate(sent.buckets)]
        for one in reading:
            assert all(torch.equal(*pair) for pair in zip(one.result(SECONDS), expected, strict=True))
    machines.close()


def test_an_engine_that_is_lost_on_one_machine_ends_the_push_on_all_of_them(threads: ThreadPoolExecutor) -> None:
    machines = Machines((1, 1, 1), threads)
    reading = [threads.submit(receive, engine, 1) for engine in (machines.engines[0], machines.engines[2])]
    machines.begin(1)
    # the engine on the second machine takes nothing, and the buffers between do not hold so many
    many = lay_out([(str(number), "float32", (9,)) for number in range(3 * (BUFFERS + MEMORY_BUFFERS))], bucket_bytes=1)
    sending = threads.submit(send, machines.source, many, 1)
    machines.relays[0].abort("rollout-1: its heartbeat has stopped")
    with pytest.raises(ChannelBroken, match="rollout-1: its heartbeat has stopped"):
        machines.relays[0].wait(SECONDS)
    for one in (sending, *reading):
        with pytest.raises(ChannelBroken):
            one.result(SECONDS)
    with pytest.raises(ChannelBroken):
        machines.relays[1].wait(SECONDS)
    machines.close()
