"""The payload plane over a real Valkey server."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import AsyncMock

import nats.errors
import pytest
import redis
from nats.js.api import StreamConfig

from shared.bus.command_log import CommandLog
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.process.embedded_servers import EmbeddedValkey
from shared.runtime.errors import BadMessage, DeadlineExceeded, PayloadChanged, PayloadMissing
from shared.schema.digests import reference
from shared.schema.messages import Command, CommandOutcome
from shared.store.payload_store import BlockingStore, Store, StoreRefused, StoreUnreachable


async def test_blobs_come_back_in_the_order_asked_for(store: Store, run_name: str) -> None:
    blobs = {f"{run_name}:{number}": os.urandom(size) for number, size in enumerate((1, 7, 300_000, 3 << 20))}
    await store.write(blobs)
    for keys in (list(blobs), [*reversed(blobs)]):
        wanted = {key: blobs[key] for key in keys}
        assert await store.read(reference(run_name, wanted)) == list(wanted.values())


async def test_a_missing_blob_is_named(store: Store, run_name: str) -> None:
    await store.write({f"{run_name}:a": b"1"})
    with pytest.raises(PayloadMissing, match=f"no blob {run_name}:b"):
        await store.read(reference(run_name, {f"{run_name}:{name}": b"1" for name in "abc"}))
    assert await store.missing([f"{run_name}:b", f"{run_name}:a", f"{run_name}:c"]) == [f"{run_name}:b", f"{run_name}:c"]
    assert await store.missing([]) == []


async def test_a_result_that_came_out_otherwise_after_a_death_can_be_read(bus: Bus, store: Store, run_name: str) -> None:
    outcome = CommandOutcome(client="a-0123456789abcdef:sample:0", number=1, at=0.0)
    for blob in (b"before the death", b"once more", b"once more"):
        written = await CommandLog(bus, run_name).with_payload(outcome, blob, store)
        assert written.payload is not None and await store.read(written.payload) == [blob]


async def test_a_command_that_was_accepted_is_found_over_a_hiccup_of_the_bus(
    bus: Bus, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, entry = Subjects(run_name), Command(client="a-0123456789abcdef:train:0", number=0, at=0.0, verb="forward_backward")
    await bus.js.add_stream(StreamConfig(name=names.commands_stream, subjects=[names.command(">")]))
    await CommandLog(bus, run_name).append(entry)
    answers = [AsyncMock(side_effect=nats.errors.TimeoutError), bus.js.get_last_msg]
    monkeypatch.setattr(bus.js, "get_last_msg", lambda *asked: answers.pop(0)(*asked))
    assert await CommandLog(bus, run_name).append(entry) == entry and not answers


async def test_freed_blobs_are_gone_and_freeing_again_is_fine(store: Store, run_name: str) -> None:
    await store.write({f"{run_name}:a": b"1", f"{run_name}:b": b"2"})
    for _ in range(2):
        await store.free([f"{run_name}:a", f"{run_name}:never"])
    await store.free([])
    assert await store.missing([f"{run_name}:a", f"{run_name}:b"]) == [f"{run_name}:a"]


async def test_a_retried_write_is_the_same_blob(store: Store, run_name: str) -> None:
    for _ in range(2):
        await store.write({f"{run_name}:a": b"same"})
    assert await store.read(reference(run_name, {f"{run_name}:a": b"same"})) == [b"same"]


async def test_a_blob_is_not_written_over_another(store: Store, run_name: str) -> None:
    await store.write({f"{run_name}:a": b"the first"})
    await store.write({f"{run_name}:a": b"another", f"{run_name}:b": b"new"})
    assert await store.read(reference(run_name, {f"{run_name}:a": b"the first", f"{run_name}:b": b"new"})) == [b"the first", b"new"]


def forgeries(key: str) -> dict[str, tuple[bytes, bytes]]:
    """What stands at a key when somebody reads it, and what its reference announced."""
    return {
        "other bytes": (b"tampered", b"original"),
        "one bit": (b"\x00" * 100_000 + b"\x01", b"\x00" * 100_001),
        "fewer": (b"origina", b"original"),
        "more": (b"original and more", b"original"),
    }


@pytest.mark.parametrize("how", forgeries(""))
async def test_a_payload_that_was_changed_is_read_by_nobody(
    store: Store, valkey: EmbeddedValkey, client: redis.Redis, run_name: str, how: str
) -> None:
    key, reader = f"{run_name}:a", BlockingStore(valkey.url, run_name)
    found, announced = forgeries(key)[how]
    client.set(key, found)
    payload = reference(run_name, {key: announced})
    with pytest.raises(PayloadChanged, match=f"payload at {key} has the digest [0-9a-f]{{32}}; {payload.digest} was announced"):
        await store.read(payload)
    with pytest.raises(PayloadChanged, match=f"payload at {key} has the digest"):
        reader.read(payload)
    client.set(key, announced)
    assert reader.read(payload) == await store.read(payload) == [announced]
    reader.close()


async def test_only_what_was_announced_by_this_run_and_in_this_order_fits(store: Store, run_name: str) -> None:
    blobs = {f"{run_name}:{name}": name.encode() * 1000 for name in "ab"}
    await store.write(blobs)
    mine = reference(run_name, blobs)
    swapped = mine.model_copy(update={"keys": mine.keys[::-1]})
    for other in (reference("another", blobs), mine.model_copy(update={"digest": ""}), swapped):
        with pytest.raises(PayloadChanged):
            await store.read(other)
    assert await store.read(mine) == list(blobs.values())


@pytest.mark.parametrize(
    "changes",
    [{"sizes": (2, 1)}, {"sizes": ()}, {"sizes": (1, 2, 3)}, {"bytes": 10}, {"bytes": 300 << 20, "sizes": (150 << 20, 150 << 20)}],
)
async def test_a_reference_that_contradicts_itself_or_is_too_large_is_not_followed(
    store: Store, valkey: EmbeddedValkey, run_name: str, changes: dict[str, object]
) -> None:
    blobs = {f"{run_name}:{name}": name.encode() for name in "ab"}
    await store.write(blobs)
    payload, reader = reference(run_name, blobs).model_copy(update=changes), BlockingStore(valkey.url, run_name)
    with pytest.raises(BadMessage, match=f"a payload of {payload.bytes} bytes at {run_name}:a"):
        await store.read(payload)
    with pytest.raises(BadMessage, match=f"a payload of {payload.bytes} bytes at {run_name}:a"):
        reader.read(payload)


async def test_no_more_is_read_than_was_announced(store: Store, valkey: EmbeddedValkey, client: redis.Redis, run_name: str) -> None:
    """Whatever stands there: the server sends a byte more than announced, and no other."""
    small = reference(run_name, {f"{run_name}:a": b"x" * 1000})
    client.set(f"{run_name}:a", b"x" * (64 << 20))
    reader, before = BlockingStore(valkey.url, run_name), client.info("stats")["total_net_output_bytes"]
    with pytest.raises(PayloadChanged):
        await store.read(small)
    with pytest.raises(PayloadChanged):
        reader.read(small)
    assert client.info("stats")["total_net_output_bytes"] - before < 1 << 20
    client.unlink(f"{run_name}:a")


@pytest.fixture
def client(valkey: EmbeddedValkey) -> Iterator[redis.Redis]:
    """The client library by itself."""
    with redis.Redis.from_url(valkey.url) as client:
        yield client


def test_the_blocking_reader_reads_what_was_written(valkey: EmbeddedValkey, client: redis.Redis, run_name: str) -> None:
    reader = BlockingStore(valkey.url, run_name)
    blobs = {f"{run_name}:{number}": os.urandom(size) for number, size in enumerate((1, 300_000, 3 << 20, 7, *range(1000, 1100)))}
    client.mset(blobs)
    whole, each = reference(run_name, blobs), [reference(run_name, {key: blob}) for key, blob in blobs.items()]
    assert list(reader.stream(each)) == [[blob] for blob in blobs.values()]
    assert list(reader.stream([])) == []
    assert list(reader.stream([each[0], whole, each[0]])) == [[blobs[f"{run_name}:0"]], list(blobs.values()), [blobs[f"{run_name}:0"]]]
    with pytest.raises(PayloadMissing, match=f"no blob {run_name}:none"):
        list(reader.stream([whole, reference(run_name, {f"{run_name}:none": b"1"}), whole]))
    assert reader.read(whole) == list(blobs.values())
    reader.close()


def test_a_stream_that_was_left_half_way_does_not_spoil_the_next(valkey: EmbeddedValkey, client: redis.Redis, run_name: str) -> None:
    reader, blobs = BlockingStore(valkey.url, run_name), {f"{run_name}:{name}": name.encode() * 100_000 for name in "abc"}
    client.mset(blobs)
    each = [reference(run_name, {key: blob}) for key, blob in blobs.items()]
    half = reader.stream(each)
    assert next(half) == [b"a" * 100_000]
    half.close()
    assert list(reader.stream([each[2], each[1]])) == [[b"c" * 100_000], [b"b" * 100_000]]
    reader.close()


def test_two_streams_at_a_time_do_not_mix(valkey: EmbeddedValkey, client: redis.Redis, run_name: str) -> None:
    reader = BlockingStore(valkey.url, run_name)
    blobs = {f"{run_name}:{number}": bytes([number + 1]) * 50_000 for number in range(20)}
    client.mset(blobs)
    each, values = [reference(run_name, {key: blob}) for key, blob in blobs.items()], list(blobs.values())
    both = zip(reader.stream(each), reader.stream(each[::-1]), strict=True)
    assert list(both) == [([left], [right]) for left, right in zip(values, values[::-1], strict=True)]
    reader.close()


@pytest.mark.extra
async def test_blobs_written_and_read_at_once_do_not_mix(store: Store, client: redis.Redis, run_name: str) -> None:
    groups = [{f"{run_name}:{group}:{part}": os.urandom(group * 40_000 + part + 1) for part in range(3)} for group in range(12)]
    await asyncio.gather(*map(store.write, groups))
    for group in groups:
        assert [client.get(key) for key in group] == list(group.values())
    assert await asyncio.gather(*(store.read(reference(run_name, group)) for group in groups)) == [list(group.values()) for group in groups]


async def test_a_lost_connection_is_made_again(store: Store, valkey: EmbeddedValkey, client: redis.Redis, run_name: str) -> None:
    reader = BlockingStore(valkey.url, run_name)
    for round in range(3):
        blobs = {f"{run_name}:{round}:{part}": os.urandom(100_000) for part in range(3)}
        await store.write(blobs)
        payload = reference(run_name, blobs)
        assert await store.read(payload) == reader.read(payload) == list(blobs.values())
        assert client.client_kill_filter(_type="normal", skipme=True) > 0
    reader.close()


async def test_what_an_account_may_not_do_is_said(valkey: EmbeddedValkey, client: redis.Redis, run_name: str) -> None:
    client.acl_setuser(run_name, enabled=True, passwords=["+secret"], keys=["allowed:*"], commands=["+getrange", "+setnx", "+ping"])
    try:
        url = f"{valkey.url}?username={run_name}&password=secret"
        store, reader = Store(url), BlockingStore(url)
        await store.write({"allowed:a": b"1"})
        allowed, other = reference("", {"allowed:a": b"1"}), reference("", {f"{run_name}:a": b"1"})
        assert await store.read(allowed) == reader.read(allowed) == [b"1"]
        with pytest.raises(StoreRefused, match="write of 1 blobs"):
            await store.write({f"{run_name}:a": b"1"})
        with pytest.raises(StoreRefused, match=f"blob {run_name}:a"):
            reader.read(other)
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
        BlockingStore(f"unix://{tmp_path}/none.sock").read(reference("", {"a": b"1"}), deadline=0.5)
    assert time.monotonic() - start < 30
    await away.close()


@pytest.mark.extra
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


@pytest.mark.extra
async def test_another_primary_at_the_same_address_takes_over(tmp_path: Path) -> None:
    """As where a managed store fails over: the server that was the primary refuses writes, and reads until it has the new one's blobs."""
    blobs, link = {"a": b"1", "b": b"2"}, tmp_path / "store.sock"
    servers = [EmbeddedValkey(tmp_path / name) for name in ("first", "second")]
    try:
        for server in servers:
            server.start()
        link.symlink_to(servers[0].address)
        store, reader, payload = Store(f"unix://{link}"), BlockingStore(f"unix://{link}"), reference("", blobs)
        for server in servers:
            with redis.Redis.from_url(server.url) as direct:
                direct.mset(blobs)
        assert await store.read(payload) == await asyncio.to_thread(reader.read, payload) == [b"1", b"2"]
        with redis.Redis.from_url(servers[0].url) as direct:
            direct.config_set("replica-serve-stale-data", "no")
            direct.replicaof("127.0.0.1", 1)
        late = [
            asyncio.create_task(store.write({"c": b"3"})),
            asyncio.create_task(store.commands("a write", [("SETNX", "d", "4")])),
            asyncio.create_task(store.read(payload)),
            asyncio.create_task(asyncio.to_thread(reader.read, payload)),
        ]
        assert not (await asyncio.wait(late, timeout=1))[0], "what is refused waits for the other primary"
        link.unlink()
        link.symlink_to(servers[1].address)
        assert await asyncio.wait_for(asyncio.gather(*late), 60) == [None, [1], [b"1", b"2"], [b"1", b"2"]]
        assert await store.missing(["c", "d"]) == []
        await store.close()
        reader.close()
    finally:
        for server in servers:
            server.stop()
