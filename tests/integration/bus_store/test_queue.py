"""Work queues over a real NATS server: leases that are kept, lost, handed back, exhausted."""

import asyncio
import time
from pathlib import Path

import pytest
from nats.js.api import DiscardPolicy, RetentionPolicy

from shared.bus import runs, streams
from shared.bus.connection import Bus
from shared.bus.streams import Consumer, scored_consumer, task_consumer
from shared.bus.subjects import EVAL, TRAIN, Subjects
from shared.bus.work_queue import FETCH_BYTES, MessageLease, WorkQueue
from shared.config.run_config import RunConfig
from shared.config.service_sections import BusSection
from shared.process.embedded_servers import EmbeddedNats
from shared.runtime.errors import INFRASTRUCTURE
from shared.schema import codec
from shared.schema.messages import Failed, Outcome, Payload
from tests.support.run_config import run_config
from tests.support.waiting import until

LEASE = 2.0


@pytest.fixture
async def config(bus: Bus, run_name: str, tmp_path: Path) -> RunConfig:
    config = run_config(tmp_path, run={"name": run_name}, bus={"ack_wait": LEASE, "max_deliver": 2, "max_queued": 1000})
    await streams.create(bus, config)
    return config


@pytest.fixture
def consumer(config: RunConfig) -> Consumer:
    return scored_consumer(config.run.name, config.bus)


@pytest.fixture
def queue(bus: Bus, consumer: Consumer) -> WorkQueue[Outcome]:
    return WorkQueue(bus, consumer, Outcome)


async def put(bus: Bus, consumer: Consumer, *groups: str) -> None:
    for group in groups:
        await bus.publish(consumer.subject, Failed(group=group, attempt=0, reason="x", by="r"), msg_id=group)


async def take(queue: WorkQueue[Outcome], most: int = 1) -> list[MessageLease[Outcome]]:
    """Waits until something comes."""
    leases: list[MessageLease[Outcome]] = await until(lambda: queue.fetch(most), "a lease")
    return leases


async def test_a_pull_that_the_server_ends_at_once_is_not_asked_again_and_again(
    bus: Bus, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_WAITING", 1)  # where there is no such bound it changes nothing, and no pull is ended
    config = run_config(tmp_path, run={"name": run_name})
    await streams.create(bus, config)
    consumer, pulls = scored_consumer(run_name, config.bus), 0
    first, second = (WorkQueue(bus, consumer, Outcome) for _ in range(2))

    async def is_full() -> bool:
        return (await bus.js.consumer_info(consumer.stream, consumer.name)).num_waiting == 1

    waiting = asyncio.create_task(first.fetch(1, 3.0))
    await until(is_full, "the first one's pull")
    while not waiting.done():
        assert await second.fetch(1, 0.5) == []
        pulls += 1
    assert await waiting == [] and pulls < 20
    await put(bus, consumer, "a")
    assert [lease.message.group for lease in await take(second)] == ["a"]


async def test_a_fetch_that_is_cancelled_keeps_nothing_from_others(bus: Bus, consumer: Consumer, queue: WorkQueue[Outcome]) -> None:
    """Neither from those that fetch by the same queue, nor from other workers when it was the last."""

    async def asked() -> bool:
        return (await bus.js.consumer_info(consumer.stream, consumer.name)).num_waiting == 1

    first, second = (asyncio.create_task(queue.fetch(1, 60)) for _ in range(2))
    await until(asked, "the first one's request")
    first.cancel()
    await asyncio.wait([first])
    await put(bus, consumer, "a")
    [lease] = await second
    assert (lease.message.group, lease.deliveries) == ("a", 1)
    await lease.ack()
    last = asyncio.create_task(queue.fetch(1, 60))
    await until(asked, "the last one's request")
    last.cancel()
    await asyncio.wait([last])
    await put(bus, consumer, "b")
    [lease] = await take(WorkQueue(bus, consumer, Outcome))
    assert (lease.message.group, lease.deliveries) == ("b", 1)


async def test_work_is_leased_once_and_gone_when_done(bus: Bus, consumer: Consumer, queue: WorkQueue[Outcome]) -> None:
    await put(bus, consumer, "a", "b", "c")

    async def three_wait() -> bool:  # the server counts what it has acknowledged a little later
        return await queue.depth() == (3, 0)

    await until(three_wait, "three that wait")
    leases = await take(queue, 2)
    assert [lease.message.group for lease in leases] == ["a", "b"]
    assert [lease.deliveries for lease in leases] == [1, 1]
    assert await queue.depth() == (1, 2)
    for lease in leases:
        await lease.ack()
    [last] = await take(queue, 2)
    assert last.message.group == "c"
    await last.ack()

    async def empty() -> bool:
        return await queue.depth() == (0, 0)

    await until(empty, "an empty queue")
    assert await queue.fetch(1, seconds=0.2) == []


async def test_a_fetch_is_bound_by_bytes(bus: Bus, consumer: Consumer, queue: WorkQueue[Outcome]) -> None:
    payload, most = Payload(keys=["k" * 320] * 1000, bytes=1), (FETCH_BYTES + bus.connection.max_payload) // 320_000
    for number in range(2 * most):
        await bus.publish(consumer.subject, Failed(group=f"g{number}", attempt=0, reason="x", by="r", payload=payload))
    groups: list[str] = []
    while len(groups) < 2 * most:
        lot = await take(queue, 2 * most)
        assert len(lot) <= most
        for lease in lot:
            groups.append(lease.message.group)
            await lease.ack()
    assert groups == [f"g{number}" for number in range(2 * most)]


async def test_a_message_as_large_as_the_server_takes_is_delivered(bus: Bus, consumer: Consumer, queue: WorkQueue[Outcome]) -> None:
    await bus.publish(consumer.subject, bytes(bus.message_limit))

    async def gone() -> bool:
        return await queue.fetch(1) == [] and await queue.depth() == (0, 0)  # it is none that can be read

    await until(gone, "its delivery")


async def test_two_workers_share_the_work(bus: Bus, nats: EmbeddedNats, consumer: Consumer, queue: WorkQueue[Outcome]) -> None:
    names = [f"g{number}" for number in range(40)]
    await put(bus, consumer, *names)
    other = await Bus.connect(nats.url, "other")
    try:
        theirs = WorkQueue(other, consumer, Outcome)
        lots = await asyncio.gather(*(take(worker, 8) for worker in (queue, theirs, queue, theirs, queue)))
        assert sorted(lease.message.group for lot in lots for lease in lot) == sorted(names)
    finally:
        await other.close()


async def test_a_lease_that_is_not_extended_goes_to_somebody_else(bus: Bus, consumer: Consumer, queue: WorkQueue[Outcome]) -> None:
    await put(bus, consumer, "a")
    [lost] = await take(queue)
    start = time.monotonic()
    [again] = await take(queue)
    assert time.monotonic() - start > LEASE / 2
    assert (again.message.group, again.deliveries) == (lost.message.group, 2)


async def test_a_lease_that_is_held_stays(bus: Bus, consumer: Consumer, queue: WorkQueue[Outcome]) -> None:
    await put(bus, consumer, "a")
    [lease] = await take(queue)
    async with lease.held():
        end = time.monotonic() + 3 * LEASE
        while time.monotonic() < end:
            assert await queue.fetch(1, seconds=0.5) == []
    await lease.ack()

    async def empty() -> bool:
        return await queue.depth() == (0, 0)

    await until(empty, "an empty queue")


async def test_work_that_is_handed_back_comes_again(bus: Bus, consumer: Consumer, queue: WorkQueue[Outcome]) -> None:
    await put(bus, consumer, "a")
    [lease] = await take(queue)
    await lease.hand_back()
    [again] = await take(queue)
    assert again.deliveries == 2
    start = time.monotonic()
    await again.hand_back(delay=1.0)
    await take(queue)
    assert time.monotonic() - start >= 0.9


async def test_work_that_failed_too_often_is_marked_for_its_last_worker(bus: Bus, consumer: Consumer, queue: WorkQueue[Outcome]) -> None:
    await put(bus, consumer, "a")
    for delivery in (1, 2):
        [lease] = await take(queue)
        assert (lease.deliveries, lease.exhausted) == (delivery, False)
        await lease.hand_back()
    [last] = await take(queue)
    assert (last.deliveries, last.exhausted) == (3, True)
    await last.ack()


async def test_what_cannot_be_read_is_removed_and_blocks_nobody(bus: Bus, consumer: Consumer, queue: WorkQueue[Outcome]) -> None:
    await bus.js.publish(consumer.subject, b"garbage")
    await put(bus, consumer, "a")
    [lease] = await take(queue, 2)
    assert lease.message.group == "a"
    await lease.ack()

    async def empty() -> bool:
        return await queue.depth() == (0, 0)

    await until(empty, "an empty queue")


async def test_the_group_of_a_message_that_cannot_be_read_is_given_up(bus: Bus, consumer: Consumer) -> None:
    """As of another release, with a field that this one does not know; else the run would wait for the group for ever."""
    given_up: list[Failed] = []

    async def give_up(failed: Failed) -> None:
        given_up.append(failed)

    queue = WorkQueue(bus, consumer, Outcome, give_up, "worker-0")
    await bus.js.publish(consumer.subject, b"garbage")
    later = Failed(group="later", attempt=2, reason="x", by="r").model_dump()
    await bus.publish(consumer.subject, codec.pack({"schema": 1, "kind": "Failed", "added": 1, **later}))
    await put(bus, consumer, "a")
    [lease] = await take(queue, 3)
    assert lease.message.group == "a"
    [failed] = given_up
    assert (failed.group, failed.attempt, failed.by, failed.fault) == ("later", 2, "worker-0", INFRASTRUCTURE) and "added" in failed.reason


async def test_a_queue_that_does_not_exist_gives_nothing(bus: Bus, consumer: Consumer) -> None:
    nowhere = Consumer("nowhere", "nobody", "nowhere.x", BusSection())
    assert await WorkQueue(bus, nowhere, Outcome).fetch(1, seconds=0.2) == []


# --- what the run's streams and consumers look like


async def test_every_delivery_policy_is_the_configured_one(bus: Bus, config: RunConfig) -> None:
    names = Subjects(config.run.name)
    for name in (names.task_stream, names.generated_stream, names.scored_stream):
        stream = (await bus.js.stream_info(name)).config
        assert (stream.retention, stream.discard, stream.max_msgs) == (RetentionPolicy.WORK_QUEUE, DiscardPolicy.NEW, 1000)
    ledger = (await bus.js.stream_info(names.ledger_stream)).config
    assert (ledger.retention, ledger.discard, ledger.max_msgs, ledger.max_age) == (RetentionPolicy.LIMITS, DiscardPolicy.NEW, -1, 0)
    events = (await bus.js.stream_info(names.events_stream)).config
    assert (events.discard, events.max_msgs > 0, (events.max_bytes or 0) > 0) == (DiscardPolicy.OLD, True, True)
    for consumer in (
        task_consumer(config.run.name, config.bus, TRAIN),
        task_consumer(config.run.name, config.bus, EVAL),
        scored_consumer(config.run.name, config.bus),
    ):
        found = (await bus.js.consumer_info(consumer.stream, consumer.name)).config
        assert (found.ack_wait, found.max_deliver, found.max_ack_pending) == (LEASE, 4, config.bus.max_ack_pending)
        assert found.filter_subject == consumer.subject


@pytest.mark.extra
async def test_making_a_run_again_changes_nothing_that_is_there(bus: Bus, config: RunConfig, consumer: Consumer) -> None:
    await put(bus, consumer, "a")
    other = config.model_copy(update={"bus": config.bus.model_copy(update={"ack_wait": 77.0, "max_queued": 5})})
    await streams.create(bus, other)
    assert (await bus.js.consumer_info(consumer.stream, consumer.name)).config.ack_wait == LEASE
    info = await bus.js.stream_info(consumer.stream)
    assert (info.config.max_msgs, info.state.messages) == (1000, 1)


@pytest.mark.extra
async def test_whether_a_run_exists(bus: Bus, config: RunConfig) -> None:
    assert await streams.exists(bus, config.run.name)
    assert not await streams.exists(bus, "never-made")


async def test_a_run_that_is_being_made_is_none_yet(bus: Bus) -> None:
    """Another machine looks for it while its streams are made one after the other."""
    name = Subjects("half-made").ledger_stream
    await bus.js.add_stream(name=name, subjects=["half-made.ledger.>"])
    try:
        assert not await streams.exists(bus, "half-made")
        with pytest.raises(runs.NoSuchRun):
            await runs.load(bus, "half-made")
    finally:
        await bus.js.delete_stream(name)
