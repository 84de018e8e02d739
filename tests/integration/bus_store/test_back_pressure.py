"""A full stream and a full store, of real servers: what is written waits, says why, is never lost, and continues once there is room."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.bus import streams
from shared.bus.bus_errors import StreamFull
from shared.bus.connection import Bus
from shared.bus.streams import task_consumer
from shared.bus.subjects import TRAIN, Subjects
from shared.bus.work_queue import WorkQueue
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.schema.digests import reference
from shared.schema.messages import Failed
from shared.schema.service_messages import ServiceEvent
from shared.store import payload_store
from shared.store.payload_store import Store, StoreFull
from tests.support.run_config import run_config
from tests.support.waiting import until

SMALL = 4 << 20
"""The bytes of a stream, the least that the config allows."""

BLOB = bytes(256 << 10)


def failed(number: int, size: int = 900) -> Failed:
    return Failed(group=f"g{number}", attempt=0, reason="x" * size, by="test")


@pytest.fixture
def small_valkey(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path / "valkey", max_bytes=8 << 20)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def small_store(small_valkey: EmbeddedValkey) -> AsyncIterator[Store]:
    store = Store(small_valkey.url)
    yield store
    await store.close()


async def fill(bus: Bus, subject: str) -> int:
    """Publishes until the stream is full; returns how many messages it took."""
    count = 0
    while True:
        messages = {f"{subject}.{count + index}": failed(count + index) for index in range(500)}
        try:
            await bus.publish_all(subject, messages, deadline=0.5)
        except StreamFull:
            return count
        count += len(messages)


async def test_every_stream_and_bucket_is_bound_and_loses_nothing_old(bus: Bus, run_name: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, run={"name": run_name}, bus={"max_queued_bytes": SMALL, "max_ledger_bytes": 2 * SMALL})
    await streams.create(bus, config)
    found = {info.config.name: info.config for info in await bus.js.streams_info() if (info.config.name or "").find(run_name) >= 0}
    assert len(found) == 10
    for name, stream in found.items():
        assert stream.max_bytes is not None and stream.max_bytes > 0, name
        assert stream.discard == ("old" if name == Subjects(run_name).events_stream else "new"), name
    assert found[Subjects(run_name).task_stream].max_bytes == SMALL
    assert found[Subjects(run_name).ledger_stream].max_bytes == 2 * SMALL
    await streams.create(bus, config.model_copy(update={"bus": config.bus.model_copy(update={"max_ledger_bytes": 3 * SMALL})}))
    assert (await bus.js.stream_info(Subjects(run_name).ledger_stream)).config.max_bytes == 3 * SMALL, "a resume may give it more room"


async def test_a_full_queue_is_a_named_error_and_work_waits_for_room(bus: Bus, run_name: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, run={"name": run_name}, bus={"max_queued_bytes": SMALL})
    await streams.create(bus, config)
    names = Subjects(run_name)
    subject = names.task(TRAIN)
    taken = await fill(bus, subject)
    with pytest.raises(StreamFull, match=rf"confirmation of {subject}: the bus is full \(maximum bytes exceeded\); no room within 0.3 s"):
        await bus.publish(subject, failed(-1), deadline=0.3)
    assert not str(bus.full)
    bus.full.patience_s = 60.0
    with pytest.raises(StreamFull):  # what is no work does not wait
        await bus.publish(subject, failed(-1), deadline=0.3, hold=False)
    waiting = asyncio.create_task(bus.publish(subject, failed(-1), msg_id="late", deadline=0.3))
    await until(lambda: str(bus.full), "the wait to be told")
    assert "maximum bytes exceeded" in str(bus.full) and "given up after 60 s" in str(bus.full)
    event = ServiceEvent(service="test", instance="test", what="joined", at=0.0)
    await bus.publish(names.event("service", "joined"), event, deadline=30.0)
    queue = WorkQueue(bus, task_consumer(run_name, config.bus, TRAIN), Failed)
    seen: list[str] = []

    async def arrived() -> bool:
        for lease in await queue.fetch(256, seconds=1.0):
            seen.append(lease.message.group)
            await lease.ack()
        return "g-1" in seen

    await until(arrived, "the message that waited")
    await asyncio.wait_for(waiting, 30)
    assert not str(bus.full)
    assert {f"g{number}" for number in range(taken)} <= set(seen), "nothing was lost"


@pytest.mark.extra
async def test_a_full_bucket_is_the_same_error(
    mortal_nats: EmbeddedNats, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "BUCKET_BYTES", 1 << 20)
    bus = await Bus.connect(mortal_nats.url, "test")
    await streams.create(bus, run_config(tmp_path, run={"name": run_name}))
    with pytest.raises(StreamFull, match="the bus is full"):
        for number in range(10):
            await bus.put(Subjects(run_name).services_bucket, f"rollout.{number}", bytes(300 << 10), deadline=0.5)
    await bus.close()


async def test_a_full_store_is_a_named_error_and_writes_wait_for_room(small_store: Store) -> None:
    written: list[str] = []
    with pytest.raises(StoreFull, match=r"write of 1 blobs: the store is full, at its maxmemory .*; no room within 0.3 s"):
        for number in range(100):
            await small_store.write({f"r:group:{number}": BLOB}, deadline=0.3)
            written.append(f"r:group:{number}")
    assert len(written) > 10
    assert await small_store.missing(written) == [], "it still answers, and nothing was evicted"
    used, bound, evicts = await small_store.memory(5.0)
    assert bound == 8 << 20 and used > bound * 0.9 and not evicts
    small_store.full.patience_s = 60.0
    waiting = asyncio.create_task(small_store.write({"r:group:late": BLOB}, deadline=0.3))
    await until(lambda: str(small_store.full), "the wait to be told")
    assert "maxmemory" in str(small_store.full)
    await small_store.free(written[:4])
    await asyncio.wait_for(waiting, 30)
    assert not str(small_store.full)
    assert await small_store.read(reference("", {"r:group:late": BLOB})) == [BLOB]


async def test_a_store_whose_replicas_are_away_is_waited_for(small_store: Store) -> None:
    await small_store.write({"r:group:0": BLOB})
    await small_store.commands("a bound", [("CONFIG", "SET", "min-replicas-to-write", 1)])
    with pytest.raises(StoreFull, match="the store takes no writes while its replicas are away"):
        await small_store.free(["r:group:0"], deadline=0.3)
    small_store.full.patience_s = 60.0
    waiting = asyncio.create_task(small_store.write({"r:group:late": BLOB}, deadline=0.3))
    await until(lambda: "NOREPLICAS" in str(small_store.full), "the wait to be told")
    await small_store.commands("no bound", [("CONFIG", "SET", "min-replicas-to-write", 0)])
    await asyncio.wait_for(waiting, 30)
    assert await small_store.missing(["r:group:late"]) == []


@pytest.mark.extra
async def test_an_outage_before_a_store_is_full_is_no_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_store, "SECONDS", 1.0)
    server = EmbeddedValkey(tmp_path / "valkey", max_bytes=1)
    server.start()
    store = Store(server.url)
    server.stop()
    store.full.patience_s = 2.0
    waiting = asyncio.create_task(store.write({"r:group:0": BLOB}, deadline=60.0))
    await asyncio.sleep(3.0)
    server.start()
    await until(lambda: str(store.full), "the wait to be told")
    await store.commands("more room", [("CONFIG", "SET", "maxmemory", 0)])
    await asyncio.wait_for(waiting, 30)
    await store.close()
    server.stop()
