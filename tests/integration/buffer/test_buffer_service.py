"""The real buffer process over real servers: what it lets in, hands out, drops, and how it ends."""

import asyncio
import json
import time
import urllib.request
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared.bus import runs
from shared.bus.connection import RequestRefused
from shared.bus.registry import Registry
from shared.bus.subjects import EVAL
from shared.data.tokenizer import Tokenizer
from shared.schema.ledger import EvalEnded, EvalStarted, GroupDead, GroupRequeued, GroupsDropped, GroupsScored, group_id
from shared.schema.messages import (
    Accepted,
    BatchPending,
    EvaluationsEnded,
    EvaluationsRequest,
    Failed,
    Interrupted,
    RunDone,
    Sampling,
    Trained,
)
from tests.integration.buffer.conftest import Launched, Served
from tests.integration.buffer.player import Player
from tests.support.run_config import PROMPTS, write_jsonl
from tests.support.waiting import until


async def settled(player: Player, tasks: int) -> None:
    """Waits until exactly so many tasks are out, and looks a second time."""

    async def as_many() -> bool:
        return await player.waiting() == tasks

    await until(as_many, f"{tasks} tasks")
    assert await player.waiting() == tasks


async def answer_of(player: Player, path: str) -> str:
    """Asks the buffer's health side."""
    [status] = await Registry(player.bus, player.config.run.name).alive("buffer")

    def ask() -> str:
        with urllib.request.urlopen(f"http://{status.http}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(ask)


async def finished(player: Player) -> None:
    async def over() -> bool:
        return isinstance(await player.ask(player.config.rollout.num_rollout), RunDone)

    await until(over, "the end of the run")
    report = await player.audit()
    assert report.violations == []
    assert report.finished and report.in_flight == 0
    assert report.trained == player.config.rollout.num_rollout * player.config.rollout.rollout_batch_size
    assert await player.phase() == runs.FINISHED

    async def nothing_left() -> bool:
        return not await player.blobs()

    await until(nothing_left, "an empty store")


async def test_a_task_says_all_that_a_replica_needs(served: Served, tiny_model: Path, tmp_path: Path) -> None:
    scored_by = ["exact", "math", "grader", "environment"]
    rows = [{**row, "metadata": {"rm_type": name} if name != "exact" else {}} for row, name in zip(PROMPTS, scored_by, strict=False)]
    player = await served(
        rollout={"rollout_temperature": 0.7, "rollout_max_response_len": 5, "rollout_stop": ["!"], "rollout_stop_token_ids": [50]},
        data={"prompt_data": str(write_jsonl(tmp_path / "named.jsonl", rows))},
        reward={"environments": {"grader": "nats:grader"}, "environment_url": "http://127.0.0.1:1"},
    )
    await player.live(0)
    await settled(player, 4)
    for number, lease in enumerate(await player.tasks(10)):
        task = lease.message
        assert (task.group, task.attempt, task.n, task.environment, task.min_version) == (group_id(number), 0, 2, scored_by[number], 0)
        assert (task.prompt, task.label) == (PROMPTS[number]["prompt"], PROMPTS[number]["label"])
        assert task.prompt_tokens.tolist() == Tokenizer(tiny_model).encode(PROMPTS[number]["prompt"]).tolist()
        assert (task.sampling.temperature, task.sampling.max_new_tokens, task.sampling.stop) == (0.7, 5, ["!"])
        assert task.sampling.stop_token_ids == [1, 50]


async def test_prompts_that_are_left_out_are_counted_and_their_place_is_taken(served: Served, tmp_path: Path) -> None:
    rows = [PROMPTS[0], {"prompt": "1" * 9, "label": "1"}, {"question": "1+1="}, *PROMPTS[1:3], [3]]
    write_jsonl(tmp_path / "mixed.jsonl", rows)
    mixed = str(tmp_path / "mixed.jsonl")
    with capture_logs() as lines:
        player = await served(
            data={"prompt_data": [f"{mixed}@[:3]", mixed], "overlong_prompts": "filter", "bad_prompts": "skip"},
            rollout={"rollout_max_prompt_len": 8},
            eval={"eval_prompt_data": f"{mixed}@[:-1]", "skip_eval_before_train": True, "eval_max_prompt_len": 8},
        )
    await player.live(0)
    await settled(player, 4)
    prompts = [lease.message.prompt for lease in await player.all_tasks(4)]
    assert prompts == [PROMPTS[row]["prompt"] for row in (0, 0, 1, 2)], "of the first file one is left, of the second three"
    health, text = json.loads(await answer_of(player, "/healthz")), await answer_of(player, "/metrics")
    assert (health["ok"], health["service"], health["run"], health["state"]) == (True, "buffer", player.config.run.name, "ready")
    run = player.config.run.name
    for of, kept, overlong, bad in (("training", 4, 2, 3), ("eval/heldout", 3, 1, 1)):
        assert f'myxo_prompts{{instance="buffer-1",of="{of}",run="{run}"}} {kept}.0' in text
        for reason, count in (("overlong", overlong), ("bad", bad)):
            assert f'myxo_prompts_left_out{{instance="buffer-1",of="{of}",reason="{reason}",run="{run}"}} {count}.0' in text
    logged = [line for line in lines if line["event"] == "prompts"]
    assert [(line["of"], line["count"], line["left_out"]) for line in logged] == [
        ("training", 4, {"overlong": 2, "bad": 3}),
        ("eval/heldout", 3, {"overlong": 1, "bad": 1}),
    ]
    assert "mixed.jsonl:2" in logged[0]["first_left_out"]


async def test_a_source_goes_on_behind_what_a_killed_buffer_has_drawn(launched: Launched) -> None:
    player, first = await launched(data={"prompt_data": None, "data_source": "tests.support.prompt_source:Sums"})
    await player.live(0)
    tasks = [lease.message for lease in await player.all_tasks(4)]
    assert [task.prompt for task in tasks] == ["1+1=", "2+1=", "3+1=", "4+1="]
    first.kill()
    with player.launch("buffer-2") as second:
        await player.ready(second, "buffer-2")
        await player.live(1)

        async def new_tasks() -> bool:
            tasks.extend(lease.message for lease in await player.tasks(4) if lease.message.group not in {task.group for task in tasks})
            return len(tasks) >= 6

        await until(new_tasks, "two more tasks")
    assert [task.prompt for task in tasks[4:]] == ["5+1=", "6+1="]
    before, after = ({task.metadata["process"] for task in part} for part in (tasks[:4], tasks[4:]))
    assert len(before) == len(after) == 1 and before != after, "each buffer's source has a process of its own"
    assert not (before | after) & {first.process.pid, second.process.pid}


@pytest.mark.extra(each=True)
async def test_a_source_hears_the_same_after_the_buffer_was_killed(launched: Launched) -> None:
    """Twice: the second buffer tells what the first one had not told yet, and what the ledger says of groups that it never knew."""
    source = {"prompt_data": None, "data_source": "tests.support.adaptive_source:Hearing"}  # no states: it is told all of it again
    player, first = await launched(data=source, rollout={"max_staleness": 0})
    await player.live(0)
    await player.batch(0, working=True)
    await player.trained(0)
    await player.batch(1, working=True)
    first.kill()
    drawn = player.config.run.root / "prompts" / "drawn.jsonl"
    before = [json.loads(line) for line in drawn.read_text().splitlines()]
    drawn.write_text("")  # the disk of the first buffer is gone: the ledger suffices
    with player.launch("buffer-2") as second:
        await player.ready(second, "buffer-2")
        for step in (1, 2):
            await player.batch(step, working=True)
            await player.trained(step)
        await player.batch(3, working=True)
    after = [json.loads(line) for line in drawn.read_text().splitlines()]
    prompts = [[record["entry"]["prompt"] for record in records] for records in (before, after)]
    assert len(prompts[0]) == 4 and prompts[1][:4] == prompts[0]
    assert [record["observed"] for record in after] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert [record["entry"]["metadata"]["heard"] for record in after] == [0, 0, 2, 2, 4, 4, 6, 6]


async def test_a_run_is_played_to_its_end(launched: Launched) -> None:
    player, buffer = await launched()
    await player.live(0)
    for step in range(4):
        await player.work_until(2)
        batch = await player.batch(step)
        assert [group.rewards for group in batch.groups] == [[0.0, 1.0]] * 2
        assert batch.version == step
        assert await player.batch(step) == batch
        await player.trained(step)
        await player.trained(step)
        assert await player.batch(step) == batch
        if step:
            await player.durable(step)
            with pytest.raises(RequestRefused, match="step 0 was asked for; the next batch is of step"):
                await player.ask(0)
    assert isinstance(await player.ask(4), BatchPending)
    await player.durable(4)
    await finished(player)
    assert buffer.stop() == 0
    assert await Registry(player.bus, player.config.run.name).alive() == []


async def test_what_does_not_follow_is_refused_in_words(served: Served) -> None:
    player = await served()
    pending = await player.ask(0)
    assert isinstance(pending, BatchPending) and "a rollout replica that serves weights" in pending.waiting_for
    assert await player.waiting() == 0
    await player.live(0)
    with pytest.raises(RequestRefused, match="the buffer: step 2 was asked for; the next batch is of step 0"):
        await player.ask(2)
    with pytest.raises(RequestRefused, match="step 0 was reported as trained; its batch was not formed yet"):
        early = Trained(step=0, version=1, started=1.0, ended=2.0)
        await player.bus.request(player.names.trained, early, Accepted, deadline=60, awaited_from="the buffer")
    with pytest.raises(RequestRefused, match="a checkpoint of 3 steps was reported; 0 are trained"):
        await player.durable(3)
    pending = await player.ask(0)
    assert isinstance(pending, BatchPending)
    assert (pending.have, pending.need) == (0, 2)
    assert "4 groups with the rollout and reward services; live version 0" in pending.waiting_for


async def test_failures_repeats_and_garbage(served: Served) -> None:
    player = await served()
    await player.live(0)
    await settled(player, 4)
    first, second, third, fourth = [lease.message for lease in await player.all_tasks(4)]
    await player.bus.js.publish(player.names.scored("reward"), b"garbage")
    hung = await player.generate(first)
    await player.say(Failed(group=first.group, attempt=0, reason="the verifier hung", by="reward-1", payload=hung.payload))
    scored = await player.generate(second)
    for _ in range(3):
        await player.say(scored)
    await player.say(scored.model_copy(update={"attempt": 1}))
    await player.say(scored.model_copy(update={"group": "g99999999"}))
    short = await player.generate(third)
    await player.say(short.model_copy(update={"rewards": short.rewards[:1]}))
    await player.say(await player.generate(fourth))
    batch = await player.batch(0)
    assert [group.group for group in batch.groups] == [second.group, fourth.group]
    records = await player.records()
    assert [record.reason for record in records if isinstance(record, GroupDead)] == [
        "reward-1: the verifier hung",
        "2 samples of 2 rollouts, with 1 rewards, came back for 2 rollouts",
    ]
    assert sum(len(record.groups) for record in records if isinstance(record, GroupsScored)) == 2

    async def freed() -> bool:
        return not any(group in key for key in await player.blobs() for group in (first.group, third.group))

    await until(freed, "the removal of the dead groups' payloads")
    await settled(player, 4 + 2)  # the four leases that are never acked, and a replacement for each dead group
    assert (await player.audit()).ok


async def test_nobody_reports_what_is_anothers_to_report(served: Served) -> None:
    """The subject says whose account a message came from, and each of them may say some things and no others."""
    player = await served()
    await player.live(0)
    await settled(player, 4)
    tasks = [lease.message for lease in await player.all_tasks(4)]
    forged = (await player.generate(tasks[0])).model_copy(update={"rewards": [1e6, 1e6]})
    left = Interrupted(group=tasks[1].group, attempt=0, stale=True, replica="replica-1")
    with capture_logs() as logs:
        for role, outcome in (("rollout", forged), ("reward", left), ("buffer", forged), ("trainer", left)):
            await player.bus.publish(player.names.scored(role), outcome)
        await until(lambda: len([line for line in logs if line["event"] == "outcome_refused"]) == 4, "four refusals")
    for task in tasks[:2]:
        await player.say(await player.generate(task))
    batch = await player.batch(0)
    assert [(group.group, group.rewards) for group in batch.groups] == [(task.group, [0.0, 1.0]) for task in tasks[:2]]
    assert not [record for record in await player.records() if isinstance(record, GroupRequeued | GroupDead | GroupsDropped)]
    assert (await player.audit()).ok


async def test_a_group_whose_payload_is_lost_is_generated_anew(served: Served) -> None:
    player = await served()
    await player.live(0)
    await player.work_until(2)

    async def both_scored() -> bool:
        return sum(len(record.groups) for record in await player.records() if isinstance(record, GroupsScored)) == 2

    await until(both_scored, "both groups in the ledger")
    [lost] = [key for key in await player.blobs() if group_id(1) in key]
    await player.store.free([lost])
    assert isinstance(await player.ask(0), BatchPending)
    [requeued] = [record for record in await player.records() if isinstance(record, GroupRequeued)]
    assert (requeued.group, requeued.attempt, requeued.reason) == (group_id(1), 1, "payload lost")
    again = []

    async def handed_out_again() -> bool:
        for lease in await player.tasks(10):
            if lease.message.group == group_id(1):
                again.append(lease.message)
        return bool(again)

    await until(handed_out_again, "the group's second attempt")
    assert again[0].attempt == 1
    await player.say(await player.generate(again[0]))
    assert [group.group for group in (await player.batch(0)).groups] == [group_id(0), group_id(1)]


@pytest.mark.extra(each=True)
async def test_each_set_goes_out_with_what_it_has_of_its_own(served: Served, tmp_path: Path) -> None:
    """And what it leaves to the run: the field of [eval], then that of [rollout]."""
    write_jsonl(tmp_path / "a.jsonl", [{"question": "1+1=", "answer": "2", "metadata": {"rm_type": "math_verify", "level": 3}}])
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "2+2=", "label": "4"}])
    own = {"rm_type": "exact", "input_key": "question", "label_key": "answer", "metadata_overrides": {"source": "a"}}
    own |= {"temperature": 0.0, "top_k": 1, "min_new_tokens": 3, "stop": ["\n"], "repetition_penalty": 1.1, "n_samples_per_eval_prompt": 2}
    player = await served(
        rollout={"rollout_top_p": 0.9, "rollout_stop": ["###"], "rollout_max_response_len": 20},
        eval={
            "sets": [
                {"name": "a", "path": str(tmp_path / "a.jsonl"), "max_context_len": 10, **own},
                {"name": "b", "path": str(tmp_path / "b.jsonl"), "custom_rm_path": "tests.support.reward_hooks:length"},
            ],
            "eval_temperature": 0.7,
            "eval_max_response_len": 12,
            "n_samples_per_eval_prompt": 3,
        },
    )
    await player.live(0)
    leases = await player.all_tasks(2, EVAL)
    first, second = sorted((lease.message for lease in leases), key=lambda task: task.group)
    assert (first.group, first.n, first.environment, first.label, first.prompt) == ("eval.a.0.0", 2, "exact", "2", "1+1=")
    assert first.metadata == {"rm_type": "exact", "level": 3, "source": "a"}
    ends = {"stop_token_ids": first.sampling.stop_token_ids}
    short = {"max_new_tokens": 10 - len(first.prompt_tokens), "min_new_tokens": 3}
    assert first.sampling == Sampling(temperature=0.0, top_p=0.9, top_k=1, stop=["\n"], repetition_penalty=1.1, **short, **ends)
    assert (second.group, second.n, second.environment, second.metadata) == ("eval.b.0.0", 3, "custom_rm", {})
    assert second.sampling == Sampling(temperature=0.7, top_p=0.9, max_new_tokens=12, stop=["###"], **ends)
    assert first.deadline == second.deadline > time.time()


@pytest.mark.extra(each=True)
async def test_an_evaluation_that_nobody_answers_ends_at_its_deadline(served: Served, tmp_path: Path) -> None:
    heldout = write_jsonl(tmp_path / "heldout.jsonl", PROMPTS[:3])
    player = await served(rollout={"num_rollout": 1}, eval={"eval_prompt_data": str(heldout), "eval_timeout": 5.0})
    await player.live(0)
    await player.work_until(1, EVAL)

    async def ended() -> list[EvalEnded]:
        return [record for record in await player.records() if isinstance(record, EvalEnded)]

    [late] = await until(ended, "the end of the evaluation")
    assert (late.prompts, late.late, late.samples, late.version) == (3, 2, 1, 0)
    assert late.seconds >= 5.0
    await player.work_until(2)  # training continues, and so does the run
    await player.batch(0)


@pytest.mark.extra(each=True)
async def test_evaluations_come_first_and_last_on_their_own_queue(served: Served, tmp_path: Path) -> None:
    heldout = write_jsonl(tmp_path / "heldout.jsonl", PROMPTS[:3])
    player = await served(
        rollout={"num_rollout": 1}, eval={"eval_prompt_data": str(heldout), "eval_temperature": 0.0, "n_samples_per_eval_prompt": 4}
    )
    await player.live(0)
    leases = await player.all_tasks(3, EVAL)
    assert await until(player.waiting, "training groups") == 2, "training waited for the evaluation"
    pending = await player.ask(0)
    assert (
        isinstance(pending, BatchPending)
        and "the evaluation of heldout under version 0 (3 of 3 prompts outstanding)" in pending.waiting_for
    )
    for lease in leases:
        assert (lease.message.n, lease.message.sampling.temperature) == (4, 0.0)
        await player.say(await player.generate(lease.message))
        await lease.ack()
    await player.work_until(2)
    await player.batch(0)
    await player.trained(0)
    await player.durable(1)
    assert isinstance(await player.ask(1), BatchPending)
    await player.work_until(3, EVAL)

    async def over() -> RunDone | None:
        answer = await player.ask(1)
        return answer if isinstance(answer, RunDone) else None

    done = await until(over, "the end of the run")
    assert done.reason == ""
    told = await player.bus.request(player.names.evaluations, EvaluationsRequest(known=0), EvaluationsEnded, deadline=30, awaited_from="it")
    assert [(one.version, one.samples, one.mean_reward, one.lengths["max"]) for one in told.evaluations] == [
        (0, 12, 0.5, 3),
        (1, 12, 0.5, 3),
    ]
    records = await player.records()
    assert [record.version for record in records if isinstance(record, EvalStarted)] == [0, 1]
    ended = [record for record in records if isinstance(record, EvalEnded)]
    assert [(record.version, record.samples, record.failed, record.mean_reward) for record in ended] == [(0, 12, 0, 0.5), (1, 12, 0, 0.5)]
    await finished(player)
