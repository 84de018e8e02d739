"""A channel over mapped memory, both ends: what the trainer's side fills is what the engine's side reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from services.rollout.engine.receiver.channel_receiver import Aborted, ChannelBroken, ReceiveDeadline
from services.rollout.engine.receiver.memory_receiver import MemoryReceiver
from services.trainer.weights import memory_channel
from services.trainer.weights.memory_channel import MemoryWeightChannel
from services.trainer.weights.weight_channel import WeightChannelBroken
from shared.runtime.errors import BadMessage, DeadlineExceeded
from shared.transfer import mapped_files
from shared.transfer.manifest import Manifest, lay_out

SECONDS = 60.0
CPU = torch.device("cpu")
SHAPES = [("a", (64, 3)), ("b", (128,)), ("c", (7, 11)), ("d", (300,)), ("e", (2, 2, 2))]


def manifest(count: int = len(SHAPES)) -> Manifest:
    """A bucket each."""
    return lay_out([(name, "float32", shape) for name, shape in SHAPES[:count]], bucket_bytes=1)


def content(number: int, nbytes: int, push: int = 1) -> torch.Tensor:
    return torch.arange(nbytes, dtype=torch.int64).mul(31).add(number * 7 + push * 101).remainder(251).to(torch.uint8)


def send(channel: MemoryWeightChannel, sent: Manifest, push: int) -> None:
    channel.announce(push, sent, SECONDS)
    for number, bucket in enumerate(sent.buckets):
        flat = channel.buffer(number, bucket.nbytes)
        flat.copy_(content(number, bucket.nbytes, push))
        channel.send(number, flat)
    channel.finish()


def receive(wire: MemoryReceiver, push: int) -> list[torch.Tensor]:
    watch = ReceiveDeadline(SECONDS)
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
def joined(threads: ThreadPoolExecutor) -> Iterator[Callable[[int], tuple[MemoryWeightChannel, list[MemoryReceiver]]]]:
    """``joined(readers)``: a channel whose readers have all joined."""
    channels: list[MemoryWeightChannel] = []

    def make(readers: int) -> tuple[MemoryWeightChannel, list[MemoryReceiver]]:
        channels.append(channel := MemoryWeightChannel(f"channel-{len(channels)}", 1 + readers, SECONDS))
        wires = [MemoryReceiver(channel.address(), rank, CPU) for rank in range(1, 1 + readers)]
        joining = [threads.submit(wire.join, ReceiveDeadline(SECONDS)) for wire in wires]
        channel.join(SECONDS)
        for one in joining:
            one.result(SECONDS)
        return channel, wires

    yield make
    for channel in channels:
        channel.close()


def test_two_readers_get_every_bucket_of_every_push(joined: Callable, threads: ThreadPoolExecutor) -> None:
    channel, wires = joined(2)
    assert channel.address().kind == "memory"
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
    assert len(receive_some(wire, memory_channel.BUFFERS)) == memory_channel.BUFFERS
    assert not sending.done()
    watch = ReceiveDeadline(SECONDS)
    slow.manifest(1, watch)
    first = slow.take(0, sent.buckets[0].nbytes, watch)
    assert torch.equal(first, content(0, sent.buckets[0].nbytes)), "overwritten before it was released"
    rest = threads.submit(receive_rest, wire, memory_channel.BUFFERS, sent)
    for number, bucket in enumerate(sent.buckets):
        assert torch.equal(slow.take(number, bucket.nbytes, watch), content(number, bucket.nbytes))
        slow.release(number)
    rest.result(SECONDS)
    sending.result(SECONDS)


def receive_some(wire: MemoryReceiver, count: int) -> list[torch.Tensor]:
    watch = ReceiveDeadline(SECONDS)
    buckets = wire.manifest(1, watch).buckets[:count]
    taken = []
    for number, bucket in enumerate(buckets):
        taken.append(wire.take(number, bucket.nbytes, watch).clone())
        wire.release(number)
    return taken


def receive_rest(wire: MemoryReceiver, first: int, sent: Manifest) -> None:
    watch = ReceiveDeadline(SECONDS)
    for number in range(first, len(sent.buckets)):
        wire.take(number, sent.buckets[number].nbytes, watch)
        wire.release(number)


def test_nothing_of_it_is_left_in_memory(joined: Callable, threads: ThreadPoolExecutor) -> None:
    channel, (wire,) = joined(1)
    reading = threads.submit(receive, wire, 1)
    send(channel, manifest(), 1)
    reading.result(SECONDS)
    assert not list(mapped_files.directory().glob(f"{mapped_files.FILE_PREFIX}{channel.name}-*"))


def test_who_waits_is_ended_by_an_abort_of_either_side(joined: Callable, threads: ThreadPoolExecutor) -> None:
    channel, (wire,) = joined(1)
    channel.announce(1, manifest(), SECONDS)
    begun = threading.Event()

    def take() -> None:
        watch = ReceiveDeadline(SECONDS)
        wire.manifest(1, watch)
        begun.set()
        wire.take(0, 1, watch)

    waiting: Future[None] = threads.submit(take)
    assert begun.wait(SECONDS)
    channel.abort("rollout-1 is gone")
    with pytest.raises(ChannelBroken, match="rollout-1 is gone"):
        waiting.result(SECONDS)
    with pytest.raises(WeightChannelBroken, match="rollout-1 is gone"):
        channel.buffer(memory_channel.BUFFERS, 1)

    channel, (wire,) = joined(1)
    channel.announce(1, manifest(), SECONDS)
    begun.clear()
    waiting = threads.submit(take)
    assert begun.wait(SECONDS)
    wire.abort()
    with pytest.raises(Aborted):
        waiting.result(SECONDS)


def test_waits_end_with_their_deadlines_and_say_for_whom(joined: Callable) -> None:
    channel = MemoryWeightChannel("lonely", 3, SECONDS)
    with pytest.raises(WeightChannelBroken, match="2 engine ranks did not all join channel lonely"):
        channel.join(0.1)
    channel.close()
    channel, (wire,) = joined(1)
    channel.announce(1, manifest(), 0.1)
    for number in range(memory_channel.BUFFERS):
        channel.send(number, channel.buffer(number, 256))
    with pytest.raises(WeightChannelBroken, match="take bucket 0 of channel"):
        channel.buffer(memory_channel.BUFFERS, 256)
    with pytest.raises(DeadlineExceeded, match="bucket 3 of channel"):
        wire.manifest(1, ReceiveDeadline(SECONDS))
        wire.take(3, 256, ReceiveDeadline(0.1))


def test_a_file_that_is_no_buffer_is_not_opened(joined: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    channel, (wire,) = joined(1)
    other = tmp_path / "secret"
    other.write_bytes(b"x" * 4096)
    channel._handles = [[{"kind": "file", "path": str(other), "bytes": 4096}]]
    monkeypatch.setattr(channel, "_make_room", lambda _: None)
    channel.announce(1, manifest(), SECONDS)
    with pytest.raises(BadMessage, match="no buffer of a trainer's"):
        wire.manifest(1, ReceiveDeadline(SECONDS))
