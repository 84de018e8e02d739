"""Stores beside a weight channel."""

import contextlib
import datetime
import importlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore

from shared.runtime.errors import ConfigError
from shared.transfer import channel_store
from shared.transfer.channel_store import BoundStore, RemoteStore, StoreFollower, StoreServer, bind_stores
from tests.support.listening_sockets import ListeningSocket, listening_sockets

HOST = "127.0.0.3"
SECRET, ANOTHER = "5a" * 32, "5b" * 32
SECONDS = 30.0


@pytest.fixture
def values() -> HashStore:
    return HashStore()


@pytest.fixture
def server(values: HashStore) -> Iterator[StoreServer]:
    server = StoreServer(values, HOST, SECRET)
    yield server
    server.close()


def reader(server: StoreServer, secret: str = SECRET, seconds: float = SECONDS) -> contextlib.closing[RemoteStore]:
    return contextlib.closing(RemoteStore(HOST, server.port, secret, seconds))


def test_readers_share_the_sources_values(server: StoreServer, values: HashStore) -> None:
    values.set("manifest", b"\x00\xff")
    with reader(server) as one, reader(server) as other:
        assert one.get("manifest") == b"\x00\xff"
        one.set("here", "1")
        assert values.get("here") == other.get("here") == b"1"
        assert [one.add("taken", 1), other.add("taken", 1), values.add("taken", 0)] == [1, 2, 2]
        assert one.check(["here", "taken"]) and not one.check(["here", "absent"])


def test_a_value_is_waited_for(server: StoreServer, values: HashStore) -> None:
    with ThreadPoolExecutor(1) as pool, reader(server) as store:
        asked = pool.submit(store.get, "late")
        assert not store.check(["late"])  # another request is answered meanwhile
        values.set("late", "now")
        assert asked.result(SECONDS) == b"now"
        with pytest.raises(RuntimeError, match=r"had no never within 0\.1 s"):
            store.wait(["never"], datetime.timedelta(seconds=0.1))


def test_it_listens_at_its_own_address_alone(values: HashStore) -> None:
    before = listening_sockets(os.getpid())
    with contextlib.closing(StoreServer(values, HOST, SECRET)) as server:
        assert {(found.address, found.port) for found in listening_sockets(os.getpid()) - before} == {(HOST, server.port)}
    with pytest.raises(ConfigError, match=r"MYXO_HOST = '192\.0\.2\.250': weights cannot be sent from there: Cannot assign"):
        StoreServer(values, "192.0.2.250", SECRET)


def test_whoever_does_not_know_the_secret_reads_and_changes_nothing(server: StoreServer, values: HashStore) -> None:
    values.set("manifest", b"weights")
    with pytest.raises(RuntimeError, match="cannot be used"):
        RemoteStore(HOST, server.port, ANOTHER, 0.5)
    with pytest.raises(RuntimeError):  # torch's own client, which listed all keys of torch's own store
        TCPStore(HOST, server.port, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=3)).list_keys()
    with socket.create_connection((HOST, server.port), SECONDS) as stranger:
        stranger.sendall(bytes(channel_store.NONCE_BYTES + channel_store.PROOF_BYTES) + channel_store._LENGTH.pack(2**31))
        assert len(stranger.recv(1000)) == channel_store.NONCE_BYTES  # the source's nonce, and no proof of its own
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1000) == b""
    assert values.num_keys() == 1 and values.get("manifest") == b"weights"


def test_a_recorded_proof_is_worth_nothing(server: StoreServer, values: HashStore) -> None:
    """A proof answers the nonce of one connection."""
    with socket.create_connection((HOST, server.port), SECONDS) as first:
        nonce, own = first.recv(channel_store.NONCE_BYTES), bytes(channel_store.NONCE_BYTES)
        recorded = own + channel_store._proof(bytes.fromhex(SECRET), b"reader", nonce + own)
        first.sendall(recorded)
        assert len(first.recv(1000)) == channel_store.PROOF_BYTES
    with socket.create_connection((HOST, server.port), SECONDS) as second:
        assert second.recv(channel_store.NONCE_BYTES) != nonce
        second.sendall(recorded)
        with contextlib.suppress(ConnectionResetError):
            assert second.recv(1000) == b""


def test_a_source_that_does_not_know_the_secret_is_no_source() -> None:
    """A process that has taken the port of a dead source echoes what it is sent."""
    with socket.create_server((HOST, 0)) as listener:

        def echo() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.sendall(bytes(channel_store.NONCE_BYTES))
                    connection.sendall(connection.recv(1000)[-channel_store.PROOF_BYTES :])

        threading.Thread(target=echo, daemon=True).start()
        with pytest.raises(RuntimeError, match="it does not know the channel's secret"):
            RemoteStore(HOST, listener.getsockname()[1], SECRET, 0.5)
        listener.shutdown(socket.SHUT_RDWR)


def test_silent_strangers_keep_nobody_out_for_longer_than_their_proof_may_take(
    server: StoreServer, values: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_store, "PROOF_SECONDS", 1.0)
    values.set("key", "value")
    with contextlib.ExitStack() as stack:
        for _ in range(2 * channel_store.STRANGERS):
            stack.enter_context(socket.create_connection((HOST, server.port), SECONDS))
        with reader(server) as store:
            assert store.get("key") == b"value"


@pytest.mark.parametrize("words", [b"\xc1", b"\x93\xa3del\xa3key\xc0", b"\x01", b"\x93\xa3get\x01\xc0", b"\x93\xa4wait\x01\xa1x"])
def test_a_malformed_request_ends_its_own_connection_alone(server: StoreServer, values: HashStore, words: bytes) -> None:
    values.set("key", "value")
    with reader(server) as good, reader(server) as bad:
        channel_store._send(bad._connection, words)
        with pytest.raises(RuntimeError, match="does not answer"):
            bad.get("key")
        assert good.get("key") == b"value"


def test_a_store_that_is_closed_fails_its_readers_at_once(server: StoreServer) -> None:
    with ThreadPoolExecutor(1) as pool, reader(server) as store:
        asked = pool.submit(store.get, "never")
        begin = time.monotonic()
        server.close()
        with pytest.raises(RuntimeError, match="does not answer"):
            asked.result(SECONDS)
        assert time.monotonic() - begin < SECONDS / 2


def test_a_process_group_is_formed_over_it(server: StoreServer, values: HashStore) -> None:
    limit = datetime.timedelta(seconds=SECONDS)

    def form(rank: int, store: dist.Store) -> dist.ProcessGroup:
        return dist.ProcessGroupGloo(PrefixStore("group/", store), rank, 3, limit)

    with ThreadPoolExecutor(3) as pool, reader(server) as one, reader(server) as other:
        PrefixStore("unique", one).clone().set("id", b"\x00\xff")  # as NCCL's monitor does, which has a store of its own
        assert PrefixStore("unique", other).get("id") == values.get("unique/id") == b"\x00\xff"
        groups = [pool.submit(form, rank, store) for rank, store in enumerate([values, one, other])]
        assert [group.result(SECONDS).size() for group in groups] == [3, 3, 3]


def test_followers_hear_what_the_source_says(server: StoreServer, values: HashStore) -> None:
    with contextlib.closing(StoreFollower(HOST, server.port, SECRET, SECONDS)) as one, reader(server) as another:
        with pytest.raises(TimeoutError):
            one.heard(0.05)
        said: list[object] = [7, "manifest", 2.5]
        while not server._followers:
            another.check(["absent"], 0.01)
        server.broadcast(said)
        server.broadcast(None)
        assert one.heard(SECONDS) == said and another.add("taken", 1) == 1, "the others have their answers"
        assert one.heard(SECONDS) is None
        server.close()
        assert one.heard(SECONDS) is None


def test_a_follower_that_does_not_listen_is_cut_off(server: StoreServer) -> None:
    with contextlib.closing(StoreFollower(HOST, server.port, SECRET, SECONDS)), reader(server) as another:
        while not server._followers:
            another.check(["absent"], 0.01)
        begun = time.monotonic()
        while server._followers and time.monotonic() < begun + SECONDS:
            server.broadcast("x" * 60_000)
        assert not server._followers


def test_a_stranger_follows_nothing(server: StoreServer) -> None:
    with pytest.raises(RuntimeError, match="cannot be followed"):
        StoreFollower(HOST, server.port, ANOTHER, SECONDS)


# --- a store that listens at its own address alone

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
