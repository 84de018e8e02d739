"""A run whose groups all fail: the buffer ends it, durably, with the reason; and continues when the run is created again."""

import os
import signal

import pytest

from services.buffer.run_failure import STATE
from shared.bus import runs
from shared.bus.registry import Registry
from shared.bus.subjects import TRAIN
from shared.schema.ledger import GroupDead
from shared.schema.messages import Batch, Failed, RunDone
from shared.schema.service_messages import ServiceStatus
from tests.integration.buffer.conftest import Launched
from tests.integration.buffer.player import Player
from tests.support.waiting import until

REASON = "rollout-0: rollout.custom_generate_function_path = x:y: ValueError: \x1b[2J no"


async def fail(player: Player, groups: int, kind: str = TRAIN) -> None:
    """Gives up so many groups, as a replica does whose hook raises."""
    done = 0

    async def enough() -> bool:
        nonlocal done
        for lease in await player.tasks(groups - done, kind):
            failed = Failed(group=lease.message.group, attempt=lease.message.attempt, reason=REASON[11:], by="rollout-0")
            await player.say(failed)
            await lease.ack()
            done += 1
        return done >= groups

    await until(enough, f"{groups} tasks to fail")


async def card(player: Player) -> ServiceStatus:
    [found] = await Registry(player.bus, player.config.run.name).alive("buffer")
    return found


async def failed(player: Player) -> str:
    async def over() -> str:
        phase, reason = await runs.phase_and_reason(player.bus, player.config.run.name)
        return reason if phase == runs.FAILED else ""

    reason: str = await until(over, "the run's failure")
    return reason


async def test_a_run_whose_groups_all_fail_ends_with_the_reason_and_goes_on_when_it_is_created_again(launched: Launched) -> None:
    player, buffer = await launched(rollout={"max_dead_in_a_row": 5})
    await player.live(0)
    await fail(player, 3)

    async def counted() -> bool:
        found = await card(player)
        return found.gauges.get("dead") == 3 and found.detail == REASON and found.gauges["dead_per_minute"] > 0

    await until(counted, "the card's count and reason")
    await player.work_until(1)  # one that is scored: the count starts anew
    await fail(player, 5)
    assert await failed(player) == f"5 groups in a row failed (rollout.max_dead_in_a_row = 5), the last one: {REASON}"
    answer = await player.ask(0)
    assert isinstance(answer, RunDone) and REASON in answer.reason
    assert (await card(player)).state == STATE or await until(lambda: says(player, STATE), "the card's state")

    buffer.kill()  # the failure is the run's, not the process's
    again = player.launch("buffer-2")
    try:
        await player.says(again, "buffer-2", STATE)
        assert isinstance(await player.ask(0), RunDone)
        await runs.create(player.bus, player.config, None)
        await player.says(again, "buffer-2", "ready")
        await fail(player, 2)
        assert isinstance(await player.batch(0, working=True), Batch)
        assert await player.phase() == runs.RUNNING
        assert (await player.audit()).violations == []
    finally:
        again.kill()


@pytest.mark.extra
async def test_outcomes_that_come_together_are_counted_in_their_order(launched: Launched) -> None:
    """A group that is scored between others that fail begins the count anew."""
    player, buffer = await launched(rollout={"max_dead_in_a_row": 3})
    await player.live(0)
    leases = await player.all_tasks(4)
    os.kill(buffer.process.pid, signal.SIGSTOP)
    try:
        for number, lease in enumerate(leases):
            task = lease.message
            failed = Failed(group=task.group, attempt=task.attempt, reason=REASON[11:], by="rollout-0")
            await player.say(await player.generate(task) if number == 2 else failed)
            await lease.ack()
    finally:
        os.kill(buffer.process.pid, signal.SIGCONT)

    async def last_one_decided() -> bool:
        return any(isinstance(record, GroupDead) and record.group == task.group for record in await player.records())

    await until(last_one_decided, "the last group's end")
    await player.work_until(1)  # the buffer still takes outcomes
    assert await player.phase() == runs.RUNNING


async def says(player: Player, state: str) -> bool:
    return (await card(player)).state == state
