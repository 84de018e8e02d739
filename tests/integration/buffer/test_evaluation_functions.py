"""Evaluations by the user's own function, and a log function that sees them, as the buffer has them."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.bus.streams import task_consumer
from shared.bus.subjects import EVAL
from shared.bus.work_queue import WorkQueue
from shared.schema.ledger import EvalEnded, eval_group_id
from shared.schema.messages import EvalFigures, EvalResult, Evaluate, Evaluated, EvaluationsEnded, EvaluationsRequest, RunDone
from tests.integration.buffer.conftest import Served
from tests.integration.buffer.player import Player
from tests.support.run_config import PROMPTS, write_jsonl
from tests.support.waiting import until

FUNCTIONS = "tests.support.rollout_functions"


def sets(directory: Path, **of_words: Any) -> dict[str, Any]:
    path = str(write_jsonl(directory / "heldout.jsonl", PROMPTS[:3]))
    return {"sets": [{"name": "sums", "path": path}, {"name": "words", "path": f"{path}@[:1]", "n_samples_per_eval_prompt": 2, **of_words}]}


async def told(player: Player, count: int) -> list[EvalFigures]:
    """What the trainer hears of evaluations, once there are so many."""

    async def heard() -> list[EvalFigures] | None:
        request, names = EvaluationsRequest(known=0), player.names
        answer = await player.bus.request(names.evaluations, request, EvaluationsEnded, deadline=60, awaited_from="the buffer")
        return answer.evaluations if len(answer.evaluations) >= count else None

    return await until(heard, f"{count} evaluations", 120)


async def the_end(player: Player) -> RunDone:
    async def over() -> RunDone | None:
        answer = await player.ask(1)
        return answer if isinstance(answer, RunDone) else None

    return await until(over, "the end of the run", 120)


async def train(player: Player) -> None:
    """The run's only step."""
    await player.work_until(2)
    await player.batch(0)
    await player.trained(0)
    await player.durable(1)


@pytest.mark.extra
async def test_a_log_function_sees_all_sets_of_a_version_at_once(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    log = {"custom_eval_rollout_log_function_path": f"{FUNCTIONS}.logs_evaluation", "keep_rollouts": 0.0}
    player = await served(rollout={"num_rollout": 1}, eval=sets(tmp_path), monitoring=log)
    await player.live(0)
    await player.work_until(4, EVAL)
    first = await told(player, 2)
    assert {(one.dataset, one.version, one.samples, one.logged) for one in first} == {("sums", 0, 3, False), ("words", 0, 2, False)}
    await train(player)
    await player.work_until(4, EVAL)
    await the_end(player)
    assert {(one.dataset, one.version, one.logged) for one in (await told(player, 4))[2:]} == {("sums", 1, True), ("words", 1, True)}
    seen = {"sums": [[0.0] * 3, 3], "words": [[0.0, 1.0], 2]}
    lines = [json.loads(line) for line in (tmp_path / "logged").read_text().splitlines()]
    assert lines == [[0, 2, seen, []]] * 2

    async def freed() -> bool:
        return not [key for key in await player.blobs() if ":eval." in key]

    await until(freed, "a store without held-out payloads", 60)


def result(dataset: str, reward: float, **changes: Any) -> EvalResult:
    figures = {"oldest": 0, "newest": 0, "prompts": 4, "failed": 0, "samples": 4, "mean_reward": reward, "metrics": {"eval/mine": reward}}
    return EvalResult(**{"dataset": dataset, **figures, **changes})


async def test_a_function_is_asked_once_a_version_and_gives_every_set(served: Served, tmp_path: Path) -> None:
    evaluation = {**sets(tmp_path), "eval_function_path": f"{FUNCTIONS}.evaluates"}
    keys = {"worker_environment": ["SET_WHERE_THE_FUNCTIONS_RUN"]}  # and not here
    player = await served(rollout={"num_rollout": 1}, eval=evaluation, reward=keys)
    run, names = player.config.run.name, player.names
    asked = WorkQueue(player.bus, task_consumer(run, player.config.bus, EVAL), Evaluate)

    async def say(dataset: str, version: int, given: EvalResult) -> None:
        message = Evaluated(group=eval_group_id(dataset, version, 0), attempt=0, result=given, by="rollout-1")
        await player.bus.publish(names.scored("rollout"), message)

    async def task() -> Evaluate:
        [lease] = await until(lambda: asked.fetch(1), "what the function is asked for", 60)
        await lease.ack()
        return lease.message

    await player.live(0)
    assert (await task()).version == 0
    await train(player)  # it is not waited for
    await say("mine", 0, result("mine", 0.125))
    await say("sums", 0, result("sums", 0.25, logged=True))
    await say("sums", 0, result("sums", 0.75))  # a replica's second answer
    await say("words", 0, result("words", 0.0, samples=0, prompts=0, reason="it gave no set of this name"))
    await say("mine", 0, result("mine", 1.0))
    await say("more", 0, result("more", 1.0))  # when the version is done
    assert (await task()).version == 1, "it is asked once for all sets"
    found = await told(player, 3)
    assert [(one.dataset, one.version, one.mean_reward, one.logged) for one in found] == [
        ("mine", 0, 0.125, False), ("sums", 0, 0.25, True), ("words", 0, 0.0, False),
    ]  # fmt: skip
    assert found[0].metrics == {"eval/mine": 0.125} and (found[0].live, found[0].lag) == (1, 1)
    assert (found[2].prompts, found[2].failed, found[2].samples, found[2].reason) == (1, 1, 0, "it gave no set of this name")
    await say("sums", 1, result("sums", 0.5, oldest=1, newest=1))
    await say("words", 1, result("words", 0.5, oldest=1, newest=1))
    await the_end(player)
    ended = [record for record in await player.records() if isinstance(record, EvalEnded)]
    assert [(record.version, record.dataset, record.prompts) for record in ended] == [
        (0, "mine", 4), (0, "sums", 4), (0, "words", 1), (1, "sums", 4), (1, "words", 4),
    ]  # fmt: skip
