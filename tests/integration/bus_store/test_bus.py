"""The control plane over a real NATS server: confirmed publishing, size checks, requests, keys."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import nats.errors
import pytest
from nats.js.api import DiscardPolicy, RetentionPolicy, StreamConfig

from services.rollout.weight_receiver import answered_once
from shared.bus.bus_errors import StreamFull
from shared.bus.connection import SIZE_MARGIN, Bus, BusUnreachable, RequestRefused, WrongSequence
from shared.process.embedded_servers import EmbeddedNats, free_port
from shared.runtime.errors import BadMessage, DeadlineExceeded, MessageTooLarge, MyxoError
from shared.schema.messages import Accepted, BatchPending, BatchRequest, Durable, Message, RunDone
from tests.support.waiting import until


@pytest.fixture
async def stream(bus: Bus, run_name: str) -> str:
    """A stream with subject ``<its name>.events``."""
    await bus.js.add_stream(StreamConfig(name=run_name, subjects=[f"{run_name}.>"], duplicate_window=60))
    return run_name


async def count(bus: Bus, stream: str) -> int:
    return int((await bus.js.stream_info(stream)).state.messages)


async def test_the_servers_time_is_known_after_a_step_of_this_machines_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    bus, real = Bus("nats://nowhere", "_INBOX"), time.time
    assert abs(bus.now() - real()) < 60
    bus.note_server_time(1000.0)
    monkeypatch.setattr(time, "time", lambda: real() + 86400)
    bus.note_server_time(1000.1)
    assert 1000 <= bus.now() < 1060


# --- connecting


async def test_no_server_is_told_with_the_address_but_not_the_password() -> None:
    url = f"nats://myxo:secret@127.0.0.1:{free_port()}"
    with pytest.raises(BusUnreachable) as caught:
        await Bus.connect(url, "test", deadline=1.0)
    assert "127.0.0.1" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "Connect call failed" in str(caught.value)


async def test_a_wrong_password_is_told(tmp_path: Path) -> None:
    server = EmbeddedNats(tmp_path)
    server.start()
    try:
        with pytest.raises(BusUnreachable, match="(?i)authorization"):
            await Bus.connect(f"nats://myxo:wrong@127.0.0.1:{server.port}", "test", deadline=3.0)
    finally:
        server.stop()


async def test_a_closed_connection_is_not_restored(nats: EmbeddedNats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's ``wait_for`` before 3.12 drops a cancellation that comes as its own wait ends; the library's loop then tries again."""
    bus, dropped = await Bus.connect(nats.url, "test"), list[bool]()

    async def connects(_: object) -> None:
        dropped.append(bool(dropped))
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            if dropped[-1]:
                raise
        raise ConnectionRefusedError

    monkeypatch.setattr(bus.connection, "_connect_to_server", connects)
    await bus.connection._process_op_err(ConnectionResetError())
    await until(lambda: dropped, "an attempt")
    await bus.close()
    assert bus.connection._reconnection_task is not None and bus.connection._reconnection_task.done() and bus.connection.is_closed


class NatsWithoutJetStream(EmbeddedNats):
    def _command(self) -> list[str]:
        command = super()._command()
        config = self.directory / "nats.conf"
        config.write_text("\n".join(line for line in config.read_text().splitlines() if "jetstream" not in line))
        return command


async def test_a_refusal_that_passes_ends_nobody(bus: Bus) -> None:
    """One of several servers may be behind with its accounts."""
    refused = asyncio.ensure_future(bus.until_refused(0.2))
    await bus._on_error(nats.errors.AuthorizationError())
    await bus._on_reconnected()
    assert not (await asyncio.wait([refused], timeout=1))[0]
    await bus._on_error(nats.errors.AuthorizationError())
    with pytest.raises(BusUnreachable, match="(?i)authorization"):
        await asyncio.wait_for(refused, 30)


@pytest.mark.extra
async def test_a_server_without_jetstream_is_told(tmp_path: Path) -> None:
    server = NatsWithoutJetStream(tmp_path)
    server.start()
    try:
        with pytest.raises(BusUnreachable, match="no JetStream"):
            await Bus.connect(server.url, "test", deadline=2.0)
    finally:
        server.stop()


# --- publishing


async def test_publishing_returns_the_sequence_once_the_message_is_stored(bus: Bus, stream: str) -> None:
    assert await bus.publish(f"{stream}.a", Durable(steps=1)) == 1
    assert await bus.publish(f"{stream}.a", Durable(steps=2)) == 2
    assert Durable.decode((await bus.js.get_msg(stream, 2)).data or b"").steps == 2


async def test_a_repeated_id_counts_once(bus: Bus, stream: str) -> None:
    assert [await bus.publish(f"{stream}.a", Durable(steps=1), msg_id="one") for _ in range(3)] == [1, 1, 1]
    assert await count(bus, stream) == 1


async def test_nobody_stores_the_subject(bus: Bus) -> None:
    with pytest.raises(DeadlineExceeded, match=r"confirmation of nowhere\.at\.all did not come from nats://127"):
        await bus.publish("nowhere.at.all", Durable(steps=1), deadline=0.5)


async def test_a_writer_that_is_behind_is_refused(bus: Bus, stream: str) -> None:
    assert await bus.publish(f"{stream}.a", Durable(steps=1), msg_id="a.1", after=(stream, 0)) == 1
    with pytest.raises(WrongSequence, match="another writer is active"):
        await bus.publish(f"{stream}.a", Durable(steps=2), msg_id="b.1", after=(stream, 0))
    with pytest.raises(WrongSequence):
        await bus.publish(f"{stream}.a", Durable(steps=2), after=(stream, 5))
    assert await count(bus, stream) == 1
    assert await bus.publish(f"{stream}.a", Durable(steps=2), msg_id="a.2", after=(stream, 1)) == 2


@pytest.mark.parametrize("window", [60.0, 0.1], ids=["within the duplicate window", "long after it"])
async def test_a_retry_after_a_lost_confirmation_is_recognised(bus: Bus, run_name: str, window: float) -> None:
    await bus.js.add_stream(StreamConfig(name=run_name, subjects=[f"{run_name}.>"], duplicate_window=window))
    for _ in range(2):
        assert await bus.publish(f"{run_name}.a", Durable(steps=1), msg_id="a.1", after=(run_name, 0)) == 1
        await asyncio.sleep(0.5)  # the outcome is the same however long this takes
    assert await count(bus, run_name) == 1


async def test_a_full_stream_makes_the_publisher_wait_and_loses_nothing(bus: Bus, run_name: str) -> None:
    await bus.js.add_stream(
        StreamConfig(name=run_name, subjects=[f"{run_name}.>"], max_msgs=2, discard=DiscardPolicy.NEW, retention=RetentionPolicy.LIMITS)
    )
    for steps in range(2):
        await bus.publish(f"{run_name}.a", Durable(steps=steps))
    with pytest.raises(StreamFull, match="maximum messages exceeded"):
        await bus.publish(f"{run_name}.a", Durable(steps=2), deadline=0.5)
    waiting = asyncio.create_task(bus.publish(f"{run_name}.a", Durable(steps=3), deadline=60))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await bus.js.delete_msg(run_name, 1)
    assert await waiting == 3
    assert Durable.decode((await bus.js.get_msg(run_name, 2)).data or b"").steps == 1


def wide(characters: int) -> Message:
    return BatchPending(step=0, have=0, need=0, waiting_for="x" * characters)


async def test_what_the_server_would_refuse_is_never_sent(bus: Bus, stream: str) -> None:
    limit = bus.connection.max_payload - SIZE_MARGIN
    empty, header = len(wide(70_000).encode()) - 70_000, len("Nats-Msg-Id") + len("id") + 4
    fits = wide(limit - empty - header)
    assert await bus.publish(f"{stream}.a", fits, msg_id="id") == 1
    over = wide(limit - empty - header + 1)
    with pytest.raises(MessageTooLarge, match=f"{limit + 1} bytes for {stream}.a are over the bus's limit of {limit}"):
        await bus.publish(f"{stream}.a", over, msg_id="no")
    with pytest.raises(MessageTooLarge):
        await bus.request(f"{stream}.b", wide(limit), Accepted, deadline=1, awaited_from="nobody")
    assert await bus.publish(f"{stream}.a", Durable(steps=1)) == 2


async def test_many_are_confirmed_at_once_and_a_repeat_counts_once(bus: Bus, stream: str) -> None:
    lot = {f"id.{steps}": Durable(steps=steps) for steps in range(300)}
    for _ in range(2):
        await bus.publish_all(f"{stream}.a", lot)
        assert await count(bus, stream) == 300
    assert [Durable.decode((await bus.js.get_msg(stream, number)).data or b"").steps for number in (1, 150, 300)] == [0, 149, 299]
    await bus.publish_all(f"{stream}.a", {})
    assert await count(bus, stream) == 300


@pytest.mark.extra
async def test_of_many_those_that_find_no_room_wait_for_it(bus: Bus, run_name: str) -> None:
    await bus.js.add_stream(StreamConfig(name=run_name, subjects=[f"{run_name}.>"], max_msgs=3, discard=DiscardPolicy.NEW))
    lot = {f"id.{steps}": Durable(steps=steps) for steps in range(5)}
    with pytest.raises(StreamFull, match=f"confirmation of {run_name}.a"):
        await bus.publish_all(f"{run_name}.a", lot, deadline=0.5)
    waiting = asyncio.create_task(bus.publish_all(f"{run_name}.a", lot))
    for number in (1, 2):
        await bus.js.delete_msg(run_name, number)
    await waiting
    stored = [Durable.decode((await bus.js.get_msg(run_name, number)).data or b"").steps for number in (3, 4, 5)]
    assert stored[0] == 2
    assert sorted(stored) == [2, 3, 4]


async def test_one_of_many_too_large_and_none_is_sent(bus: Bus, stream: str) -> None:
    lot = {"small": Durable(steps=1), "large": wide(bus.connection.max_payload)}
    with pytest.raises(MessageTooLarge):
        await bus.publish_all(f"{stream}.a", lot)
    assert await count(bus, stream) == 0


async def test_nobody_stores_the_subject_of_many(bus: Bus) -> None:
    with pytest.raises(DeadlineExceeded, match=r"confirmation of nowhere\.at\.all"):
        await bus.publish_all("nowhere.at.all", {"a": Durable(steps=1), "b": Durable(steps=2)}, deadline=0.5)


# --- request and reply


async def echo(request: BatchRequest) -> Message:
    if request.step == 1:
        raise WrongStepForTest("step 1 was asked for; the next batch is of step 7")
    if request.step == 2:
        raise ValueError("a bug")
    if request.step == 3:
        await asyncio.sleep(30)
    if request.step == 4:
        return wide(9 << 20)
    return Durable(steps=request.step)


class WrongStepForTest(MyxoError):
    """What a handler may raise on purpose."""


@pytest.fixture
async def asked(bus: Bus, run_name: str) -> str:
    subject = f"{run_name}.ask"
    await bus.serve(subject, BatchRequest, echo)
    return subject


async def test_a_request_is_answered(bus: Bus, asked: str) -> None:
    assert (await bus.request(asked, BatchRequest(step=5, version=0), Durable, deadline=30, awaited_from="the echo")).steps == 5


async def test_a_refusal_carries_who_and_why(bus: Bus, asked: str) -> None:
    with pytest.raises(RequestRefused, match=r"the echo: step 1 was asked for; the next batch is of step 7"):
        await bus.request(asked, BatchRequest(step=1, version=0), Durable, deadline=30, awaited_from="the echo")


async def test_a_bug_in_a_handler_is_answered_and_the_next_request_served(bus: Bus, asked: str) -> None:
    with pytest.raises(RequestRefused, match="internal error: ValueError: a bug"):
        await bus.request(asked, BatchRequest(step=2, version=0), Durable, deadline=30, awaited_from="the echo")
    assert (await bus.request(asked, BatchRequest(step=5, version=0), Durable, deadline=30, awaited_from="the echo")).steps == 5


async def test_an_answer_too_large_for_the_bus_is_told(bus: Bus, asked: str) -> None:
    with pytest.raises(RequestRefused, match=r"94\d+ bytes for an answer on .* are over the bus's limit"):
        await bus.request(asked, BatchRequest(step=4, version=0), Durable, deadline=30, awaited_from="the echo")


async def test_a_request_that_cannot_be_read_is_refused_by_field(bus: Bus, asked: str) -> None:
    with pytest.raises(RequestRefused, match="message kind 'RunDone' where BatchRequest was expected"):
        await bus.request(asked, RunDone(), Durable, deadline=30, awaited_from="the echo")


async def test_an_answer_of_another_kind_is_refused(bus: Bus, asked: str) -> None:
    with pytest.raises(BadMessage, match="the echo answered .* with a Durable where Accepted was expected"):
        await bus.request(asked, BatchRequest(step=5, version=0), Accepted, deadline=30, awaited_from="the echo")


async def test_a_slow_handler_holds_up_nobody(bus: Bus, asked: str) -> None:
    slow = asyncio.create_task(bus.request(asked, BatchRequest(step=3, version=0), Durable, deadline=60, awaited_from="the echo"))
    assert (await bus.request(asked, BatchRequest(step=5, version=0), Durable, deadline=25, awaited_from="the echo")).steps == 5
    assert not slow.done()
    slow.cancel()


async def test_nobody_listens_and_the_asker_says_whom_it_waited_for(bus: Bus, run_name: str) -> None:
    for patient, end in ((False, r".* s; there is no listener"), (True, r"0\.6 s")):
        with pytest.raises(DeadlineExceeded, match=rf"an answer on {run_name}\.ask did not come from the buffer within {end}"):
            await bus.request(
                f"{run_name}.ask", BatchRequest(step=0, version=0), Durable, deadline=0.6, awaited_from="the buffer", patient=patient
            )


async def test_a_patient_asker_waits_for_the_service_to_come(bus: Bus, run_name: str) -> None:
    asking = asyncio.create_task(
        bus.request(f"{run_name}.ask", BatchRequest(step=5, version=0), Durable, deadline=60, awaited_from="the echo")
    )
    await asyncio.sleep(0.5)
    assert not asking.done()
    await bus.serve(f"{run_name}.ask", BatchRequest, echo)
    assert (await asking).steps == 5


async def test_what_a_dying_server_takes_with_it_is_asked_again(mortal_nats: EmbeddedNats, crash: Callable[[EmbeddedNats], None]) -> None:
    """The request has come, and its answer is lost with the server: the next attempt gets the answer to the first."""
    asker, answerer = await Bus.connect(mortal_nats.url, "asker"), await Bus.connect(mortal_nats.url, "answerer")
    handled, begun, going_on = list[int](), asyncio.Event(), asyncio.Event()

    async def handle(request: BatchRequest) -> Message:
        handled.append(request.step)
        begun.set()
        await going_on.wait()
        return Durable(steps=request.step)

    await answerer.serve("run.ask", BatchRequest, answered_once(handle))
    request = BatchRequest(step=5, version=0)
    asking = asyncio.create_task(asker.request("run.ask", request, Durable, deadline=120, awaited_from="the answerer", absence=60.0))
    await begun.wait()
    crash(mortal_nats)
    going_on.set()
    await asyncio.to_thread(mortal_nats.start)
    assert (await asking).steps == 5
    assert handled == [5] and asker.restored_s > 0
    await answerer.close()
    with pytest.raises(DeadlineExceeded, match="there is no listener"):
        await asker.request("run.ask", request, Durable, deadline=600, awaited_from="the answerer", absence=0.0)
    await asker.close()


@pytest.mark.extra
async def test_an_impatient_asker_waits_out_its_deadline_for_an_answer(bus: Bus, asked: str) -> None:
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="the echo within 1 s; given up"):
        await bus.request(asked, BatchRequest(step=3, version=0), Durable, deadline=1.0, awaited_from="the echo", patient=False)
    assert time.monotonic() - start >= 0.9


# --- keys


async def test_keys_are_put_read_listed_and_deleted(bus: Bus, run_name: str) -> None:
    await bus.js.create_key_value(bucket=run_name)
    assert await bus.get(run_name, "a") is None
    assert await bus.keys(run_name) == []
    first = await bus.put(run_name, "a", b"1")
    assert await bus.put(run_name, "a", b"2") > first
    await bus.put(run_name, "b.c", b"3")
    assert await bus.get(run_name, "a") == b"2"
    assert await bus.keys(run_name) == ["a", "b.c"]
    await bus.delete(run_name, "a")
    await bus.delete(run_name, "never.there")
    assert await bus.get(run_name, "a") is None
    assert await bus.get(run_name, "b.c") == b"3"


async def test_a_missing_bucket_is_told(bus: Bus) -> None:
    with pytest.raises(MyxoError, match="the bus has no KV bucket nowhere-config: does the run exist there"):
        await bus.get("nowhere-config", "config")


async def test_values_cross_connections(nats: EmbeddedNats, bus: Bus, run_name: str) -> None:
    await bus.js.create_key_value(bucket=run_name)
    other = await Bus.connect(nats.url, "other")
    await other.put(run_name, "a", b"1")
    assert await until(lambda: bus.get(run_name, "a"), "the other's value") == b"1"
    await other.close()
