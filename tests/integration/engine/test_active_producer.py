"""A rollout function in a run of several replicas: one runs it, the engines of all work for it, and another takes over when it ends."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from shared.bus.leader_lease import LeaderLease, LeaseTiming
from shared.bus.subjects import PRODUCER
from shared.runtime.tasks import cancelled
from shared.schema.messages import Generated
from tests.integration.engine.bench import Bench, NewBench
from tests.integration.engine.test_producer import given
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)


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
    usurper._revision = (await usurper._read())[0]
    assert await usurper._swap()  # as if the first one's had run out
    await until(lambda: first.rollout.producer.held == 0, "a group that went back", 120)
    assert not first.producing.done(), "it stands by"
    await usurper.release()
    await given(first, 1)
    assert await handed_in(first, 2) == Counter({"g00000000": 1, "g00000001": 1})
