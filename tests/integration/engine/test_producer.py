"""A rollout function in slime's manner as a producer, over real servers and a real engine, and in a run of several replicas."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest

from services.rollout.in_flight import Stopped
from shared.bus.leader_lease import LeaderLease, LeaseTiming, read_lease
from shared.bus.subjects import PRODUCER, TRAIN
from shared.hooks import HookFailed
from shared.runtime.errors import ConfigError
from shared.runtime.tasks import cancelled
from shared.schema.messages import Discarded, Evaluated, Failed, Generated, Interrupted, Wanted
from shared.schema.sample import Sample
from tests.integration.engine.bench import PROMPT, Bench, NewBench
from tests.integration.engine.conftest import Checkpoints
from tests.integration.engine.reference import log_probs
from tests.support.rollout_functions import TOKENS
from tests.support.run_config import write_jsonl
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)


EXACT = 1e-5


@pytest.fixture
def bench(new_bench: NewBench) -> NewBench:
    """``bench("function")``: at work with that function of `tests.support.rollout_functions`."""

    async def make(function: str, **sections: dict[str, Any]) -> Bench:
        rollout = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, **sections.pop("rollout", {})}
        return await new_bench(rollout={"rollout_function_path": f"tests.support.rollout_functions.{function}", **rollout}, **sections)

    return make


async def generated(desk: Bench, count: int) -> dict[str, tuple[Generated, list[Sample]]]:
    """The next groups that are passed on to scoring, by their ids."""
    return {group.group: (group, samples) for group, samples in [await desk.generated() for _ in range(count)]}


async def given(desk: Bench, *numbers: int, **changes: Any) -> None:
    for number in numbers:
        await desk.task(f"g{number:08d}", **changes)


async def test_groups_come_with_their_rewards_log_probs_and_versions(bench: NewBench, checkpoint: Checkpoints) -> None:
    desk = await bench("rewarded")
    await given(desk, 4, 5)
    found = await generated(desk, 2)
    assert set(found) == {"g00000004", "g00000005"}
    for name, (group, samples) in found.items():
        assert (group.attempt, group.rollouts, group.replica, [meta.tokens for meta in group.samples]) == (0, (), "rollout-1", [TOKENS] * 2)
        for index, one in enumerate(samples):
            number = 2 * int(name[1:]) + index
            assert one.given_reward == {"score": float(number), "rollout": 2.0}, "rollout 2 has the groups 4 and 5"
            assert (one.index, one.rollout, one.label, one.metadata, one.segments) == (index, index, "42", {"level": 3}, [(0, TOKENS, 0)])
            assert one.prompt.tolist() == PROMPT.tolist() and one.mask.all() and one.problem() is None
            assert np.abs(log_probs(checkpoint(0).model, PROMPT, one.response) - one.log_probs).max() < EXACT
    await desk.serve(1)
    await given(desk, 6, 7, min_version=1, label="[1, 2]", label_json=True)
    later = await generated(desk, 2)
    assert {(one.label, one.label_json) for _, samples in later.values() for one in samples} == {("[1, 2]", True)}
    assert {one.segments[0][2] for _, samples in later.values() for one in samples} == {1}
    await until(lambda: desk.rollout.producer.held == 0, "all leases ended")

    def shown() -> bool:
        exposed = generate_latest(desk.service.metrics.registry).decode()
        return re.search(r'myxo_rollout_function\{.*metric="rollouts".*\} 4.0', exposed) is not None

    await until(shown, "the metrics of the last call")


async def test_the_older_form_and_samples_that_are_scored_later(bench: NewBench) -> None:
    desk = await bench("older_form")
    await given(desk, 0, 1)
    found = await generated(desk, 2)
    assert all(one.given_reward is None for _, samples in found.values() for one in samples)


async def test_what_comes_back_without_a_token_does_not_turn_for_ever(bench: NewBench) -> None:
    desk = await bench("skips")
    await given(desk, 0, 1)
    [(group, _)] = (await generated(desk, 1)).values()
    assert [meta.tokens for meta in group.samples] == [TOKENS, 0]
    failed = await desk.outcome()
    assert isinstance(failed, Failed) and failed.group != group.group and "without a token or a status" in failed.reason


@pytest.mark.parametrize("function", ["particular", pytest.param("particular_on_a_loop", marks=pytest.mark.extra)])
async def test_what_a_function_filters_out_is_dropped_and_replaced(bench: NewBench, function: str) -> None:
    desk = await bench(function)
    await given(desk, 0, 1)
    wanted = await desk.outcome()
    assert isinstance(wanted, Wanted) and wanted.count == 1, "it cannot end, for it has finished all that it drew"
    await given(desk, 2)
    assert set(await generated(desk, 2)) == {"g00000000", "g00000002"}
    discarded = await desk.outcome()
    assert discarded == Discarded(group="g00000001", attempt=0, reason="the rollout function did not hand it in", by="rollout-1")


async def test_what_is_given_back_goes_on_with_its_tokens(bench: NewBench) -> None:
    desk = await bench("gives_one_back")
    await given(desk, 0, 1)
    [(_, (first, _))] = (await generated(desk, 1)).items()
    back = await desk.outcome()
    assert isinstance(back, Interrupted) and not back.stale and back.payload is not None
    assert {first.group, back.group} == {"g00000000", "g00000001"}
    assert back.payload.tokens == (len(PROMPT) + 2, len(PROMPT))
    await given(desk, int(back.group[1:]), attempt=1, partial=back.payload)
    await given(desk, 2)
    found = await generated(desk, 1)
    again = await desk.outcome()
    assert isinstance(again, Interrupted) and {*found, again.group} == {back.group, "g00000002"}
    if back.group in found:
        group, samples = found[back.group]
        assert group.attempt == 1 and [len(one.response) for one in samples] == [2 + TOKENS, TOKENS]
        assert [one.attributes.get("searches") for one in samples] == [["kim"], None], "what the function keeps on a sample comes again"


async def test_a_killed_function_loses_no_group(bench: NewBench, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    desk = await bench("is_killed")
    await given(desk, 0, 1)
    assert set(await generated(desk, 2)) == {"g00000000", "g00000001"}


@pytest.mark.extra
async def test_a_function_that_hangs_is_killed(bench: NewBench, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    desk = await bench("hangs", rollout={"generate_timeout": 5.0})
    await given(desk, 0, 1)
    assert set(await generated(desk, 2)) == {"g00000000", "g00000001"}


@pytest.mark.extra
async def test_a_function_that_always_fails_ends_the_service_with_its_words(bench: NewBench) -> None:
    desk = await bench("fails", bus={"max_deliver": 20})
    await given(desk, 0)
    words = r"rollout\.rollout_function_path = .*fails: RuntimeError: no search server; it failed 5 times in a row"
    with pytest.raises(HookFailed, match=words):
        await asyncio.wait_for(desk.producing, 240)


async def test_a_function_that_is_not_there_is_refused(bench: NewBench) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.rollout_function_path"):
        desk = await bench("nobody")
        await asyncio.wait_for(desk.producing, 240)


async def test_a_group_that_does_not_fit_costs_itself(bench: NewBench) -> None:
    desk = await bench("strange")
    await given(desk, 0, 1)
    assert len(await generated(desk, 1)) == 1
    failed = await desk.outcome()
    assert isinstance(failed, Failed) and "rollout_log_probs is missing" in failed.reason


async def test_one_rollout_may_give_several_samples(bench: NewBench) -> None:
    desk = await bench("fanned_out")
    await given(desk, 0)
    [(group, samples)] = (await generated(desk, 1)).values()
    assert group.rollouts == (0, 0, 1, 1)
    assert [one.metadata for one in samples] == [{"level": 3}, {"part": 2}] * 2


async def test_a_pool_in_the_background_goes_on_between_rollouts(bench: NewBench) -> None:
    desk = await bench("in_the_background")
    await given(desk, *range(7))
    found = await generated(desk, 6)
    assert len(found) == 6, "three rollouts"
    assert desk.rollout.producer.held == 1, "the seventh group waits for the next rollout, and is not taken for discarded"


@pytest.mark.extra
async def test_a_function_outlives_its_engine_and_a_store_that_is_away_for_long(bench: NewBench, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = await bench("rewarded", rollout={"generate_timeout": 8.0})
    replica, store, written, away = desk.replica, desk.service.store, list[bool](), [True]
    wait, write = replica.wait_serving, store.write

    async def engine(min_version: int, deadline: float) -> Any:
        if away and away.pop():
            raise Stopped("work on an external engine that is away", stale=False)
        return await wait(min_version, deadline)

    async def slow(blobs: Mapping[str, bytes], deadline: float | None = None) -> None:
        await asyncio.sleep(0 if written else 11.0)
        await write(blobs, deadline)
        written.append(True)

    monkeypatch.setattr(replica, "wait_serving", engine)
    monkeypatch.setattr(store, "write", slow)
    await given(desk, 0, 1)
    assert set(await generated(desk, 2)) == {"g00000000", "g00000001"}
    assert len(written) == 2 and not desk.producing.done() and not desk.rollout.producer._failures


@pytest.mark.extra
async def test_a_function_gets_nothing_where_its_replica_lags(bench: NewBench) -> None:
    desk = await bench("rewarded", rollout={"generate_timeout": 8.0})
    await given(desk, 0, min_version=2)
    await until(lambda: desk.replica.lags(TRAIN), "the end of its patience", 120)
    await asyncio.sleep(1.5)  # a fetch that had begun before is over
    await given(desk, 1, min_version=2)
    await asyncio.sleep(0.5)
    assert desk.rollout.producer.held == 0
    await desk.serve(2)
    assert set(await generated(desk, 2)) == {"g00000000", "g00000001"}


@pytest.fixture
def pair(new_bench: NewBench) -> Any:
    """``pair("function")``: two replicas of a run with that function of `tests.support.rollout_functions`, the first of which runs it."""

    async def make(function: str) -> tuple[Bench, Bench]:
        path = f"tests.support.rollout_functions.{function}"
        sections: dict[str, Any] = {
            "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_function_path": path},
            "bus": {"lease_duration": 2.0, "registry_ttl": 600.0},
        }
        first = await new_bench(**sections)
        await until(lambda: first.rollout.spread.address, "the address of the first one's function", 120)
        return first, await new_bench(instance="rollout-2", **sections)

    return make


async def handed_in(desk: Bench, count: int) -> Counter[str]:
    """The next groups that are passed on to scoring, by any replica."""
    found: Counter[str] = Counter()
    for _ in range(count):
        group, samples = await desk.generated()
        assert isinstance(group, Generated) and all(one.problem() is None for one in samples)
        found[group.group] += 1
    return found


@pytest.mark.extra
async def test_one_replica_runs_it_and_all_engines_work_for_it(pair: Any) -> None:
    first, second = await pair("rewarded")
    await until(lambda: first.rollout.spread.engines == 2, "the other replica's door", 60)
    await given(first, *range(4))
    assert await handed_in(first, 4) == Counter(f"g{number:08d}" for number in range(4))
    sent = first.rollout.spread.sent
    assert len(sent) == 2 and sum(sent.values()) == 8 and min(sent.values()) >= 2, "eight samples, over both doors"
    assert second.rollout.spread.address is None and second.rollout.producer.held == 0
    await second.replica.fence("a push failed")
    await until(lambda: first.rollout.spread.engines == 1, "a registry without the fenced one", 60)
    before = Counter(sent)
    await given(first, 4, 5)
    await handed_in(first, 2)
    assert len(sent - before) == 1, "only the one that serves"


async def test_another_takes_over_and_no_group_is_lost_or_comes_twice(pair: Any) -> None:
    first, second = await pair("rewarded")
    await given(first, 0)  # of a batch of two: the first one's function waits with it
    await until(lambda: first.rollout.producer.held == 1, "a group in its hands", 120)
    await cancelled([first.producing])  # as when its process ends
    await given(first, 1)
    assert await handed_in(second, 2) == Counter({"g00000000": 1, "g00000001": 1})
    assert first.rollout.producer.held == 0 and second.rollout.spread.address is not None
    first.producing = asyncio.create_task(first.rollout.produce())
    first.working.append(first.producing)
    await given(first, 2, 3)
    assert await handed_in(second, 2) == Counter({"g00000002": 1, "g00000003": 1})
    assert first.rollout.producer.held == 0, "who comes back stands by"


async def test_who_loses_the_lease_gives_back_what_it_has(pair: Any) -> None:
    """As one that was cut off, and comes back when another is active: it hands nothing in any more."""
    first, second = await pair("rewarded")
    await cancelled([second.producing])
    await given(first, 0)
    await until(lambda: first.rollout.producer.held == 1, "a group in its hands", 120)
    service = second.service
    usurper = LeaderLease(service.bus, service.run, PRODUCER, "rollout-2", LeaseTiming(2.0))
    usurper._revision = (await read_lease(service.bus, service.run, PRODUCER, 5.0))[0]
    assert await usurper._swap()  # as if the first one's had run out
    await until(lambda: first.rollout.producer.held == 0, "a group that went back", 120)
    assert not first.producing.done(), "it stands by"
    await usurper.release()
    await given(first, 1)
    assert await handed_in(first, 2) == Counter({"g00000000": 1, "g00000001": 1})


FUNCTIONS = "tests.support.rollout_functions"


@pytest.mark.extra
async def test_filters_see_a_whole_batch_and_sets_are_evaluated(
    new_bench: NewBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    heldout = write_jsonl(tmp_path / "heldout.jsonl", [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(3)])
    desk = await new_bench(
        rollout={
            "rollout_function_path": "shared.hooks.slime.rollout_loop.generate_rollout",
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 5,
            "dynamic_sampling_filter_path": f"{FUNCTIONS}.keeps_even",
            "rollout_sample_filter_path": f"{FUNCTIONS}.removes_the_first",
            "rollout_all_samples_process_path": f"{FUNCTIONS}.sees_all",
        },
        eval={"sets": [{"name": "sums", "path": f"{heldout}@[1:]", "n_samples_per_eval_prompt": 2, "max_response_len": 3}]},
        reward={"rm_type": "exact"},
    )
    await given(desk, 0, 1)
    wanted = await desk.outcome()
    assert isinstance(wanted, Wanted), "the dynamic filter drops one of the two"
    await given(desk, 2)
    [(_, (first, second))] = (await generated(desk, 1)).values()
    assert (first.group, first.mask.any(), second.mask.all(), second.given_reward) == ("g00000002", False, True, 0.0)
    assert json.loads((tmp_path / "seen").read_text()) == [[number, [0.0, 0.0]] for number in range(3)]
    ended = {one.group: one.reason for one in [await desk.outcome(), await desk.outcome()] if isinstance(one, Discarded)}
    assert ended == {"g00000000": "every sample of it was removed", "g00000001": "the rollout function did not hand it in"}
    await desk.evaluation()
    evaluated = await desk.outcome()
    assert isinstance(evaluated, Evaluated) and evaluated.result.dataset == "sums"
    result = evaluated.result
    assert (result.prompts, result.samples, result.reason, result.mean_reward) == (2, 4, "", 0.0)
    assert result.lengths["max"] <= 3 and (result.oldest, result.newest) == (0, 0) and result.truncated > 0
