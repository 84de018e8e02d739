"""The user's own function evaluates, over real servers and a real engine; and replicas that take held-out prompts alone."""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from myxo.launch.service_plan import plan
from services.rollout.engine.engine_client import EngineClient
from services.rollout.evaluator import RETRY_SECONDS, VERSION_SECONDS
from services.rollout.request_slots import RequestSlots, evaluates
from shared.bus.streams import task_consumer
from shared.bus.subjects import EVAL
from shared.bus.work_queue import FETCH_SECONDS, WorkQueue
from shared.config.devices import engine_of
from shared.config.environment_variables import EVAL_VARIABLE
from shared.runtime.errors import ConfigError
from shared.schema.messages import EvalResult, Evaluate, Evaluated
from tests.integration.engine.bench import Bench, NewBench
from tests.support.rollout_functions import TOKENS
from tests.support.run_config import run_config
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)


FUNCTIONS = "tests.support.rollout_functions"


@pytest.fixture
def bench(new_bench: NewBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NewBench:
    """``bench("function")``: at work with that eval function of `tests.support.rollout_functions`, and two sets."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    async def make(function: str, **sections: dict[str, Any]) -> Bench:
        sets = [{"name": name, "path": f"{name}.jsonl", "n_samples_per_eval_prompt": 2} for name in ("heldout", "words")]
        evaluation = {"sets": sets, "eval_function_path": f"{FUNCTIONS}.{function}", **sections.pop("eval", {})}
        return await new_bench(eval=evaluation, **sections)

    return make


async def results(desk: Bench, count: int) -> dict[str, EvalResult]:
    """What the buffer is told next, by the ids of the sets' first prompts, in order."""
    told = [await desk.outcome() for _ in range(count)]
    assert all(isinstance(one, Evaluated) and (one.attempt, one.by) == (0, "rollout-1") for one in told)
    return {one.group: one.result for one in told if isinstance(one, Evaluated)}


async def nothing_is_left(desk: Bench) -> None:
    queue = WorkQueue(desk.service.bus, task_consumer(desk.service.run, desk.service.config.bus, EVAL), Evaluate)

    async def empty() -> bool:
        return not any(await queue.depth())

    await until(empty, "an empty queue", 120)


async def test_a_rollout_function_evaluates_beside_training(bench: NewBench, tmp_path: Path) -> None:
    rollout = {"rollout_function_path": f"{FUNCTIONS}.evaluates", "rollout_batch_size": 2, "n_samples_per_prompt": 2}
    log = {"custom_eval_rollout_log_function_path": f"{FUNCTIONS}.logs_evaluation"}
    desk = await bench("evaluates", eval={"eval_function_path": None}, rollout=rollout, monitoring=log)
    await desk.evaluation()
    await desk.task("g00000000")
    found = await results(desk, 3)
    assert list(found) == ["eval.own.0.0", "eval.heldout.0.0", "eval.words.0.0"], "the run's own sets end the evaluation"
    one = found["eval.heldout.0.0"]
    assert (one.dataset, one.oldest, one.newest, one.prompts, one.samples, one.failed) == ("heldout", 0, 0, 2, 4, 0)
    assert (one.mean_reward, one.truncated, one.lengths["mean"], one.lengths["max"]) == (0.5, 0.25, TOKENS, TOKENS)
    assert one.rates == {"pass@1": 0.5, "pass@2": 1.0, "pass^1": 0.5, "pass^2": 0.0} and not one.logged
    own = found["eval.own.0.0"]
    assert (own.prompts, own.samples, own.lengths, own.rates.keys()) == (3, 3, {}, {"pass@1", "pass^1"})
    assert one.metrics.keys() == {"eval/rollout", "eval/pid"} and one.metrics["eval/rollout"] == 0
    await desk.serve(1)
    await desk.evaluation(1)
    later = await results(desk, 3)
    assert all(result.logged and (result.oldest, result.newest) == (1, 1) for result in later.values())
    assert later["eval.heldout.1.0"].metrics == one.metrics, "the same process, after training step 0"
    await desk.task("g00000001")  # the rollout that waits for its second group has been in progress meanwhile
    groups = [await desk.generated() for _ in range(2)]
    assert {group.group for group, _ in groups} == {"g00000000", "g00000001"}
    rewards = {"heldout": [[0.0, 1.0, 0.0, 1.0], 4], "words": [[0.0, 1.0, 0.0, 1.0], 4], "own": [[0.5, 1.0, 1.0], 0]}
    lines = [json.loads(line) for line in (tmp_path / "logged").read_text().splitlines()]
    assert lines == [[0, 2, rewards, ["eval/pid", "eval/rollout", "note"]]] * 2, "slime's arguments; version 1 has the first step in it"
    await nothing_is_left(desk)


@pytest.mark.extra
async def test_what_does_not_fit_is_said_of_every_set_of_the_run(bench: NewBench) -> None:
    desk = await bench("evaluates_strangely", bus={"max_deliver": 2})
    await desk.evaluation()
    found = await results(desk, 3)
    assert list(found) == ["eval.other.0.0", "eval.heldout.0.0", "eval.words.0.0"]
    assert found["eval.other.0.0"].mean_reward == 1.0
    field = "eval.eval_function_path = tests.support.rollout_functions.evaluates_strangely"
    assert {found[f"eval.{name}.0.0"].reason for name in ("heldout", "words")} == {f"{field}: it gave no set of this name; it gave other"}
    await desk.serve(2)
    for version, reason in (
        (2, "data['heldout']['rewards'][1]: a reward is 'good'; expected a finite number"),
        (3, "tests/support/rollout_functions.py:N, in evaluates_strangely: RuntimeError: no search server; it failed 2 times"),
    ):
        await desk.serve(version)
        await desk.evaluation(version)
        found = await results(desk, 2)
        assert {(one.samples, re.sub(r"\.py:\d+", ".py:N", one.reason)) for one in found.values()} == {(0, f"{field}: {reason}")}
    await nothing_is_left(desk)


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.extra)])
async def test_a_replica_that_gets_a_version_late_leaves_it_to_others_or_is_the_last(
    bench: NewBench, monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    desk = await bench("evaluates", bus={"max_deliver": 2})
    waited, wait = list[float](), desk.rollout.replica.wait_serving
    if others:  # which were as late
        monkeypatch.setattr(desk.replica, "lags", lambda _: False)

    async def wait_serving(version: int, seconds: float) -> EngineClient:
        waited.append(seconds)
        return await wait(version, min(seconds, 0.1 if len(waited) < 3 else seconds))

    monkeypatch.setattr(desk.rollout.replica, "wait_serving", wait_serving)
    await desk.evaluation(2)
    if others:
        await until(lambda: len(waited) == 3, "its last delivery", 60)
        assert waited[0] == waited[1] == VERSION_SECONDS < waited[2]
    else:
        await until(lambda: desk.replica.lags(EVAL), "the end of its patience", 60)
        await asyncio.sleep(RETRY_SECONDS + FETCH_SECONDS + 0.5)
        assert waited == [VERSION_SECONDS], "no delivery is spent"
    await desk.serve(2)
    assert (await results(desk, 3))["eval.heldout.2.0"].samples == 4
    await nothing_is_left(desk)


@pytest.mark.extra
async def test_a_function_that_is_killed_is_called_again_and_a_late_one_is_killed(bench: NewBench) -> None:
    desk = await bench("evaluates_in_its_second_life")
    await desk.evaluation()
    found = await results(desk, 2)
    assert found["eval.heldout.0.0"].mean_reward == 0.5 and found["eval.heldout.0.0"].prompts == 1
    assert (found["eval.heldout.0.0"].oldest, found["eval.heldout.0.0"].newest) == (0, 0), "what was served, as no sample says so"
    pool = desk.rollout.evaluator._pool
    assert not pool.processes, "its second call was made alone, in a process that ended with it"
    await desk.serve(2)
    await desk.evaluation(2, seconds=10.0)
    [process] = await until(lambda: pool.processes, "the process of the call that will be late", 120)
    await nothing_is_left(desk)
    assert not process.running() and not pool.processes
    await desk.evaluation(0, seconds=240.0)  # of an older version than is served
    again = await results(desk, 2)
    assert (again["eval.heldout.0.0"].oldest, again["eval.heldout.0.0"].newest) == (0, 2)
    assert os.getpid() != process.pid


EVALUATED = "eval.heldout.00000000.00000003"
SETS = {"eval_prompt_data": {"heldout": "heldout.jsonl"}, "eval_interval": 4}


@pytest.mark.parametrize("evaluates", [True, pytest.param(False, marks=pytest.mark.extra)])
async def test_each_fleet_leaves_the_others_prompts_alone(new_bench: NewBench, monkeypatch: pytest.MonkeyPatch, evaluates: bool) -> None:
    monkeypatch.setenv(EVAL_VARIABLE, "1" if evaluates else "0")
    bench = await new_bench(rollout={"rollout_replicas": 2, "eval_replicas": 1}, eval=SETS)
    assert bench.rollout._slots._trains is not evaluates
    own, others = ("eval.heldout.00000000.0000000{}", "g0000000{}")[:: 1 if evaluates else -1]
    for number in range(3):  # the others' come first each time
        await bench.task(others.format(number))
        await bench.task(own.format(number))
        group, _ = await bench.generated()
        assert group.group == own.format(number)
    assert not bench.rollout.running
    assert bench.service.status().gauges["eval_replica"] == float(evaluates)


def test_the_last_replicas_evaluate_and_a_variable_that_nothing_reads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for own in ({"rollout_replicas": 3}, {"engine_groups": [{"replicas": 2}, {"replicas": 1}]}):
        config = run_config(tmp_path, rollout={**own, "eval_replicas": 1}, eval=SETS)
        for spec in [spec for spec in plan(config, "nats://host:1") if spec.service == "rollout"]:
            monkeypatch.setenv("MYXO_INSTANCE", spec.instance)
            of_group = engine_of(config, spec.instance)[1]
            assert evaluates(of_group) is (spec.instance == "rollout-2") and RequestSlots.of(of_group).slots
    monkeypatch.setenv(EVAL_VARIABLE, "0")
    assert evaluates(config) is False
    monkeypatch.setenv(EVAL_VARIABLE, "1")
    assert evaluates(config) is True
    with pytest.raises(ConfigError, match="eval_replicas = 0"):
        evaluates(run_config(tmp_path))


def test_fleets_that_nothing_would_use_are_refused(tmp_path: Path) -> None:
    for rollout, sets, words in (
        ({"eval_replicas": 1}, SETS, "fewer than rollout_replicas = 1"),
        ({"eval_replicas": 1, "rollout_replicas": 2}, {}, "does not both train and evaluate"),
    ):
        with pytest.raises((ConfigError, ValueError), match=words):
            run_config(tmp_path, rollout=rollout, eval=sets)
