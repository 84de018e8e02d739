"""The payload plane over a real Valkey server."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from shared.runtime.embedded_servers import EmbeddedValkey
from shared.runtime.errors import DeadlineExceeded, PayloadMissing
from shared.store.payload_store import BlockingStore, Store, StoreRefused, StoreUnreachable


async def test_blobs_come_back_in_the_order_asked_for(store: Store, run_name: str) -> None:
    blobs = {f"{run_name}:{number}": os.urandom(size) for number, size in enumerate((0, 1, 300_000, 3 << 20))}
    await store.write(blobs)
    keys = [*reversed(blobs), *blobs]
    assert await store.read(keys) == [blobs[key] for key in keys]
    assert await store.read([]) == []


async def test_a_missing_blob_is_named(store: Store, run_name: str) -> None:
    await store.write({f"{run_name}:a": b"1"})
    with pytest.raises(PayloadMissing, match=f"no blob {run_name}:b"):
        await store.read([f"{run_name}:a", f"{run_name}:b", f"{run_name}:c"])
    assert await store.missing([f"{run_name}:b", f"{run_name}:a", f"{run_name}:c"]) == [f"{run_name}:b", f"{run_name}:c"]
    assert await store.missing([]) == []


async def test_freed_blobs_are_gone_and_freeing_again_is_fine(store: Store, run_name: str) -> None:
    await store.write({f"{run_name}:a": b"1", f"{run_name}:b": b"2"})
    for _ in range(2):
        await store.free([f"{run_name}:a", f"{run_name}:never"])
    await store.free([])
    assert await store.missing([f"{run_name}:a", f"{run_name}:b"]) == [f"{run_name}:a"]


async def test_a_retried_write_is_the_same_blob(store: Store, run_name: str) -> None:
    for _ in range(2):
        await store.write({f"{run_name}:a": b"same"})
    assert await store.read([f"{run_name}:a"]) == [b"same"]


@pytest.fixture
def client(valkey: EmbeddedValkey) -> Iterator[redis.Redis]:
    """The client library by itself."""
    with redis.Redis.from_url(valkey.url) as client:
        yield client


def test_the_blocking_reader_reads_what_was_written(valkey: EmbeddedValkey, client: redis.Redis, run_name: str) -> None:
    reader = BlockingStore(valkey.url)
    blobs = {f"{run_name}:{number}": os.urandom(size) for number, size in enumerate((0, 1, 300_000, 3 << 20, 7, *range(1000, 1100)))}
    for key, blob in blobs.items():
        client.set(key, blob)
    for keys in ([*reversed(blobs), *blobs], [], [next(iter(blobs))] * 2):
        assert reader.read(keys) == [blobs[key] for key in keys]
    with pytest.raises(PayloadMissing, match=f"no blob {run_name}:none"):
        reader.read([*blobs, f"{run_name}:none", *blobs])
    assert reader.read(list(blobs)) == list(blobs.values())
    reader.close()


def test_a_stream_that_was_left_half_way_does_not_spoil_the_next(valkey: EmbeddedValkey, client: redis.Redis, run_name: str) -> None:
    reader = BlockingStore(valkey.url)
    for name in "abc":
        client.set(f"{run_name}:{name}", name * 100_000)
    half = reader.stream([f"{run_name}:a", f"{run_name}:b", f"{run_name}:c"])
    assert next(half) == b"a" * 100_000
    half.close()
    assert list(reader.stream([f"{run_name}:c", f"{run_name}:b"])) == [b"c" * 100_000, b"b" * 100_000]
    reader.close()


def test_two_streams_at_a_time_do_not_mix(valkey: EmbeddedValkey, client: redis.Redis, run_name: str) -> None:
    reader = BlockingStore(valkey.url)
    blobs = {f"{run_name}:{number}": bytes([number]) * 50_000 for number in range(20)}
    client.mset(blobs)
    keys = list(blobs)
    both = zip(reader.stream(keys), reader.stream(keys[::-1]), strict=True)
    assert list(both) == [(blobs[left], blobs[right]) for left, right in zip(keys, keys[::-1], strict=True)]
    reader.close()


async def test_blobs_written_and_read_at_once_do_not_mix(store: Store, client: redis.Redis, run_name: str) -> None:
    groups = [{f"{run_name}:{group}:{part}": os.urandom(group * 40_000 + part) for part in range(3)} for group in range(12)]
    await asyncio.gather(*map(store.write, groups))
    for group in groups:
        assert [client.get(key) for key in group] == list(group.values())
    assert await asyncio.gather(*(store.read(list(group)) for group in groups)) == [list(group.values()) for group in groups]


async def test_a_lost_connection_is_made_again(store: Store, valkey: EmbeddedValkey, client: redis.Redis, run_name: str) -> None:
    reader = BlockingStore(valkey.url)
    for round in range(3):
        blobs = {f"{run_name}:{round}:{part}": os.urandom(100_000) for part in range(3)}
        await store.write(blobs)
        assert await store.read(list(blobs)) == reader.read(list(blobs)) == list(blobs.values())
        assert client.client_kill_filter(_type="normal", skipme=True) > 0
    reader.close()


async def test_what_an_account_may_not_do_is_said(valkey: EmbeddedValkey, client: redis.Redis, run_name: str) -> None:
    client.acl_setuser(run_name, enabled=True, passwords=["+secret"], keys=["allowed:*"], commands=["+get", "+set", "+ping"])
    try:
        url = f"{valkey.url}?username={run_name}&password=secret"
        store, reader = Store(url), BlockingStore(url)
        await store.write({"allowed:a": b"1"})
        assert await store.read(["allowed:a"]) == reader.read(["allowed:a"]) == [b"1"]
        with pytest.raises(StoreRefused, match="write of 1 blobs"):
            await store.write({f"{run_name}:a": b"1"})
        with pytest.raises(StoreRefused, match=f"blob {run_name}:a"):
            reader.read([f"{run_name}:a"])
        with pytest.raises(StoreRefused):
            await Store(url.replace("secret", "wrong")).write({"allowed:a": b"1"})
        await store.close()
    finally:
        client.acl_deluser(run_name)
        client.unlink("allowed:a")


async def test_no_server_is_told_within_the_deadline(tmp_path: Path) -> None:
    away = Store(f"unix://{tmp_path}/none.sock")
    start = time.monotonic()
    with pytest.raises(StoreUnreachable, match="the store does not answer"):
        await away.ping(deadline=0.5)
    with pytest.raises(DeadlineExceeded, match="write of 1 blobs did not come from the store within 0.5 s"):
        await away.write({"a": b""}, deadline=0.5)
    with pytest.raises(DeadlineExceeded, match="blob a did not come from the store"):
        BlockingStore(f"unix://{tmp_path}/none.sock").read(["a"], deadline=0.5)
    assert time.monotonic() - start < 30
    await away.close()


async def test_a_server_that_wants_a_password_is_told(tmp_path: Path) -> None:
    class Locked(EmbeddedValkey):
        answer = b"-NOAUTH"

        def _command(self) -> list[str]:
            return [*super()._command(), "--requirepass", "secret"]

    server = Locked(tmp_path)
    server.start()
    try:
        with pytest.raises(StoreUnreachable, match="(?i)auth"):
            await Store(server.url).ping(deadline=2.0)
    finally:
        server.stop()
