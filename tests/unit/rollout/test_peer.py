"""Weights from receiver to receiver: the very bytes, or an error that says what came between."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from services.rollout.engine.receiver import load_plan, peer_transfer
from services.rollout.engine.receiver.receiver import ReceiveError, Receiver
from shared.runtime.errors import BadMessage
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer.digest import TensorDigest
from shared.transfer.group_channel import GroupSender
from shared.transfer.weight_channel import TransferDeadline
from tests.support.waiting import until

KNOWN = {"model.weight": TensorDigest("float32", (2, 3), 0xFFFF_0000_1234_5678), "head": TensorDigest("bfloat16", (), 7)}
SECONDS = 60.0


class Model(nn.Module):
    """Parameters of two dtypes, one of them strided and one tied, a buffer of either kind, and something computed from them."""

    def __init__(self, seed: int, width: int = 5) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.embed = nn.Linear(width, 7, bias=False)
        self.head = nn.Linear(width, 7, bias=False)
        self.strided = nn.Parameter(torch.empty(4, 6).t(), requires_grad=False)
        self.narrow = nn.Parameter(torch.empty(3, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("kept", torch.empty(2, dtype=torch.int64))
        self.register_buffer("cache", torch.full((2,), float(seed)), persistent=False)
        self.computed = torch.empty(4)
        with torch.no_grad():
            for tensor in (*self.parameters(), self.kept, self.computed):
                tensor.copy_(torch.randint(-9, 9, tensor.shape, generator=random))
        self.head.weight = self.embed.weight


def receiver(seed: int, version: int = -1, width: int = 5) -> Receiver:
    made = Receiver(Model(seed, width), 0, "cpu")
    made.adopt(version, KNOWN if version >= 0 else {})
    return made


def offered(source: Receiver, version: int = 3, seconds: float = SECONDS) -> dict[str, Any]:
    order = {"version": version, "name": f"transfer-{id(source)}", "address": "127.0.0.1", "seconds": seconds}
    return peer_transfer.send_to_peer(source, order, TransferDeadline(SECONDS))


def receive(destination: Receiver, channel: dict[str, Any], version: int = 3, seconds: float = SECONDS) -> dict[str, Any]:
    destination.join([WeightChannelAddress.model_validate(channel)], 0, seconds)
    return destination.receive(version, version, [channel["name"]], TransferDeadline(seconds))


@pytest.fixture
def source() -> Iterator[Receiver]:
    made = receiver(1, version=3)
    yield made
    made.disturb("the test is over")


def test_the_destination_holds_what_the_source_holds(source: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_transfer, "BUCKET_BYTES", 300)  # several buckets, more than there are buffers
    destination = receiver(2)
    offer = offered(source)
    answer = receive(destination, offer["channel"])
    assert answer["digest"] == offer["digest"] == source.digest == destination.digest
    assert (destination.version, destination.known) == (3, KNOWN)
    got, had = load_plan.tensors_of(destination.model), load_plan.tensors_of(source.model)
    assert got.keys() == had.keys() == {"embed.weight", "strided", "narrow", "kept", "computed"}
    assert all(torch.equal(got[name], tensor) for name, tensor in had.items())
    assert destination.model.head.weight is destination.model.embed.weight and destination.model.cache.tolist() == [2.0, 2.0]


def test_two_destinations_at_once(source: Receiver) -> None:
    destinations = [receiver(2), receiver(4)]
    offers = [
        peer_transfer.send_to_peer(source, {"version": 3, "name": f"l{n}", "address": "127.0.0.1", "seconds": SECONDS}, TransferDeadline(9))
        for n in range(2)
    ]
    with pytest.raises(BadMessage, match="sends to 2 others already"):
        offered(source)
    with ThreadPoolExecutor(2) as pool:
        for answer in pool.map(lambda pair: receive(pair[0], pair[1]["channel"]), zip(destinations, offers, strict=True)):
            assert answer["digest"] == source.digest


def test_what_is_not_held_is_not_sent(source: Receiver) -> None:
    with pytest.raises(BadMessage, match="version 4 is not to be had here: this engine holds version 3"):
        offered(source, version=4)
    with pytest.raises(BadMessage, match="version 3"):
        offered(receiver(2))


async def test_a_push_breaks_a_transfer_off(source: Receiver) -> None:
    """Before the destination has come: nothing of it is touched. And nothing is ever taken for version 3 that is not."""
    offer, destination = offered(source), receiver(2, version=1)
    source.disturb("a push of version 4 begins")
    with pytest.raises(ReceiveError, match="a push of version 4 begins") as raised:
        receive(destination, offer["channel"])
    assert not raised.value.touched and destination.version == 1
    await until(lambda: not source.before_change, "the transfer's end at its source")


def test_a_push_in_the_middle_of_a_transfer(source: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_transfer, "BUCKET_BYTES", 300)
    give, given = GroupSender.send, threading.Event()

    def disturbed(channel: GroupSender, index: int, flat: torch.Tensor) -> None:
        if given.is_set():
            source.disturb("a push of version 4 begins")
        given.set()
        give(channel, index, flat)

    monkeypatch.setattr(GroupSender, "send", disturbed)
    destination = receiver(2, version=1)
    with pytest.raises(ReceiveError, match=r"a push of version 4 begins") as raised:
        receive(destination, offered(source)["channel"])
    assert destination.version == (-1 if raised.value.touched else 1)
    assert bool(destination.digest) != raised.value.touched  # of neither version


def test_engines_that_are_not_alike(source: Receiver) -> None:
    destination = receiver(2, version=1, width=6)
    with pytest.raises(ReceiveError, match=r"embed.weight is .*\(7, 6\).* in this engine, .*\(7, 5\)") as raised:
        receive(destination, offered(source)["channel"])
    assert not raised.value.touched and destination.version == 1


def test_a_source_that_never_was() -> None:
    channel = {"kind": "group", "name": "x", "address": "127.0.0.1", "port": 9, "secret": "00" * 32, "backend": "gloo", "world_size": 2}
    with pytest.raises(ReceiveError, match="channel x"):
        receive(receiver(2), channel, seconds=1.0)


def test_bytes_that_changed_on_their_way(source: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    give = GroupSender.send

    def altered(channel: GroupSender, index: int, flat: torch.Tensor) -> None:
        flat[3] ^= 1
        give(channel, index, flat)

    monkeypatch.setattr(GroupSender, "send", altered)
    destination = receiver(2)
    with pytest.raises(ReceiveError, match="1 tensors did not arrive as they were sent, strided among them"):
        receive(destination, offered(source)["channel"])
    assert destination.digest == ""


DYING = """
import json, os, signal, sys, time
from services.rollout.engine.receiver import load_plan, peer_transfer
from shared.transfer.group_channel import GroupSender
from tests.unit.rollout import test_peer as t
peer_transfer.BUCKET_BYTES, give, given = 300, GroupSender.send, []
def last_words(channel, index, flat):
    if given:
        os.kill(os.getpid(), signal.SIGKILL)
    given.append(flat)
    give(channel, index, flat)
GroupSender.send = last_words
print(json.dumps(t.offered(t.receiver(1, version=3))["channel"]), flush=True)
time.sleep(t.SECONDS)
"""


def test_a_source_that_dies_in_the_middle() -> None:
    """kill -9: the destination says whom it waited for, long before the deadline, and holds nothing that it would take for a version."""
    root = Path(__file__).parents[3]
    destination = receiver(2, version=1)
    with subprocess.Popen([sys.executable, "-c", DYING], cwd=root, stdout=subprocess.PIPE, text=True) as source:
        try:
            assert source.stdout is not None
            channel = json.loads(source.stdout.readline())
            with pytest.raises(ReceiveError, match=channel["name"]) as raised:
                receive(destination, channel, seconds=600)
        finally:
            source.kill()
    assert destination.version == (-1 if raised.value.touched else 1)
    assert bool(destination.digest) != raised.value.touched
