"""Weights from receiver to receiver: the very bytes, or an error that says what came between."""

from __future__ import annotations

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

from services.rollout.engine.receiver import peer_transfer
from services.rollout.engine.receiver.channel_receiver import ReceiveDeadline
from services.rollout.engine.receiver.receiver import ReceiveError, Receiver
from shared.runtime.errors import BadMessage
from shared.transfer.digest import TensorDigest

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


def lent(lender: Receiver, version: int = 3, seconds: float = SECONDS) -> dict[str, Any]:
    order = {"version": version, "name": f"lend-{id(lender)}", "address": "127.0.0.1", "seconds": seconds}
    return peer_transfer.lend(lender, order, ReceiveDeadline(SECONDS))


def borrow(borrower: Receiver, lane: dict[str, Any], version: int = 3, seconds: float = SECONDS) -> dict[str, Any]:
    return peer_transfer.borrow(borrower, {"channels": [lane], "version": version}, ReceiveDeadline(seconds))


@pytest.fixture
def lender() -> Iterator[Receiver]:
    made = receiver(1, version=3)
    yield made
    made.disturb("the test is over")


def test_a_borrower_holds_what_the_lender_holds(lender: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_transfer, "BUCKET_BYTES", 300)  # several buckets, more than there are buffers
    borrower = receiver(2)
    offer = lent(lender)
    answer = borrow(borrower, offer["channel"])
    assert answer["digest"] == offer["digest"] == lender.digest == borrower.digest
    assert (borrower.version, borrower.known) == (3, KNOWN)
    got, had = peer_transfer.held(borrower.model), peer_transfer.held(lender.model)
    assert got.keys() == had.keys() == {"embed.weight", "strided", "narrow", "kept", "computed"}
    assert all(torch.equal(got[name], tensor) for name, tensor in had.items())
    assert borrower.model.head.weight is borrower.model.embed.weight and borrower.model.cache.tolist() == [2.0, 2.0]


def test_two_borrowers_at_once(lender: Receiver) -> None:
    borrowers = [receiver(2), receiver(4)]
    offers = [
        peer_transfer.lend(lender, {"version": 3, "name": f"l{n}", "address": "127.0.0.1", "seconds": SECONDS}, ReceiveDeadline(9))
        for n in range(2)
    ]
    with pytest.raises(BadMessage, match="lends to 2 others already"):
        lent(lender)
    with ThreadPoolExecutor(2) as pool:
        for answer in pool.map(lambda pair: borrow(pair[0], pair[1]["channel"]), zip(borrowers, offers, strict=True)):
            assert answer["digest"] == lender.digest


def test_what_is_not_held_is_not_lent(lender: Receiver) -> None:
    with pytest.raises(BadMessage, match="version 4 is not to be had here: this engine holds version 3"):
        lent(lender, version=4)
    with pytest.raises(BadMessage, match="version 3"):
        lent(receiver(2))


def test_a_push_breaks_a_loan_off(lender: Receiver) -> None:
    """Before the borrower has come: nothing of it is touched. And nothing is ever taken for version 3 that is not."""
    offer, borrower = lent(lender), receiver(2, version=1)
    lender.disturb("a push of version 4 begins")
    with pytest.raises(ReceiveError, match="a push of version 4 begins") as raised:
        borrow(borrower, offer["channel"])
    assert not raised.value.touched and borrower.version == 1
    assert not lender.before_change  # the loan has let go of it


def test_a_push_in_the_middle_of_a_loan(lender: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_transfer, "BUCKET_BYTES", 300)
    give, given = peer_transfer._LendersEnd.give, threading.Event()

    def disturbed(wire: Any, flat: Any, watch: ReceiveDeadline) -> Any:
        if given.is_set():
            lender.disturb("a push of version 4 begins")
        given.set()
        return give(wire, flat, watch)

    monkeypatch.setattr(peer_transfer._LendersEnd, "give", disturbed)
    borrower = receiver(2, version=1)
    with pytest.raises(ReceiveError, match=r"a push of version 4 begins") as raised:
        borrow(borrower, lent(lender)["channel"])
    assert borrower.version == (-1 if raised.value.touched else 1)
    assert bool(borrower.digest) != raised.value.touched  # of neither version


def test_engines_that_are_not_alike(lender: Receiver) -> None:
    borrower = receiver(2, version=1, width=6)
    with pytest.raises(ReceiveError, match=r"embed.weight is .*\(7, 6\).* in this engine, .*\(7, 5\)") as raised:
        borrow(borrower, lent(lender)["channel"])
    assert not raised.value.touched and borrower.version == 1


def test_a_lender_that_never_was() -> None:
    lane = {"kind": "group", "name": "x", "address": "127.0.0.1", "port": 9, "backend": "gloo", "world_size": 2}
    with pytest.raises(ReceiveError, match="channel x"):
        borrow(receiver(2), lane, seconds=1.0)


def test_bytes_that_changed_on_their_way(lender: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    give = peer_transfer._LendersEnd.give

    def altered(wire: Any, flat: torch.Tensor, watch: ReceiveDeadline) -> Any:
        flat[3] ^= 1
        return give(wire, flat, watch)

    monkeypatch.setattr(peer_transfer._LendersEnd, "give", altered)
    borrower = receiver(2)
    with pytest.raises(ReceiveError, match="1 tensors did not arrive as they were sent, strided among them"):
        borrow(borrower, lent(lender)["channel"])
    assert borrower.digest == ""


DYING = """
import json, os, signal, sys, time
from services.rollout.engine.receiver import peer_transfer as peer
from tests.unit.rollout import test_peer as t
peer.BUCKET_BYTES, give, given = 300, peer._LendersEnd.give, []
def last_words(wire, flat, watch):
    if given:
        os.kill(os.getpid(), signal.SIGKILL)
    given.append(flat)
    return give(wire, flat, watch)
peer._LendersEnd.give = last_words
print(json.dumps(t.lent(t.receiver(1, version=3))["channel"]), flush=True)
time.sleep(t.SECONDS)
"""


def test_a_lender_that_dies_in_the_middle() -> None:
    """kill -9: the borrower says whom it waited for, long before the deadline, and holds nothing that it would take for a version."""
    source = Path(__file__).parents[3]
    borrower = receiver(2, version=1)
    with subprocess.Popen([sys.executable, "-c", DYING], cwd=source, stdout=subprocess.PIPE, text=True) as lender:
        try:
            assert lender.stdout is not None
            lane = json.loads(lender.stdout.readline())
            with pytest.raises(ReceiveError, match=lane["name"]) as raised:
                borrow(borrower, lane, seconds=600)
        finally:
            lender.kill()
    assert borrower.version == (-1 if raised.value.touched else 1)
    assert bool(borrower.digest) != raised.value.touched
