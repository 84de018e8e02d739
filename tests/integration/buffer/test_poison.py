"""Outcomes that would stop a buffer or have it free what is not theirs, and values of KV that turn to garbage, over real servers."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from services.trainer.control_client import ControlClient
from shared.bus import runs
from shared.bus.bus_errors import BUS_ERRORS
from shared.bus.connection import SIZE_MARGIN, Bus
from shared.bus.registry import Registry
from shared.bus.subjects import REWARD
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.schema import codec
from shared.schema.ledger import EvalScored, GroupDead, GroupsScored
from shared.schema.message import REASON_LENGTH, SCHEMA
from shared.schema.messages import Failed, Interrupted, Message, Payload, Scored
from shared.schema.weight_messages import WeightsLive
from tests.integration.buffer.conftest import Launched, NewRun, Served
from tests.integration.buffer.player import Player
from tests.integration.buffer.test_standby import LEASE_SECONDS, play_to_the_end, two_buffers
from tests.support.garbage import GARBAGE
from tests.support.run_config import write_jsonl
from tests.support.service_process import ServiceProcess
from tests.support.tables import rare
from tests.support.waiting import until


def altered(message: Message, **fields: Any) -> bytes:
    """The bytes of a message whose fields nobody has checked."""
    return codec.pack({"schema": SCHEMA, "kind": type(message).__name__, **message.model_dump(), **fields})


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer's messages are bound as on a server with NATS's own default."""
    monkeypatch.setattr(Bus, "message_limit", (1 << 20) - 2 * SIZE_MARGIN)


async def taken(player: Player, count: int) -> list[Scored]:
    """Takes so many tasks, writes their samples, and returns what a reward service would say of them."""
    leases = await player.all_tasks(count)
    for lease in leases:
        await lease.ack()
    return [await player.generate(lease.message) for lease in leases]


async def say_raw(player: Player, data: bytes) -> None:
    await player.bus.js.publish(player.names.scored(REWARD), data)


async def reasons(player: Player, dead: int) -> dict[str, str]:
    """Waits until so many groups are dead; returns why, by group."""
    found: dict[str, str] = {}

    async def enough() -> bool:
        found.update({record.group: record.reason for record in await player.records() if isinstance(record, GroupDead)})
        return len(found) >= dead

    await until(enough, f"{dead} dead groups")
    return found


async def test_poisonous_outcomes_cost_their_group_and_the_ledger_replays(launched: Launched) -> None:
    player, first = await launched(rollout={"rollout_batch_size": 12, "max_dead_in_a_row": 0})
    await player.live(0)
    groups = await taken(player, 12)
    huge, nan = {**groups[5].payload.model_dump(), "tokens": [2**40, 1]}, float("nan")
    poison = [
        altered(groups[0], payload={**groups[0].payload.model_dump(), "tokens": [-1, 5]}),
        altered(groups[1], rewards=[1e308, 1e308]),
        altered(groups[2], rewards=[nan, 1.0]),
        altered(groups[3], samples=[{"tokens": 3, "oldest": 2**40, "newest": 2**40, "finish": "stop"}] * 2),
        altered(groups[4], parts=[{"a\x1b[2J": 1.0}] * 2),
        altered(Interrupted(group=groups[5].group, attempt=0, stale=False, replica="r"), payload=huge),
        altered(Failed(group=groups[6].group, attempt=0, reason="", by="r"), reason="é" * 300_000),
        codec.pack({"schema": SCHEMA, "kind": "Outcome", "group": groups[7].group, "attempt": 0}),
        altered(groups[8], samples=[{"tokens": 3, "oldest": 7, "newest": 9, "finish": "stop"}] * 2),
        altered(groups[9], payload={"keys": [groups[9].payload.keys[0]] * 2, "bytes": 1, "tokens": ()}),
        altered(groups[10], group="g00000000:0", attempt=0),
        altered(groups[11], group=None),
        b"\xc1",
        b"",
    ]
    for data in poison:
        await say_raw(player, data)
    why = await reasons(player, 10)
    for number, words in enumerate(
        (
            "payload.tokens.0",
            "rewards.0",
            "rewards.0",
            "samples.0.oldest",
            "parts.0",
            "payload.tokens.0",
            "é",
            "'Outcome'",
            "7 to 9",
            "twice",
        )
    ):
        assert words in why[groups[number].group], number
    assert len(why[groups[6].group]) == REASON_LENGTH
    for scored in groups[10:]:
        await player.say(scored)
    before = await player.batch(0, working=True)
    first.kill()
    with player.launch() as second:  # the ledger replays
        await player.ready(second)
        assert await player.batch(0) == before
        assert (await player.audit()).ok


async def test_only_blobs_of_its_own_attempt_are_taken_from_an_outcome(served: Served) -> None:
    player = await served(rollout={"rollout_batch_size": 5, "max_dead_in_a_row": 0})
    await player.live(0)
    victim, *groups = await taken(player, 5)
    run = player.config.run.name
    others = [f"{run}:exchange:values:0", "another:group:g00000000:0:0:0", f"{run}:group:{victim.group}:1:0:0"]
    await player.store.write(dict.fromkeys(others, b"precious"))
    foreign = Payload(keys=[*others, *victim.payload.keys], bytes=1)
    own = Payload(keys=[*groups[0].payload.keys, *others], bytes=1)
    await player.say(groups[0].model_copy(update={"payload": own}))
    await player.say(Failed(group=groups[1].group, attempt=0, reason="x", by="r", payload=foreign))
    await player.say(Interrupted(group=groups[2].group, attempt=0, stale=True, replica="r", payload=foreign))
    await player.say(Failed(group="g99999999", attempt=0, reason="x", by="r", payload=foreign))
    await player.say(Failed(group="eval.heldout.0.0", attempt=0, reason="x", by="r", payload=foreign))
    why = await reasons(player, 3)
    assert all(f"names the blob {others[0]}, which is not its own" in reason for reason in why.values())

    async def own_is_freed() -> bool:
        return not set(groups[0].payload.keys) & set(await player.blobs())

    await until(own_is_freed, "the removal of the dead group's own blobs")
    await player.say(victim)
    await player.say(groups[3])
    assert victim.group in [group.group for group in (await player.batch(0, working=True)).groups]
    assert await player.store.missing([*others, *victim.payload.keys]) == []


@pytest.mark.extra(each=True)
async def test_a_backlog_of_named_rewards_is_divided_over_records(small_messages: None, served: Served) -> None:
    count = 40
    player = await served(rollout={"rollout_batch_size": count, "n_samples_per_prompt": 8})
    await player.live(0)
    groups = await taken(player, count)
    parts = tuple({f"{'x' * 58}{part:02}": 0.5 for part in range(64)} for _ in range(8))
    said = {f"{scored.group}.0": scored.model_copy(update={"parts": parts}) for scored in groups}
    assert sum(len(message.encode()) for message in said.values()) > player.bus.message_limit
    await player.bus.publish_all(player.names.scored(REWARD), said)
    batch = await player.batch(0)
    assert len(batch.groups) == count and len(batch.parts) == 64
    assert sum(len(record.groups) for record in await player.records() if isinstance(record, GroupsScored)) == count


@pytest.mark.extra(each=True)
async def test_a_group_too_large_for_a_record_is_dead(small_messages: None, served: Served) -> None:
    """Whole numbers take a byte each on their way in, and nine as floats in the ledger."""
    player = await served(rollout={"rollout_batch_size": 1, "n_samples_per_prompt": 600})
    await player.live(0)
    [scored] = await taken(player, 1)
    parts = [{f"{'x' * 18}{part:02}": 0 for part in range(64)} for _ in range(600)]
    data = altered(scored, parts=parts)
    assert len(data) < player.bus.message_limit
    await say_raw(player, data)
    [reason] = (await reasons(player, 1)).values()
    assert f"over the bus's limit of {player.bus.message_limit}" in reason
    await player.batch(0, working=True)


@pytest.mark.extra(each=True)
async def test_groups_too_large_for_the_message_of_their_batch_are_dead(small_messages: None, served: Served) -> None:
    player = await served(rollout={"rollout_batch_size": 5})
    await player.live(0)
    for scored in await taken(player, 5):
        keys = [f"{player.names.payload_prefix(scored.group, 0)}a:{part}".ljust(300, "-") for part in range(1000)]
        await player.store.write(dict.fromkeys(keys, b"x"))
        await player.say(scored.model_copy(update={"payload": Payload(keys=keys, bytes=1000)}))
    batch = await player.batch(0, working=True)
    assert len(batch.groups) == 5
    assert all("a batch with it is over the bus's limit" in reason for reason in (await reasons(player, 1)).values())
    assert (await player.audit()).ok


async def test_news_of_weights_that_cannot_be_is_refused(served: Served) -> None:
    player = await served()
    news = WeightsLive(version=0, replicas=["r"], seconds=0.1, bytes=1, at=1.0)
    for value in (altered(news, version=2**40), altered(news, version=2**31 - 1), b"garbage", news.encode()):
        await player.bus.put(player.names.weights_bucket, "live", value)
        await player.bus.publish(player.names.event("weights", "live"), news)
    assert (await player.batch(0, working=True)).version == 0


@pytest.mark.extra(each=True)
async def test_a_prompt_that_cannot_be_sent_costs_its_group(new_run: NewRun, launched: Launched) -> None:
    player = await new_run(rollout={"rollout_batch_size": 3}, eval={"eval_prompt_data": None})
    rows = [{"prompt": "1+1=", "label": "2"}, {"prompt": "2+2=", "label": "4", "metadata": {"long": "x" * (1 << 20)}}]
    rows += [{"prompt": "3+3="}]  # without a label, which `exact` compares with
    for file in player.config.data.prompt_data or []:
        write_jsonl(file.path, rows)
    with player.launch() as buffer:
        await player.ready(buffer)
        await player.live(0)

        async def both_told() -> bool:
            why = (await reasons(player, 1)).values()
            large = any("prompts.jsonl:2" in reason and "bytes of prompt, label, metadata and token ids" in reason for reason in why)
            return large and any("prompts.jsonl:3" in reason and "the line has no key 'label'" in reason for reason in why)

        await until(both_told, "both groups' ends")
        [status] = await Registry(player.bus, player.config.run.name).alive("buffer")
        assert status.pid == buffer.process.pid
        assert not any(isinstance(record, EvalScored) for record in await player.records())


@pytest.mark.extra(each=True)
async def test_a_buffer_at_work_and_one_on_standby_outlive_garbage_under_every_key(new_run: NewRun) -> None:
    player = await new_run(bus={"ack_wait": 2.0, "lease_duration": LEASE_SECONDS})
    run, names = player.config.run.name, player.names
    async with two_buffers(player) as (first, second):
        await player.live(0)
        await player.batch(0, working=True)
        keys = ("config.config", "config.phase", "config.data", "config.store", "weights.live", "leases.buffer", "services.buffer.buffer-2")
        for kind in ("no UTF-8", "nothing", "another message", "a huge version", "deep MessagePack"):
            for key in keys:
                await player.bus.js.publish(f"$KV.{run}-{key}", GARBAGE[kind])
            await asyncio.sleep(LEASE_SECONDS / 3)
        assert [process.process.poll() for process in (first, second)] == [None, None], first.words() + second.words()

        async def mended() -> bool:
            return await player.phase() == runs.RUNNING

        await until(mended, "the phase")
        await player.live(0)
        await play_to_the_end(player, 0)
        for process in (first, second):
            assert "Traceback" not in process.words()
        assert '"event": "phase_unreadable"' in first.words() and '"event": "value_unreadable"' in second.words()
        await player.bus.put(names.config_bucket, "phase", b"running?")

        async def finished() -> bool:
            return await player.phase() == runs.FINISHED

        await until(finished, "the phase of a run that is finished")


@pytest.mark.parametrize(("key", "said"), [("config.config", "the config of run"), rare("config.store", "the store of run")])
async def test_a_service_that_finds_a_config_it_cannot_read_ends_with_code_2_and_one_line(
    new_run: NewRun, nats: EmbeddedNats, tmp_path: Path, key: str, said: str
) -> None:
    player = await new_run()
    run = player.config.run.name
    await player.bus.js.publish(f"$KV.{run}-{key}", b"\xff\xfe garbage")
    names = ("buffer", "rollout", "reward", "gateway", "trainer")
    processes = {name: ServiceProcess(name, tmp_path / f"{name}.log", {"NATS_URL": nats.url, "MYXO_RUN": run}) for name in names}
    try:
        for name, process in processes.items():
            code = await asyncio.to_thread(process.process.wait, 120)
            words = process.words()
            assert code == 2, (name, words)
            assert said in words and "Traceback" not in words, (name, words)
    finally:
        for process in processes.values():
            process.__exit__()


@pytest.mark.extra
async def test_a_trainer_writes_the_live_version_anew_and_reads_garbage_as_none(
    new_run: NewRun, nats: EmbeddedNats, valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    player = await new_run()
    run, names, bus = player.config.run.name, player.names, player.bus
    for name, value in {"NATS_URL": nats.url, "MYXO_RUN": run, "REDIS_URL": valkey.url}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # a link takes the signals of the process's main thread, which this is not
    news = WeightsLive(version=2, replicas=["r"], seconds=0.1, bytes=1, at=time.time())

    async def again() -> bool:
        try:
            return await runs.live_version(bus, run) == 2
        except BUS_ERRORS:
            return False

    await bus.put(names.weights_bucket, "live", b"")
    link = ControlClient()
    await asyncio.to_thread(link.__enter__)
    try:
        assert await asyncio.to_thread(link.live_version) == -1
        await asyncio.to_thread(link.weights_live, news)
        for kind, value in GARBAGE.items():
            await bus.js.publish(f"$KV.{names.weights_bucket}.live", value)
            await until(again, f"the version instead of {kind}")
    finally:
        await asyncio.to_thread(link.__exit__)
