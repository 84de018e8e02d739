"""Pushes that begin when their source announces them, over gloo."""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from shared.transfer import group_channel
from shared.transfer.bucket_ring import BUFFERS
from shared.transfer.group_channel import GroupReceiver
from shared.transfer.manifest import Manifest, lay_out
from shared.transfer.weight_channel import ChannelBroken, TransferDeadline
from tests.support.waiting import until
from tests.support.weights_group import WeightsGroup

CPU = torch.device("cpu")
SECONDS = 60.0
TENSORS = {f"layer.{index}": torch.full((64,), float(index)) for index in range(BUFFERS)}


@dataclass
class Channel:
    """Both ends of a channel of which one push was received."""

    source: WeightsGroup
    reader: GroupReceiver
    manifest: Manifest
    closed_gates: list[bool]

    def announce(self, push: int) -> None:
        self.source.announce(push, self.manifest, SECONDS)

    def received(self, push: int) -> list[float]:
        """Returns what was received, one number of each bucket."""
        deadline = TransferDeadline(SECONDS)
        found = []
        for index, bucket in enumerate(self.reader.manifest(push, deadline, self.manifest.id).buckets):
            found.append(float(self.reader.take(index, bucket.nbytes, deadline).view(torch.float32)[0]))
            self.reader.release(index)
        self.reader.finish(deadline)
        return found


@pytest.fixture
def channel() -> Iterator[Channel]:
    gates: list[bool] = []

    @contextlib.contextmanager
    def undisturbed() -> Iterator[None]:
        gates.append(True)
        yield

    source = WeightsGroup("followed", 2)
    reader = GroupReceiver(source.address, 1, CPU, undisturbed=undisturbed)
    manifest = lay_out([(name, "float32", tuple(tensor.shape)) for name, tensor in TENSORS.items()], 256)
    assert len(manifest.buckets) == BUFFERS
    with ThreadPoolExecutor(2) as pool:
        joining = pool.submit(reader.join, TransferDeadline(SECONDS))
        source.join(SECONDS)
        joining.result(SECONDS)
        found = Channel(source, reader, manifest, gates)
        found.announce(1)
        first = pool.submit(found.received, 1)
        source.push(manifest, TENSORS)
        assert first.result(SECONDS) == [0.0, 1.0, 2.0, 3.0] and not gates, "the first is not known yet"
    yield found
    reader.close()
    source.close()


def test_what_is_announced_comes_before_it_is_asked_for(channel: Channel) -> None:
    channel.announce(2)
    channel.source.push(channel.manifest, {name: tensor + 10 for name, tensor in TENSORS.items()})  # returns once all of it was taken
    assert channel.closed_gates == [True]
    assert channel.received(2) == [10.0, 11.0, 12.0, 13.0]
    channel.announce(3)
    channel.source.push(channel.manifest, TENSORS)
    assert channel.received(3) == [0.0, 1.0, 2.0, 3.0]


async def test_what_is_asked_for_before_it_is_announced_does_not_begin_twice(channel: Channel) -> None:
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(channel.received, 2)
        await until(lambda: 1 in channel.reader._works, "the reader has begun by itself")
        channel.announce(2)
        channel.source.push(channel.manifest, TENSORS)
        assert receiving.result(SECONDS) == [0.0, 1.0, 2.0, 3.0] and not channel.closed_gates


@pytest.mark.parametrize("asked_for", [False, True])
def test_a_push_does_not_begin_over_one_that_is_not_over(channel: Channel, asked_for: bool) -> None:
    deadline, later = TransferDeadline(SECONDS), {name: tensor + 10 for name, tensor in TENSORS.items()}
    with ThreadPoolExecutor(1) as pool:
        channel.announce(2)
        channel.source.push(channel.manifest, TENSORS)  # it has begun by itself
        if asked_for:
            channel.reader.manifest(2, deadline, channel.manifest.id)
        channel.announce(3)
        sending = pool.submit(channel.source.push, channel.manifest, later)
        time.sleep(0.2)  # for the follower to hear of it
        if not asked_for:
            channel.reader.manifest(2, deadline, channel.manifest.id)
        for index, bucket in enumerate(channel.manifest.buckets):
            assert float(channel.reader.take(index, bucket.nbytes, deadline).view(torch.float32)[0]) == float(index)
            channel.reader.release(index)
        channel.reader.finish(deadline)
        assert channel.received(3) == [10.0, 11.0, 12.0, 13.0]
        sending.result(SECONDS)


def test_another_manifest_is_waited_for(channel: Channel) -> None:
    other = lay_out([("head", "float32", (8,))], 256)
    channel.source.announce(2, other, SECONDS)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(channel.reader.manifest, 2, TransferDeadline(SECONDS))
        channel.source.push(other, {"head": torch.ones(8)})
        assert receiving.result(SECONDS).id == other.id and not channel.closed_gates


async def test_a_push_that_nobody_asks_for_ends_the_channel(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_channel, "CLAIM_SECONDS", 0.2)
    channel.announce(2)
    await until(lambda: channel.reader.broken, "the reader gives up")
    with pytest.raises(ChannelBroken, match="push 2 has begun over channel followed, and this engine was not asked to receive it"):
        channel.reader.manifest(2, TransferDeadline(SECONDS), channel.manifest.id)


async def test_a_push_that_its_source_gives_up_ends_the_channel_at_once(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_channel, "CLAIM_SECONDS", 3600.0)
    channel.announce(2)
    await until(lambda: channel.closed_gates, "the reader has begun")
    channel.source.abort("a replica has refused")
    await until(lambda: channel.reader.broken, "the reader gives up")


def test_a_quiet_channel_is_kept(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_channel, "CLAIM_SECONDS", 0.1)
    channel.announce(2)
    channel.source.push(channel.manifest, TENSORS)
    assert channel.received(2) == [0.0, 1.0, 2.0, 3.0]
    time.sleep(0.3)  # longer than a push may wait to be asked for
    assert channel.reader.broken is None
