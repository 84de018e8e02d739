"""kill -9 of a server and its return: what was stored is there, and connected clients continue by themselves."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.streams import scored_consumer
from shared.bus.subjects import Subjects
from shared.bus.work_queue import WorkQueue
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import EmbeddedNats, EmbeddedServer, EmbeddedValkey
from shared.schema.digests import reference
from shared.schema.messages import BatchRequest, Durable, Failed, Message, Outcome
from shared.store.payload_store import BlockingStore, Store
from tests.support.run_config import run_config
from tests.support.waiting import until

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
