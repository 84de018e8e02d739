"""Reading a stream by direct gets: what `stream_replay` reads, without a consumer, and over a server's death."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from nats.js.api import StreamConfig

from shared.bus import direct_read, stream_replay
from shared.bus.connection import Bus
from shared.runtime.errors import BadMessage, DeadlineExceeded, MyxoError
from shared.schema.ledger import BatchTrained, CheckpointDurable, LedgerRecord
from shared.schema.messages import Durable

MANY = stream_replay.FETCH * 2 + 7


@pytest.fixture
async def stream(bus: Bus, run_name: str) -> str:
    await bus.js.add_stream(StreamConfig(name=run_name, subjects=[f"{run_name}.>"], allow_direct=True))
    return run_name


async def steps(messages: AsyncIterator[tuple[int, LedgerRecord]]) -> list[tuple[int, int]]:
    return [(sequence, getattr(message, "steps", -1)) async for sequence, message in messages]


async def test_an_empty_stream_has_nothing(bus: Bus, stream: str) -> None:
    assert await steps(direct_read.read(bus, stream, LedgerRecord)) == []


async def test_it_reads_what_a_consumer_reads_whatever_was_removed(bus: Bus, stream: str) -> None:
    for number in range(MANY):
        await bus.js.publish(f"{stream}.durable", CheckpointDurable(steps=number, at=0.0).encode())
    for sequence in (1, 2, 300, MANY):
        await bus.js.delete_msg(stream, sequence)
    expected = await steps(stream_replay.read(bus, stream, LedgerRecord))
    assert len(expected) == MANY - 4
    assert await steps(direct_read.read(bus, stream, LedgerRecord)) == expected
    assert await steps(direct_read.read(bus, stream, LedgerRecord, after=299)) == expected[297:]
    assert await steps(direct_read.read(bus, stream, LedgerRecord, after=MANY)) == []
    assert (await bus.js.stream_info(stream)).state.consumer_count == 1, "the one of stream_replay"


async def test_one_subject_of_many(bus: Bus, stream: str) -> None:
    await bus.publish(f"{stream}.durable", CheckpointDurable(steps=1, at=0.0))
    await bus.publish(f"{stream}.trained", BatchTrained(step=0, version=1, started=0, ended=1, at=0.0))
    await bus.publish(f"{stream}.durable", CheckpointDurable(steps=2, at=0.0))
    assert await steps(direct_read.read(bus, stream, LedgerRecord, subject=f"{stream}.durable")) == [(1, 1), (3, 2)]
    assert await steps(direct_read.read(bus, stream, LedgerRecord, subject=f"{stream}.nothing")) == []


async def test_what_does_not_belong_into_the_stream_is_refused_or_left_out(bus: Bus, stream: str) -> None:
    await bus.publish(f"{stream}.x", Durable(steps=1))
    await bus.publish(f"{stream}.durable", CheckpointDurable(steps=2, at=0.0))
    with pytest.raises(BadMessage):
        await steps(direct_read.read(bus, stream, LedgerRecord))
    assert await steps(direct_read.read(bus, stream, LedgerRecord, strict=False)) == [(2, 2)]


async def test_a_stream_that_is_not_there_has_its_deadline(bus: Bus, run_name: str) -> None:
    with pytest.raises(MyxoError, match=f"{run_name}-none"):
        await steps(direct_read.read(bus, f"{run_name}-none", LedgerRecord, deadline=0.5))


async def test_reading_goes_on_after_the_server_was_killed(mortal_nats, crash: Callable[[object], None]) -> None:
    bus = await Bus.connect(mortal_nats.url, "test")
    try:
        await bus.js.add_stream(StreamConfig(name="s", subjects=["s.>"], allow_direct=True))
        for number in range(MANY):
            await bus.js.publish("s.durable", CheckpointDurable(steps=number, at=0.0).encode())
        found = []
        async for sequence, _ in direct_read.read(bus, "s", LedgerRecord, deadline=120):
            found.append(sequence)
            if sequence == stream_replay.FETCH // 2:
                crash(mortal_nats)
                await asyncio.to_thread(mortal_nats.start)
        assert found == list(range(1, MANY + 1))
        crash(mortal_nats)
        with pytest.raises(DeadlineExceeded, match="messages of s after 0"):
            await steps(direct_read.read(bus, "s", LedgerRecord, deadline=1))
    finally:
        await bus.close()
