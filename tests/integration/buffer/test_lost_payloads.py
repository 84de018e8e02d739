"""Groups whose samples the store has lost, wherever they are by then: the real buffer has them generated anew."""

import time
from pathlib import Path
from typing import Any

from services.buffer.run_failure import DeadGroups
from shared.bus.subjects import EVAL
from shared.runtime.errors import INFRASTRUCTURE
from shared.schema.ledger import PAYLOAD_LOST, BatchAmended, EvalScored, GroupDead, GroupRequeued
from shared.schema.messages import Accepted, BatchPending, BatchRefused, Failed
from tests.integration.buffer.conftest import Served
from tests.integration.buffer.player import Player
from tests.support.run_config import PROMPTS, write_jsonl
from tests.support.waiting import until


async def refuse(player: Player, group: str) -> None:
    """As a trainer that has found no blob."""
    refusal = BatchRefused(step=0, group=group, sample=0, reason="the store holds no blob", at=time.time())
    subject = player.names.refused
    await player.bus.request(subject, refusal, Accepted, deadline=60, awaited_from="the buffer")


async def test_a_batch_waits_for_what_was_lost_after_it_was_handed_out(served: Served) -> None:
    player = await served(rollout={"num_rollout": 1, "max_staleness": 0})
    await player.live(0)
    names = [group.group for group in (await player.batch(0, working=True)).groups]
    await player.store.free(await player.blobs())
    for name in names:
        await refuse(player, name)
        await refuse(player, name)  # it was in two minds, or its answer was lost
    assert isinstance(await player.ask(0), BatchPending)
    again = await player.batch(0, working=True)
    assert [group.group for group in again.groups] == names
    await player.trained(0)
    await player.durable(1)
    records, report = await player.records(), await player.audit()
    assert [(record.group, record.attempt) for record in records if isinstance(record, GroupRequeued)] == [(name, 1) for name in names]
    [amended] = [record for record in records if isinstance(record, BatchAmended)]
    assert (sorted(amended.removed), amended.added) == (names, names)
    assert (report.violations, report.trained, report.dead.total(), report.admitted) == ([], 2, 0, 2)


async def test_a_group_that_was_lost_before_it_was_scored_is_no_dead_one(served: Served) -> None:
    """One that the store still has ends as any that failed."""
    player = await served(rollout={"num_rollout": 1, "max_staleness": 0})
    await player.live(0)
    lost, there = [(lease, await player.generate(lease.message)) for lease in await player.all_tasks(2)]
    await player.store.free(lost[1].payload.keys)
    for lease, scored in (lost, there):
        facts: dict[str, Any] = {"group": scored.group, "attempt": 0, "payload": scored.payload, "fault": INFRASTRUCTURE}
        await player.say(Failed(reason="no blob", by="reward-0", **facts))
        await lease.ack()

    async def both_decided() -> bool:
        return sum(isinstance(record, GroupRequeued | GroupDead) for record in await player.records()) == 2

    await until(both_decided, "what becomes of both groups")
    decided = [record for record in await player.records() if isinstance(record, GroupRequeued | GroupDead)]
    assert [(type(record), record.group) for record in decided] == [(GroupRequeued, lost[1].group), (GroupDead, there[1].group)]
    assert decided[0].reason == PAYLOAD_LOST
    assert lost[1].group in [group.group for group in (await player.batch(0, working=True)).groups]
    assert (await player.audit()).violations == []


async def test_a_held_out_prompt_that_was_lost_before_it_was_scored_is_nobodys_fault(served: Served, tmp_path: Path) -> None:
    heldout = write_jsonl(tmp_path / "heldout.jsonl", PROMPTS[:2])
    player = await served(rollout={"num_rollout": 1}, eval={"eval_prompt_data": str(heldout)})
    await player.live(0)
    lost, there = [(lease, await player.generate(lease.message)) for lease in await player.all_tasks(2, EVAL)]
    await player.store.free(lost[1].payload.keys)
    for lease, scored in (lost, there):
        await player.say(
            Failed(reason="no blob", by="reward-0", group=scored.group, attempt=0, payload=scored.payload, fault=INFRASTRUCTURE)
        )
        await lease.ack()

    async def decided() -> dict[str, str] | None:
        found = {record.group: record.reason for record in await player.records() if isinstance(record, EvalScored)}
        return found if len(found) == 2 else None

    reasons = await until(decided, "what becomes of both prompts")
    assert reasons[there[1].group].endswith("no blob") and reasons[lost[1].group].endswith(PAYLOAD_LOST)
    failures = DeadGroups()
    for record in await player.records():
        failures.see(record)
    assert (failures.in_a_row, failures.eval_failed) == (1, 2)
