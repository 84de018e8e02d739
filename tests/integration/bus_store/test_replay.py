"""Reading a stream from its beginning to its present end, by direct gets, and over a server's death."""

import asyncio
from collections.abc import AsyncIterator, Callable
from unittest.mock import AsyncMock

import nats.errors
import nats.js.errors
import pytest
from nats.js.api import StreamConfig

from shared.bus import streams
from shared.bus.connection import Bus
from shared.runtime.errors import BadMessage, DeadlineExceeded
from shared.schema.ledger import BatchTrained, CheckpointDurable, LedgerRecord
from shared.schema.messages import Durable

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
