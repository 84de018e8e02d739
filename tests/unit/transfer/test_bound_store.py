"""A store that listens at its own address alone."""

import datetime
import importlib
import os

import pytest
from torch.distributed import TCPStore

from shared.transfer.channel_store import BoundStore, bind_stores
from tests.support.listening_sockets import ListeningSocket, listening_sockets

LIMIT = datetime.timedelta(seconds=30)


def opened(before: set[ListeningSocket]) -> set[str]:
    """The addresses at which this process listens and did not ``before``."""
    return {found.address for found in listening_sockets(os.getpid()) - before}


def test_it_listens_at_its_host_and_no_other() -> None:
    before = listening_sockets(os.getpid())
    store = BoundStore("127.0.0.3", 0, is_master=True, timeout=LIMIT, wait_for_workers=False)
    assert opened(before) == {"127.0.0.3"}
    other = BoundStore("127.0.0.3", store.port, timeout=LIMIT, wait_for_workers=False)
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        BoundStore("192.0.2.250", 0, is_master=True, timeout=LIMIT)


def test_stores_that_torch_opens_by_itself_are_bound_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch.distributed", "torch.distributed.rendezvous"):
        monkeypatch.setattr(importlib.import_module(name), "TCPStore", TCPStore)  # to be put back
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    before = listening_sockets(os.getpid())
    theirs, *_ = next(rendezvous.rendezvous("tcp://127.0.0.1:0", 0, 1))
    assert opened(before) == {"::"}, "torch binds its stores by itself: BoundStore is not needed any more"
    before = listening_sockets(os.getpid())
    bind_stores()
    ours, *_ = next(rendezvous.rendezvous("tcp://127.0.0.1:0", 0, 1))
    assert opened(before) == {"127.0.0.1"}
    del theirs, ours
