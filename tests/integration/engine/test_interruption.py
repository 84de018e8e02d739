"""Groups that are stopped in the middle: for their age, and because their replica leaves; and those that continue where another ended."""

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from shared.bus.bus_errors import RequestRefused
from shared.bus.subjects import EVAL, TRAIN
from shared.bus.work_queue import FETCH_SECONDS
from shared.process.embedded_servers import EmbeddedValkey
from shared.runtime.addresses import LOOPBACK
from shared.schema import sample
from shared.schema.digests import reference
from shared.schema.messages import Interrupted, Payload, Sampling
from shared.schema.sample import Sample
from shared.schema.weight_messages import WeightsCommit, WeightsOffer, WeightsReady
from shared.service import service_base
from tests.integration.engine.bench import PROMPT, Bench, NewBench
from tests.integration.engine.conftest import Checkpoints
from tests.integration.engine.load import LONG, load
from tests.integration.engine.reference import log_probs
from tests.integration.engine.source import Source
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

EXACT = 1e-4


SAMPLES = 32
"""Of a group: about one token in a hundred ends a sample, and a group of fewer might be over before it is stopped."""


LONG_TASK: dict[str, Any] = {"n": SAMPLES, "sampling": Sampling(temperature=1.0, max_new_tokens=LONG, stop_token_ids=[])}


async def caught(desk: Bench) -> str:
    """Has a group generated until its engine, paused in place, is in the middle of it. Returns its id."""
    for number in range(7, 12):
        group = f"g{number:08d}"
        if await desk.in_decode(group, **LONG_TASK):
            await desk.client.pause("in_place")
            if (await load(desk.client)).running:
                return group
            await desk.client.resume()
        await desk.generated()  # a test process that was kept waiting came too late
    raise AssertionError("five groups in a row were over before they were seen in the middle")


async def push(desk: Bench, version: int) -> None:
    """What generations of a paused engine see of a push."""
    await desk.client.set_weight_version(version)
    await desk.client.resume()
    await desk.replica.serve(version)


def stored(payload: Payload | None) -> Payload:
    assert payload is not None
    return payload


@pytest.mark.parametrize(("policy", "stopped"), [("drop", True), ("mask", False), pytest.param("continue", False, marks=pytest.mark.extra)])
async def test_a_generation_over_the_bound_is_stopped_where_nothing_of_it_would_be_trained(
    new_bench: NewBench, policy: str, stopped: bool
) -> None:
    desk = await new_bench(rollout={"max_staleness": 0, "staleness_policy": policy})
    trained = await caught(desk)
    await desk.task(group="eval.heldout.0.0", **LONG_TASK)
    await push(desk, 1)
    if stopped:
        outcome = await desk.outcome()
        assert outcome == Interrupted(group=trained, attempt=0, stale=True, replica="rollout-1")
    groups = {}
    for _ in range(1 if stopped else 2):  # an evaluation continues either way
        group, samples = await desk.generated()
        groups[group.group] = samples
    assert set(groups) == ({"eval.heldout.0.0"} if stopped else {"eval.heldout.0.0", trained})
    for samples in groups.values():
        assert {version for one in samples for _, _, version in one.segments} <= {0, 1}


@pytest.mark.extra
async def test_an_evaluation_is_given_up_at_its_deadline_and_holds_nothing_back(new_bench: NewBench) -> None:
    desk = await new_bench()
    await desk.client.pause("in_place")  # so that nothing ends
    await desk.task(group="eval.heldout.0.0", **LONG_TASK, deadline=time.time() + 2)
    await desk.task(group="eval.heldout.0.1", **LONG_TASK, deadline=time.time() - 1)
    await until(lambda: [task.group for task in desk.rollout.running.values()] == ["eval.heldout.0.0"], "the one that is not late yet")
    await until(lambda: not desk.rollout.running, "its deadline", 60)
    await desk.client.resume()
    await until(lambda: no_load(desk), "the engine without requests", 60)
    await desk.task(group="g00000003")
    group, _ = await desk.generated()
    assert group.group == "g00000003"  # of the two others nobody heard anything


async def no_load(desk: Bench) -> bool:
    return (await load(desk.client)).running == 0


@pytest.mark.extra
async def test_a_replica_that_lags_leaves_tasks_to_others(new_bench: NewBench) -> None:
    desk = await new_bench(rollout={"generate_timeout": 8.0})
    await desk.task("eval.heldout.0.0", min_version=2)
    await until(lambda: desk.replica.lags(EVAL), "the end of its patience", 60)
    await desk.task("g00000006")
    assert (await desk.generated())[0].group == "g00000006", "training prompts are for older versions"
    await desk.task("g00000007", min_version=2)
    await until(lambda: desk.replica.lags(TRAIN), "the end of its patience", 60)
    await asyncio.sleep(FETCH_SECONDS + 0.5)  # a fetch that had begun before is over
    await desk.task("g00000008", min_version=2)
    await asyncio.sleep(0.5)
    assert "g00000008" not in {task.group for task in desk.rollout.running.values()}, "it fetches nothing while it has no newer version"
    await desk.serve(2)
    assert {(await desk.generated())[0].group for _ in range(3)} == {"eval.heldout.0.0", "g00000007", "g00000008"}


@pytest.mark.extra
async def test_what_is_within_the_bound_goes_on(new_bench: NewBench) -> None:
    desk = await new_bench(rollout={"max_staleness": 1})
    await caught(desk)
    await push(desk, 1)
    _, samples = await desk.generated()
    assert all(one.finish in ("stop", "length") for one in samples)
    assert any([version for _, _, version in one.segments] == [0, 1] for one in samples)


async def test_another_replica_goes_on_from_the_tokens_of_one_that_left(new_bench: NewBench, checkpoint: Checkpoints) -> None:
    desk = await new_bench()
    group = await caught(desk)
    await desk.client.resume()
    await desk.rollout.in_flight.leave(desk.client)
    left = await desk.outcome()
    assert isinstance(left, Interrupted) and not left.stale
    parts = sample.decode(await desk.service.store.read(stored(left.payload)))
    assert any(one.finish == "abort" and 0 < len(one.response) < LONG for one in parts), "the engine was not stopped in the middle"

    desk.rollout.in_flight.leaving = False  # as in the next replica
    await desk.task(group=group, attempt=1, partial=left.payload, **LONG_TASK)
    again, samples = await desk.generated()
    assert again.attempt == 1
    for part, one in zip(parts, samples, strict=True):
        assert one.finish in ("stop", "length") and (one.finish == part.finish or part.finish == "abort")
        assert one.response[: len(part.response)].tolist() == part.response.tolist()
        assert np.array_equal(one.log_probs[: len(part.response)], part.log_probs)
        assert np.abs(log_probs(checkpoint(0).model, PROMPT, one.response) - one.log_probs).max() < EXACT


async def test_only_samples_that_nothing_is_left_to_train_of_begin_anew(new_bench: NewBench) -> None:
    desk = await new_bench(rollout={"staleness_policy": "continue"})
    await desk.task(n=3)
    _, samples = await desk.generated()
    samples[0].segments = [(0, len(samples[0].response), 2)]
    old = [one.response.tolist() for one in samples]
    samples[2].finish = "abort"
    had = (len(old[2]) + 1) // 2
    samples[2] = shortened(samples[2], had)
    earlier = {"earlier": sample.encode(samples, 1 << 20)[0]}
    await desk.service.store.write(earlier)
    await desk.serve(3)
    await desk.task(n=3, attempt=1, partial=reference(desk.service.run, earlier), renew_below=2)
    _, again = await desk.generated()
    assert (again[0].response.tolist(), again[0].segments) == (old[0], samples[0].segments)  # within the bound: as it was
    assert {version for _, _, version in again[1].segments} == {3}  # ended, and too old: anew
    assert again[2].response[:had].tolist() == old[2][:had]  # had not ended: continues
    assert [version for _, _, version in again[2].segments] == [0, 3]


async def test_a_group_whose_earlier_samples_are_lost_or_forged_begins_anew(new_bench: NewBench) -> None:
    desk = await new_bench()
    await desk.service.store.write({"forged": b"what stands there"})
    for partial in (reference("", {"nowhere": b"x"}), reference("", {"forged": b"what was announced"})):
        await desk.task(attempt=1, partial=partial)
        group, samples = await desk.generated()
        assert group.attempt == 1 and len(samples) == 2


async def test_a_replica_that_stops_keeps_its_word_and_gives_no_other(
    new_bench: NewBench, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rollout.weight_receiver.AGREED_SECONDS", 60.0)
    desk = await new_bench()
    weights = desk.rollout.weights
    assert await desk.ask("offer", WeightsOffer(version=1)) == WeightsReady(replica="rollout-1", version=0, address=LOOPBACK)
    staying = asyncio.create_task(weights.settled(60))  # for what may follow the answer
    desk.service.stopping.set()
    await asyncio.sleep(0)
    assert not staying.done()
    with pytest.raises(RequestRefused, match="about to stop"):
        await desk.ask("offer", WeightsOffer(version=1))
    source = Source(desk, checkpoint(1).model, 1)
    await source.prepare()
    received = await source.receive()
    assert not staying.done()
    await desk.ask("commit", WeightsCommit(version=1, digest=received.digest, deadline=60))
    await asyncio.wait_for(staying, 60)
    source.leave()
    assert desk.replica.version == 1
    await weights.settled(0)  # nothing to wait for


def shortened(one: Sample, length: int) -> Sample:
    one.response, one.log_probs, one.mask = one.response[:length], one.log_probs[:length], one.mask[:length]
    one.segments = [(0, length, 0)]
    return one


async def test_what_two_replicas_made_of_one_attempt_lies_side_by_side(new_bench: NewBench) -> None:
    """A task whose lease ran out is generated twice; each reference still names the samples that it was made for."""
    desk = await new_bench()
    for _ in range(2):
        await desk.task(n=4)
    made = [await desk.generated() for _ in range(2)]
    assert made[0][0].attempt == made[1][0].attempt
    assert not set(made[0][0].payload.keys) & set(made[1][0].payload.keys)
    for generated, _ in made:
        samples = sample.decode(await desk.service.store.read(generated.payload))
        assert [one.meta() for one in samples] == generated.samples


async def test_a_store_that_is_away_costs_no_group(new_bench: NewBench, valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one whose samples wait to be written, nor one that waits for those that it continues."""
    monkeypatch.setattr(service_base, "SECONDS", 0.1)  # of services that hold no groups
    desk = await new_bench(bus={"max_deliver": 1})
    await desk.task("g00000007")
    group, _ = await desk.generated()
    valkey.stop()
    await desk.task("g00000008")
    await desk.task("g00000009", attempt=1, partial=group.payload)
    await asyncio.sleep(3.0)
    valkey.start()
    assert {(await desk.generated())[0].group for _ in range(2)} == {"g00000008", "g00000009"}
