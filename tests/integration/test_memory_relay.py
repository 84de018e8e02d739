"""Memory channels on several machines: what a stage's source fills on its own is what the engines on all of them read."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from services.trainer.weights.stage_sender import MemoryRelay, RelayedSender
from shared.transfer.bucket_ring import BUFFERS
from shared.transfer.group_channel import GroupSender
from shared.transfer.manifest import lay_out
from shared.transfer.memory_channel import MEMORY_BUFFERS, MemoryReceiver, MemorySender
from shared.transfer.weight_channel import ChannelBroken, TransferDeadline
from tests.integration.test_memory_channel import CPU, SECONDS, content, manifest, receive, send

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


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


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
