"""The real buffer keeps the responses of groups that have ended before it frees them, and continues where it cannot."""

import os
import signal
from pathlib import Path

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from shared.bus import runs
from shared.bus.registry import Registry
from shared.bus.subjects import EVAL, TRAIN
from shared.data.rollout_files import DIRECTORY, RolloutRecord
from shared.schema.messages import Accepted, Failed, Trained
from shared.schema.sample import decode
from tests.integration.buffer.conftest import Launched, Served
from tests.integration.buffer.player import Player
from tests.support.attesting import attested
from tests.support.rollout_reader import RolloutReader
from tests.support.run_config import PROMPTS
from tests.support.waiting import until


def kept(player: Player) -> dict[str, RolloutRecord]:
    return {record.group: record for record in RolloutReader(player.config.run.root / DIRECTORY).records()}


async def keeps(player: Player, groups: int) -> dict[str, RolloutRecord]:
    """What is kept once it is so many groups."""
    return await until(lambda: len(found := kept(player)) >= groups and found, f"{groups} kept groups")


async def empty_store(player: Player) -> None:
    async def nothing_left() -> bool:
        return not await player.blobs()

    await until(nothing_left, "an empty store")


async def step(player: Player, number: int) -> None:
    """Works on whatever is there until a step is trained."""
    await player.batch(number, working=True)
    await player.trained(number)


async def test_what_became_of_every_group_is_kept_with_its_responses(served: Served, tmp_path: Path) -> None:
    player = await served(
        rollout={"num_rollout": 2, "max_staleness": 0},
        eval={"eval_prompt_data": {"sums": str(tmp_path / "prompts.jsonl")}, "skip_eval_before_train": True},
    )
    await player.live(0)
    dead, dropped = await player.all_tasks(2)
    await player.say(Failed(group=dead.message.group, attempt=0, reason="too long", by="rollout-0"))
    filtered = await player.generate(dropped.message)
    filtered.filtered = "all equal"
    filtered.parts = ({}, {"form": 0.5})
    await player.say(filtered)
    for lease in (dead, dropped):
        await lease.ack()
    await step(player, 0)
    found = await keeps(player, 4)
    prompt = PROMPTS[int(dead.message.group[1:])]
    gone = found[dead.message.group]
    assert (gone.status, gone.reason, gone.samples) == ("dead", "rollout-0: too long", [])
    assert (gone.prompt, gone.label) == (prompt["prompt"], prompt["label"]), "it has no payload to read them from"
    gone = found[dropped.message.group]
    assert (gone.status, gone.reason, gone.step) == ("dropped", "filtered: all equal", None)
    assert [(one.response, one.reward, one.parts) for one in gone.samples] == [("2", 0.0, {}), ("2", 1.0, {"form": 0.5})]
    trained = [one for one in found.values() if one.status == "trained"]
    assert [(one.step, one.version, one.attempt, len(one.samples)) for one in trained] == [(0, 0, 0, 2)] * 2
    assert (trained[0].samples[0].segments, trained[0].samples[0].response_ids) == ([(0, 3, 0)], None)

    await step(player, 1)
    failed, *others = await player.all_tasks(9, EVAL)
    await player.say(Failed(group=failed.message.group, attempt=0, reason="no room", by="rollout-0"))
    for lease in others:
        scored = await player.generate(lease.message)
        scored.parts = ({"form": 1.0},)
        await player.say(scored)
    for lease in (failed, *others):
        await lease.ack()
    found = await keeps(player, 4 + 2 + 9)
    of_set = {name: one for name, one in found.items() if one.dataset == "sums"}
    assert len(of_set) == 9 and {one.version for one in of_set.values()} == {2}
    gone = of_set.pop(failed.message.group)
    assert (gone.status, gone.reason, gone.prompt, gone.samples) == ("failed", "rollout-0: no room", "0+0=", [])
    assert {(one.status, one.samples[0].response, one.samples[0].parts["form"]) for one in of_set.values()} == {("evaluated", "2", 1.0)}
    await player.durable(2)
    await empty_store(player)
    assert (await player.audit()).violations == []


async def test_a_restarted_buffer_keeps_what_was_trained_and_writes_nothing_twice(launched: Launched) -> None:
    player, first = await launched(monitoring={"keep_rollouts_tokens": True})
    await player.live(0)
    await step(player, 0)
    await keeps(player, 2)
    first.kill()
    files = player.config.run.root / DIRECTORY
    torn = files / "000000.jsonl"
    torn.write_bytes(torn.read_bytes()[:-10])  # its last line was not whole when it died
    second = player.launch()
    try:
        await player.ready(second)
        found = await keeps(player, 2)
        assert {one.step for one in found.values()} == {0}
        reader = RolloutReader(files)
        assert sorted(head.group for head in reader.heads()) == sorted(found), "the group that was whole is not written again"
        assert reader.torn == 1
        sample = next(iter(found.values())).decoded()[0]
        assert (sample.response.tolist(), sample.log_probs.tolist(), sample.mask.tolist()) == ([0, 1, 2], [0.0] * 3, [1] * 3)
        await step(player, 1)
        await player.durable(2)
        await keeps(player, 4)
        await empty_store_but(player, 4)
    finally:
        second.__exit__()


@pytest.mark.extra(each=True)
async def test_what_a_buffer_had_not_read_when_it_died_its_successor_keeps_also_what_was_let_go(launched: Launched) -> None:
    """The store does not answer meanwhile; the groups are durable by then."""
    player, first = await launched()
    await player.live(0)
    batch = await player.batch(0, working=True)
    samples = {group.group: decode(await player.store.read(group.payload)) for group in batch.groups}
    async with Redis.from_url(await runs.store_url(player.bus, player.config.run.name)) as client:
        pid = (await client.info("server"))["process_id"]
    report = Trained(step=0, version=1, started=0.0, ended=1.0, metrics={}, attestation=attested(batch, samples))
    os.kill(pid, signal.SIGSTOP)
    try:
        await player.bus.request(player.names.trained, report, Accepted, deadline=60, awaited_from="the buffer")
        await player.durable(1)
        first.kill()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert kept(player) == {}
    second = player.launch()
    try:
        await player.ready(second)
        assert sorted(await keeps(player, 2)) == sorted(samples)
        await empty_store_but(player, 2)
    finally:
        second.__exit__()


async def empty_store_but(player: Player, groups: int) -> None:
    """Waits until the store holds nothing of the first so many groups that were trained."""
    names = set(kept(player))
    assert len(names) == groups

    async def freed() -> bool:
        return not any(name in key for key in await player.blobs() for name in names)

    await until(freed, "freed payloads")


@pytest.mark.extra(each=True)
async def test_a_directory_that_cannot_be_written_costs_responses_and_nothing_else(served: Served, tmp_path: Path) -> None:
    blocked = tmp_path / "runs" / "blocked" / DIRECTORY
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file stands in the way")
    with capture_logs() as lines:
        player = await served(run={"name": "blocked"}, rollout={"num_rollout": 1, "max_staleness": 0})
        await player.live(0)
        await step(player, 0)
        await player.durable(1)
        await empty_store(player)

        async def counted() -> bool:
            [card] = await Registry(player.bus, player.config.run.name).alive("buffer")
            return card.gauges.get("rollouts_not_kept.disk") == 2.0 and card.gauges["rollouts_kept"] == 0.0

        await until(counted, "the count of what is not kept")
    warned = [line for line in lines if line["event"] == "rollouts_not_kept"]
    assert [(line["reason"], line["log_level"]) for line in warned] == [("disk", "warning")]
    assert str(blocked) in warned[0]["error"]


@pytest.mark.extra(each=True)
async def test_nothing_is_kept_where_nobody_wants_it(served: Served) -> None:
    player = await served(monitoring={"keep_rollouts": 0.0}, rollout={"num_rollout": 1, "max_staleness": 0})
    await player.live(0)
    await player.work_until(2, TRAIN)
    await step(player, 0)
    await player.durable(1)
    await empty_store(player)
    assert not (player.config.run.root / DIRECTORY).exists()
