"""Reading a stream from its beginning to its present end, and what is there after a server's kill -9 and return."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest.mock import AsyncMock

import nats.errors
import nats.js.errors
import pytest
import redis
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import StreamConfig

from shared.bus import runs, streams
from shared.bus.connection import Bus
from shared.bus.streams import scored_consumer
from shared.bus.subjects import Subjects
from shared.bus.work_queue import WorkQueue
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import EmbeddedNats, EmbeddedServer, EmbeddedValkey
from shared.runtime.errors import BadMessage, DeadlineExceeded
from shared.schema.digests import reference
from shared.schema.ledger import BatchTrained, CheckpointDurable, LedgerRecord
from shared.schema.messages import BatchRequest, Durable, Failed, Message, Outcome
from shared.store.payload_store import BlockingStore, Store
from tests.support.run_config import run_config
from tests.support.waiting import until

MANY = streams.FETCH * 2 + 7


@pytest.fixture
async def stream(bus: Bus, run_name: str) -> str:
    await bus.js.add_stream(StreamConfig(name=run_name, subjects=[f"{run_name}.>"], allow_direct=True))
    return run_name


async def steps(messages: AsyncIterator[tuple[int, LedgerRecord]]) -> list[tuple[int, int]]:
    return [(sequence, getattr(message, "steps", -1)) async for sequence, message in messages]


async def test_an_empty_stream_has_no_end(bus: Bus, stream: str) -> None:
    assert await streams.last_sequence(bus, stream) == 0
    assert await steps(streams.read(bus, stream, LedgerRecord)) == []


async def test_everything_is_read_in_order_and_nothing_that_comes_later(bus: Bus, stream: str) -> None:
    for number in range(MANY):
        await bus.js.publish(f"{stream}.durable", CheckpointDurable(steps=number, at=0.0).encode())
    read = []
    async for sequence, record in streams.read(bus, stream, LedgerRecord):
        if not read:
            await bus.publish(f"{stream}.durable", CheckpointDurable(steps=9999, at=0.0))
        assert isinstance(record, CheckpointDurable)
        read.append((sequence, record.steps))
    assert read == [(number + 1, number) for number in range(MANY)]
    assert await streams.last_sequence(bus, stream) == MANY + 1


async def test_reading_changes_nothing_and_can_be_repeated(bus: Bus, stream: str) -> None:
    await bus.publish(f"{stream}.durable", CheckpointDurable(steps=1, at=0.0))
    for _ in range(3):
        assert await steps(streams.read(bus, stream, LedgerRecord)) == [(1, 1)]


@pytest.mark.extra
async def test_what_the_reader_does_meanwhile_is_no_silence_of_the_bus(bus: Bus, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        await bus.publish(f"{stream}.durable", CheckpointDurable(steps=number, at=0.0))
    monkeypatch.setattr(streams, "FETCH", 2)
    batches = [streams._batch, AsyncMock(side_effect=nats.errors.TimeoutError), streams._batch]
    monkeypatch.setattr(streams, "_batch", lambda *asked: (batches.pop(0) if len(batches) > 1 else batches[0])(*asked))
    found = []
    async for _, record in streams.read(bus, stream, CheckpointDurable, deadline=0.5):
        found.append(record.steps)
        await asyncio.sleep(0.6)
    assert found == [0, 1, 2, 3]


async def test_what_a_server_that_lags_does_not_have_yet_is_read_all_the_same(
    bus: Bus, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        await bus.publish(f"{stream}.durable", CheckpointDurable(steps=number, at=0.0))
    batches = [AsyncMock(return_value=([], 0)), streams._batch]
    monkeypatch.setattr(streams, "_batch", lambda *asked: (batches.pop(0) if len(batches) > 1 else batches[0])(*asked))
    assert await steps(streams.read(bus, stream, LedgerRecord)) == [(1, 0), (2, 1), (3, 2)]


async def test_an_answer_that_is_lost_on_its_way_is_asked_for_again(bus: Bus, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        await bus.publish(f"{stream}.durable", CheckpointDurable(steps=number, at=0.0))
    took, lost = Subscription.next_msg, [2]

    async def next_msg(subscription: Subscription, timeout: float) -> Msg:
        message = await took(subscription, timeout=timeout)
        while lost and (message.headers or {}).get(streams.SEQUENCE) == str(lost[0]):
            lost.pop()
            message = await took(subscription, timeout=timeout)
        return message

    monkeypatch.setattr(Subscription, "next_msg", next_msg)
    assert await steps(streams.read(bus, stream, LedgerRecord)) == [(1, 0), (2, 1), (3, 2), (4, 3)] and not lost


async def test_one_subject_of_many(bus: Bus, stream: str) -> None:
    await bus.publish(f"{stream}.durable", CheckpointDurable(steps=1, at=0.0))
    await bus.publish(f"{stream}.trained", BatchTrained(step=0, version=1, started=0, ended=1, at=0.0))
    await bus.publish(f"{stream}.durable", CheckpointDurable(steps=2, at=0.0))
    assert await steps(streams.read(bus, stream, LedgerRecord, subject=f"{stream}.durable")) == [(1, 1), (3, 2)]
    assert await steps(streams.read(bus, stream, LedgerRecord, subject=f"{stream}.nothing")) == []


async def test_what_was_removed_is_passed_over_and_no_consumer_is_made(bus: Bus, stream: str) -> None:
    for number in range(MANY):
        await bus.js.publish(f"{stream}.durable", CheckpointDurable(steps=number, at=0.0).encode())
    removed = (1, 2, 300, MANY)
    for sequence in removed:
        await bus.js.delete_msg(stream, sequence)
    expected = [(number + 1, number) for number in range(MANY) if number + 1 not in removed]
    assert await steps(streams.read(bus, stream, LedgerRecord)) == expected
    assert await steps(streams.read(bus, stream, LedgerRecord, after=299)) == expected[297:]
    assert await steps(streams.read(bus, stream, LedgerRecord, after=MANY)) == []
    assert (await bus.js.stream_info(stream)).state.consumer_count == 0


async def test_what_does_not_belong_into_the_stream_is_refused_or_left_out(bus: Bus, stream: str) -> None:
    await bus.publish(f"{stream}.x", Durable(steps=1))
    await bus.publish(f"{stream}.durable", CheckpointDurable(steps=2, at=0.0))
    with pytest.raises(BadMessage, match="message kind 'Durable' where LedgerRecord was expected"):
        await steps(streams.read(bus, stream, LedgerRecord))
    assert await steps(streams.read(bus, stream, LedgerRecord, strict=False)) == [(2, 2)]


async def test_a_stream_that_is_not_there_is_an_error(bus: Bus, run_name: str) -> None:
    with pytest.raises(nats.js.errors.NotFoundError):
        await steps(streams.read(bus, f"{run_name}-none", LedgerRecord, deadline=0.5))


@pytest.mark.extra
async def test_reading_continues_after_the_server_was_killed(mortal_nats, crash: Callable[[object], None]) -> None:
    bus = await Bus.connect(mortal_nats.url, "test")
    try:
        await bus.js.add_stream(StreamConfig(name="s", subjects=["s.>"], allow_direct=True))
        for number in range(MANY):
            await bus.js.publish("s.durable", CheckpointDurable(steps=number, at=0.0).encode())
        found = []
        async for sequence, _ in streams.read(bus, "s", LedgerRecord, deadline=120):
            found.append(sequence)
            if sequence == streams.FETCH // 2:
                crash(mortal_nats)
                await asyncio.to_thread(mortal_nats.start)
        assert found == list(range(1, MANY + 1))
        crash(mortal_nats)
        with pytest.raises(DeadlineExceeded, match="the state of stream s"):
            await steps(streams.read(bus, "s", LedgerRecord, deadline=1))
    finally:
        await bus.close()


Crash = Callable[[EmbeddedServer], None]


async def answer(request: BatchRequest) -> Message:
    return Durable(steps=request.step)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_config(tmp_path, bus={"ack_wait": 2.0})


async def test_nats_comes_back_with_every_message_and_its_clients_go_on(mortal_nats: EmbeddedNats, config: RunConfig, crash: Crash) -> None:
    names = Subjects("test")
    bus, other = await Bus.connect(mortal_nats.url, "one"), await Bus.connect(mortal_nats.url, "other")
    await runs.create(bus, config, "unix:///somewhere")
    queue = WorkQueue(bus, scored_consumer("test", config.bus), Outcome)
    await other.serve("test.ask", BatchRequest, answer)
    for number in range(20):
        await bus.publish(names.scored("rollout"), Failed(group=f"g{number}", attempt=0, reason="x", by="r"), msg_id=f"g{number}")
    held = await until(lambda: queue.fetch(5), "leases")
    crash(mortal_nats)

    during = asyncio.create_task(bus.publish(names.scored("rollout"), Failed(group="late", attempt=0, reason="x", by="r"), msg_id="late"))
    asked = asyncio.create_task(bus.request("test.ask", BatchRequest(step=3, version=0), Durable, deadline=60, awaited_from="the other"))
    await asyncio.sleep(0.5)
    assert not during.done()
    mortal_nats.start()

    assert await during == 21
    again = Failed(group="g0", attempt=0, reason="x", by="r")
    assert await bus.publish(names.scored("rollout"), again, msg_id="g0") == 1, "a message that is repeated still counts once"
    assert (await asked).steps == 3
    assert await runs.load(other, "test") == config
    assert await runs.store_url(bus, "test") == "unix:///somewhere"
    for lease in held:
        await lease.ack()
    seen: set[str] = {lease.message.group for lease in held}
    while len(seen) < 21:  # acks that the death swallowed mean repeats, never losses
        for lease in await until(lambda: queue.fetch(8), f"the rest of {len(seen)} leases"):
            seen.add(lease.message.group)
            await lease.ack()
    assert seen == {f"g{number}" for number in range(20)} | {"late"}
    await bus.close()
    await other.close()


def in_its_log(valkey: EmbeddedValkey) -> bool:
    with redis.Redis.from_url(valkey.url) as client:
        return client.info("persistence")["aof_buffer_length"] == 0


async def test_valkey_comes_back_with_every_blob_and_its_clients_go_on(mortal_valkey: EmbeddedValkey, crash: Crash) -> None:
    store, reader = Store(mortal_valkey.url), BlockingStore(mortal_valkey.url)
    blobs = {f"key-{number}": bytes([number]) * 50_000 for number in range(100)}
    await store.write(blobs)
    await store.free(["key-99"])
    await until(lambda: in_its_log(mortal_valkey), "the blobs in the server's log")  # it writes up to 2 s late beside a slow fsync
    crash(mortal_valkey)

    reading = asyncio.create_task(asyncio.to_thread(reader.read, reference("", {"key-1": blobs["key-1"]})))
    writing = asyncio.create_task(store.write({"late": b"1"}))
    await asyncio.sleep(0.5)
    assert not reading.done() and not writing.done()
    mortal_valkey.start()

    assert await reading == [blobs["key-1"]]
    await writing
    assert await store.read(reference("", {key: blob for key, blob in blobs.items() if key != "key-99"})) == [
        blobs[f"key-{number}"] for number in range(99)
    ]
    assert await store.missing(["key-99", "late"]) == ["key-99"]
    await store.close()
    reader.close()
