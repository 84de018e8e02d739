"""The payload plane over a real Valkey server."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from shared.embedded import EmbeddedValkey
from shared.errors import DeadlineExceeded, PayloadMissing
from shared.store import BlockingStore, Store, StoreUnreachable


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


def test_the_blocking_reader_reads_what_was_written(valkey: EmbeddedValkey, run_name: str) -> None:
    reader = BlockingStore(valkey.url)
    reader._client.set(f"{run_name}:a", b"1")
    assert reader.read([f"{run_name}:a"] * 2) == [b"1", b"1"]
    with pytest.raises(PayloadMissing, match=f"{run_name}:b"):
        reader.read([f"{run_name}:b"])
    reader.close()


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
        def _command(self) -> list[str]:
            return [*super()._command(), "--requirepass", "secret"]

        def _answers(self) -> bool:
            return self._socket.exists()

    server = Locked(tmp_path)
    server.start()
    try:
        with pytest.raises(StoreUnreachable, match="(?i)auth"):
            await Store(server.url).ping(deadline=2.0)
    finally:
        server.stop()
