"""What a store or a trainer lost, and what prompts show: groups generated anew, checkpoints that are gone, pictures kept while needed."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from services.buffer.run_failure import DeadGroups
from services.trainer.control_client import ControlClient
from shared.bus.subjects import EVAL
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.runtime.errors import INFRASTRUCTURE, BadInput
from shared.schema.ledger import PAYLOAD_LOST, BatchAmended, EvalScored, GroupDead, GroupRequeued
from shared.schema.messages import Accepted, BatchPending, BatchRefused, Failed, Task
from tests.integration.buffer.conftest import NewRun, Served
from tests.integration.buffer.player import Player
from tests.support.run_config import PROMPTS, write_jsonl
from tests.support.tiny_vision import png, write_tiny_vision_model
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


async def test_a_trainer_is_told_once_that_its_checkpoints_are_gone_and_what_helps(
    served: Served, nats: EmbeddedNats, valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    player = await served()
    await player.live(0)
    for step in range(2):
        await player.batch(step, working=True)
        await player.trained(step)
        await player.durable(step + 1)
    for name, value in {"NATS_URL": nats.url, "MYXO_RUN": player.config.run.name, "REDIS_URL": valkey.url}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # a link takes the signals of the process's main thread, which this is not
    link = ControlClient()
    await asyncio.to_thread(link.__enter__)
    try:
        with pytest.raises(BadInput, match=r"step 0 was asked for; the next batch is of step 2: .* are gone; .*`myxo repair RUN`"):
            await asyncio.to_thread(link.batch, 0, 0)
    finally:
        await asyncio.to_thread(link.__exit__)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_tiny_vision_model(path := tmp_path_factory.mktemp("seeing"), "qwen3_vl")
    return path


async def shown(player: Player, task: Task) -> list[bytes]:
    assert task.pictures is not None
    return await player.store.read(task.pictures)


async def test_a_picture_of_two_groups_is_freed_with_each_and_stored_again_after_a_kill(new_run: NewRun, tmp_path: Path) -> None:
    """The buffer is killed as soon as a picture is stored, whether its task is sent or not: its successor's tasks have the same, once."""
    (tmp_path / "a.png").write_bytes(png(61, 40))
    data = {"label_key": "label", "apply_chat_template": True, "multimodal_keys": {"image": "images"}}
    player = await new_run(data=data, trainer={"trainer_backend": "torch"})
    rows = [{"prompt": f"<image>{number}", "images": ["a.png"], "label": "2"} for number in range(4)]
    write_jsonl(tmp_path / "prompts.jsonl", rows)

    async def pictures() -> list[str]:
        return [key for key in await player.blobs() if ":pictures:" in key]

    with player.launch() as first:
        await player.ready(first)
        await player.live(0)
        stored = await until(pictures, "pictures in the store")
        first.kill()
    with player.launch() as second:
        await player.ready(second)
        one, two = await player.all_tasks(2)
        held = await until(pictures, "the pictures of all tasks")
        assert set(stored) <= set(held) and len({key.rsplit(":", 2)[0] for key in held}) == len(held), "each attempt has one"
        assert await shown(player, one.message) == await shown(player, two.message)
        await player.say(await player.generate(one.message))
        await one.ack()
        prefixes = [player.names.payload_prefix(lease.message.group, lease.message.attempt) for lease in (one, two)]

        async def freed() -> bool:
            return not any(key.startswith(prefixes[0]) for key in await pictures())

        await until(freed, "the first group's picture to be freed")
        assert any(key.startswith(prefixes[1]) for key in await pictures())
        [again] = await shown(player, two.message)
        assert again == png(61, 40) or again.startswith(b"\x89PNG")
        second.kill()  # the second group's samples come while nobody is there
        await player.say(await player.generate(two.message))
        await two.ack()
    with player.launch() as third:
        await player.ready(third)
        await player.work_until(2)

        async def all_freed() -> bool:
            return not any(key.startswith(tuple(prefixes)) for key in await pictures())

        await until(all_freed, "the pictures of ended attempts to be freed")
        assert (await player.batch(0, working=True)).step == 0
        third.kill()
