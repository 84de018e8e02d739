"""The real buffer with every staleness policy, order and filter, and beside another run's."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from shared.bus.connection import RequestRefused
from shared.schema.ledger import BatchFormed, GroupRequeued, GroupsDropped, GroupsScored, group_id, group_number
from shared.schema.messages import Batch, BatchPending, Interrupted, Task
from tests.integration.buffer.conftest import NewRun, Served
from tests.integration.buffer.player import Player
from tests.integration.buffer.test_buffer_service import finished
from tests.support import buffer_filters
from tests.support.run_config import write_jsonl
from tests.support.waiting import until


async def to_the_end(player: Player, first: int) -> None:
    """Trains every step from ``first`` on."""
    for step in range(first, player.config.rollout.num_rollout):
        await player.batch(step, working=True)
        await player.trained(step)
    await player.durable(player.config.rollout.num_rollout)
    await finished(player)


@pytest.mark.parametrize("policy", ["drop", "requeue", *(pytest.param(policy, marks=pytest.mark.extra) for policy in ("continue", "mask"))])
async def test_what_waited_too_long(served: Served, policy: str) -> None:
    """Four groups under way for batches of two, on-policy: the second pair is too old for the second batch."""
    player = await served(rollout={"max_staleness": 0, "staleness_policy": policy, "over_sampling_batch_size": 4})
    await player.live(0)
    waiting = await player.work_until(4)
    batch = await player.batch(0)
    assert [group.group for group in batch.groups] == sorted(waiting[:2])
    left = set(waiting[2:])
    await player.trained(0)
    assert isinstance(await player.ask(1), BatchPending)
    records = await player.records()
    dropped = {name for record in records if isinstance(record, GroupsDropped) and record.reason == "stale" for name in record.groups}
    again = {record.group: record.partial for record in records if isinstance(record, GroupRequeued)}
    held = {scored.group: scored.payload for record in records if isinstance(record, GroupsScored) for scored in record.groups}
    assert dropped == (left if policy in ("drop", "mask") else set())
    assert again == {name: held[name] if policy == "continue" else None for name in left - dropped}

    tasks = await until(lambda: player.tasks(8), "tasks in their place")
    sent = {lease.message.group: (lease.message.attempt, lease.message.partial, lease.message.renew_below) for lease in tasks}
    assert {name: sent[name] for name in left & set(sent)} == {name: (1, payload, 1 if payload else 0) for name, payload in again.items()}
    kept = {key for payload in again.values() if payload for key in payload.keys}
    assert kept <= set(await player.blobs())
    for lease in tasks:
        await player.say(await player.generate(lease.message))
        await lease.ack()
    await to_the_end(player, 1)


async def test_a_batch_says_which_tokens_leave_the_loss(served: Served) -> None:
    player = await served(rollout={"max_staleness": 1, "staleness_policy": "mask"})
    await player.live(0)
    first = await player.work_until(2)
    old = {lease.message.group: lease for lease in await player.all_tasks(2)}
    for step in (0, 1):
        await player.batch(step, working=True)
        await player.trained(step)
    for lease in old.values():  # begun under version 0, ended under version 2
        scored = await player.generate(lease.message, 0)
        scored.samples[0].newest = 2
        await player.say(scored)
        await lease.ack()
    batch = await player.batch(2)
    assert [group.group for group in batch.groups] == sorted(old)
    assert (batch.version, batch.mask_below) == (2, 1)
    assert (await player.audit()).masked == 4  # two samples of each lose some or all of their tokens
    assert first and await player.batch(2) == batch
    await player.trained(2)
    await to_the_end(player, 3)


async def test_a_group_goes_on_from_what_its_replica_had(served: Served) -> None:
    player = await served()
    await player.live(0)
    [lease] = await until(lambda: player.tasks(1), "a task")
    has = (await player.generate(lease.message)).payload
    await player.say(Interrupted(group=lease.message.group, attempt=0, stale=False, replica="rollout-9", payload=has))
    await lease.ack()

    async def sent_again() -> Any:
        for lease in await player.tasks(4):
            if lease.message.attempt == 1:
                return lease
            await player.say(await player.generate(lease.message))
            await lease.ack()

    again = await until(sent_again, "the group's second attempt")
    assert again.message.partial == has
    await player.say(await player.generate(again.message))
    await again.ack()

    async def let_go() -> bool:
        return not set(has.keys) & set(await player.blobs())

    await until(let_go, "the end of the earlier attempt's payload")
    await player.say(await player.generate(lease.message))  # another replica ends the first attempt after all
    await until(let_go, "the end of what the late attempt has written")
    await to_the_end(player, 0)


async def scored(player: Player) -> int:
    return sum(len(record.groups) for record in await player.records() if isinstance(record, GroupsScored))


async def test_a_buffer_filter_chooses(served: Served) -> None:
    player = await served(rollout={"max_staleness": 3, "buffer_filter_path": "tests.support.buffer_filters:newest_first"})
    await player.live(0)
    waiting = await player.work_until(8)

    async def all_back() -> bool:
        return await scored(player) == 8

    await until(all_back, "eight scored groups")
    batch = await player.batch(0)
    assert [group.group for group in batch.groups] == sorted(waiting)[-2:]
    formed = [record for record in await player.records() if isinstance(record, BatchFormed)]
    assert [record.groups for record in formed] == [sorted(waiting)[-2:]]
    await player.trained(0)
    await to_the_end(player, 1)


@pytest.mark.extra(each=True)
async def test_a_buffer_filter_may_wait_and_what_it_does_wrong_is_named_to_the_trainer(served: Served) -> None:
    player = await served(rollout={"max_staleness": 2, "buffer_filter_path": "tests.support.buffer_filters:by_number"})
    await player.live(0)
    await player.work_until(2)
    assert isinstance(await player.ask(0), BatchPending)
    for words in ("chose 2 groups, 1 of them different", "RuntimeError: no idea for step 0"):
        await player.work_until(1)

        async def refused(words: str = words) -> bool:
            try:
                return not await player.ask(0)
            except RequestRefused as error:
                return words in str(error)

        await until(refused, words)
    await player.work_until(1)

    async def formed() -> bool:
        with contextlib.suppress(RequestRefused):  # the fifth is on its way
            return isinstance(await player.ask(0), Batch)
        return False

    await until(formed, "a batch")


async def test_a_slow_buffer_filter_is_called_once_and_what_it_raises_reaches_the_trainer(served: Served) -> None:
    player = await served(rollout={"buffer_filter_path": "tests.support.buffer_filters:held_up"})
    await player.live(0)
    await player.work_until(2)

    async def chooses() -> bool:
        answer = await player.ask(0)
        return isinstance(answer, BatchPending) and answer.waiting_for == "the choice of rollout.buffer_filter_path"

    await until(chooses, "the function's call")
    assert await chooses() and buffer_filters.CALLS == [0]
    buffer_filters.GO_ON.set()
    with pytest.raises(RequestRefused, match="out of ideas"):
        await player.ask(0)
    assert buffer_filters.CALLS == [0]


@pytest.mark.extra(each=True)
async def test_runs_on_one_bus_and_in_one_store_know_nothing_of_each_other(new_run: NewRun, run_name: str) -> None:
    """Two runs at once, group ids and steps the same, one of them over its bound where the other is not."""
    one = await new_run(run={"name": f"{run_name}-a"}, rollout={"max_staleness": 0, "num_rollout": 2})
    two = await new_run(run={"name": f"{run_name}-b"}, rollout={"max_staleness": 1, "num_rollout": 2, "n_samples_per_prompt": 3})
    with one.launch("buffer-1") as first, two.launch("buffer-1") as second:
        await one.ready(first)
        await two.ready(second)
        await one.live(0)
        await two.live(0)
        assert sorted(await one.work_until(2)) == [group_id(0), group_id(1)]
        assert sorted(await two.work_until(4)) == [group_id(number) for number in range(4)]
        assert [group.rewards for group in (await one.batch(0)).groups] != [group.rewards for group in (await two.batch(0)).groups]
        await one.trained(0)
        await to_the_end(one, 1)  # its store is empty, its ledger complete
        assert (await two.audit()).trained == 0
        assert len(await two.blobs()) == 4
        await two.trained(0)
        await to_the_end(two, 1)
        for player, samples in ((one, 2), (two, 3)):
            report = await player.audit()
            assert report.violations == [] and report.trained == 4
            groups = [group for record in await player.records() if isinstance(record, GroupsScored) for group in record.groups]
            assert {len(group.samples) for group in groups} == {samples}
            assert all(key.startswith(f"{player.config.run.name}:") for group in groups for key in group.payload.keys)


async def test_groups_begin_anew_where_their_prompts_have_changed(new_run: NewRun, tmp_path: Path) -> None:
    """What a stopped replica handed on would else be continued under another prompt and label."""
    player = await new_run(data={"accept_changed_data": True})
    with player.launch() as first:
        await player.ready(first)
        await player.live(0)
        leases = await player.all_tasks(2)
        first.kill()
    for lease in leases:
        has = (await player.generate(lease.message)).payload
        await player.say(Interrupted(group=lease.message.group, attempt=0, stale=False, replica="rollout-9", payload=has))
        await lease.ack()
    groups, found = {lease.message.group for lease in leases}, dict[str, Task]()
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"{number}+0=", "label": str(number)} for number in range(90, 100)])

    async def anew() -> bool:
        found.update({lease.message.group: lease.message for lease in await player.tasks(8) if lease.message.attempt == 1})
        return groups <= set(found)

    async def requeued() -> list[str]:
        return [record.reason for record in await player.records() if isinstance(record, GroupRequeued)]

    with player.launch() as second:
        await player.ready(second)
        await until(anew, "the groups' second attempts")
        second.kill()
    for name in groups:
        assert (found[name].partial, found[name].label) == (None, str(90 + group_number(name)))
    before = await requeued()
    assert set(before) == {"changed data"}
    with player.launch() as third:
        await player.ready(third)
        assert await requeued() == before, "the file is noted as it is now"
        third.kill()
