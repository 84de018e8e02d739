"""A replica that shares its device with a trainer: it sleeps while the trainer has its turn, and loses nothing."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from services.rollout.engine.engine_client import EVERYTHING, WEIGHTS, EngineClient
from services.rollout.engine.generation import GenerationRequest
from shared.config import devices
from shared.schema import sample
from shared.schema.messages import Interrupted, Sampling
from shared.schema.weight_messages import WeightsAsleep, WeightsReady, WeightsSleep, WeightsWake
from tests.integration.engine.bench import PROMPT, Bench, NewBench
from tests.integration.engine.conftest import Checkpoints
from tests.integration.engine.load import LONG, asked, load, weights_state
from tests.integration.engine.reference import log_probs
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

EXACT = 1e-4
SAMPLES = 32
COLOCATED: dict[str, Any] = {"trainer": {"colocate": True, "train_device": "cpu"}, "rollout": {"rollout_device": "cpu", "max_staleness": 9}}
LONG_TASK: dict[str, Any] = {"n": SAMPLES, "sampling": Sampling(temperature=1.0, max_new_tokens=LONG, stop_token_ids=[])}
MINUTES = 240.0


@pytest.fixture
async def desk(new_bench: NewBench) -> AsyncIterator[Bench]:
    """A replica that serves version 0 and shares its device."""
    desk = await new_bench(**COLOCATED)
    yield desk
    if desk.replica.served.asleep:
        await desk.ask("wake", WeightsWake(deadline=MINUTES), WeightsReady)


async def sleep(desk: Bench, lasts: float = MINUTES) -> WeightsAsleep:
    return await desk.ask("sleep", WeightsSleep(lasts=lasts, deadline=MINUTES), WeightsAsleep)


async def test_what_was_running_waits_for_the_turns_end_and_goes_on_from_its_tokens(desk: Bench, checkpoint: Checkpoints) -> None:
    """Tokens of both sides of the turn, in one group, with the log-probs that the model has for the whole."""
    for number in range(5):
        if await desk.in_decode(f"g{number:08d}", **LONG_TASK):
            asleep = await sleep(desk)
            if desk.rollout.running:
                break
            await desk.ask("wake", WeightsWake(deadline=MINUTES), WeightsReady)
        await desk.generated()  # it was over before the engine could be asked
    else:
        raise AssertionError("five groups in a row were over before the engine could be asked")
    assert asleep == WeightsAsleep(replica="rollout-1", version=0)
    assert not desk.replica.serving
    assert desk.service.state == "asleep"
    assert desk.client.generating == 0
    await asked(desk.client, "POST", "/flush_cache")  # which the engine refuses while a request is in it
    await desk.client.resume()  # as a push that is broken off does: an engine that is asleep stays so
    late = asyncio.create_task(
        desk.client.generate_group([GenerationRequest(tokens=PROMPT, max_new_tokens=2)], Sampling(temperature=1.0, max_new_tokens=2))
    )
    await asyncio.sleep(0)
    assert await sleep(desk) == asleep, "asked again, it stays as it is"
    assert not late.done()
    await desk.client.set_weight_version(1)  # as a push in the trainer's turn does
    await desk.replica.serve(1)
    assert not desk.replica.serving
    awake = await desk.ask("wake", WeightsWake(deadline=MINUTES), WeightsReady)
    assert awake.version == 1
    assert desk.service.state == "ready"
    assert len((await late)[0].tokens) >= 1
    _, samples = await desk.generated()
    assert len(samples) == SAMPLES
    assert any(len(one.segments) == 2 for one in samples), "no sample has tokens of before and after"
    for one in samples:
        assert [version for _, _, version in one.segments] in ([0], [1], [0, 1])
        reference = log_probs(checkpoint(0).model, one.prompt, one.response)
        np.testing.assert_allclose(one.log_probs, reference, atol=EXACT)


@pytest.mark.parametrize("function", ["", "benchmarks.end_to_end.drawn_length:generate"], ids=["engine", "function"])
async def test_a_lent_replica_hands_its_groups_on_with_their_tokens(function: str, new_bench: NewBench) -> None:
    """Others continue them, and it takes groups again when the GPU is lent the next time."""
    rollout: dict[str, Any] = {"rollout_device": "cpu", "max_staleness": 9, "staleness_policy": "continue"}
    rollout |= {"custom_generate_function_path": function, "generate_workers": 1} if function else {}
    desk = await new_bench(trainer={"lend_gpus": True, "train_device": "cpu"}, rollout=rollout)
    assert desk.service.config.trainer.lent
    await desk.task(**LONG_TASK, metadata={"lengths": [LONG]})

    async def generates() -> bool:
        return (await load(desk.client)).used_tokens > len(PROMPT) + 2 * SAMPLES

    await until(generates, "tokens", MINUTES)
    assert await sleep(desk) == WeightsAsleep(replica="rollout-1", version=0)
    given = await desk.outcome()
    assert isinstance(given, Interrupted) and given.payload is not None and not given.stale
    samples = sample.decode(await desk.service.store.read(given.payload))
    assert (function or len(samples) == SAMPLES) and any(one.finish == "abort" and len(one.response) for one in samples)
    await until(lambda: not desk.rollout.running, "no group in hand", MINUTES)
    assert (await desk.ask("wake", WeightsWake(deadline=MINUTES), WeightsReady)).version == 0
    await desk.task("g00000009", metadata={"lengths": [4]})
    assert (await desk.generated())[0].group == "g00000009"


async def test_a_replica_whose_trainer_falls_silent_wakes_and_goes_on_with_what_it_has(desk: Bench) -> None:
    assert (await sleep(desk, lasts=0.2)).version == 0
    await until(lambda: desk.replica.serving, "a replica that has woken", MINUTES)
    assert not desk.replica.served.asleep
    await desk.task()
    _, samples = await desk.generated()
    assert samples[0].segments[0][2] == 0


async def test_each_word_of_the_trainer_counts_from_when_it_was_said(desk: Bench) -> None:
    await sleep(desk, lasts=0.3)
    await sleep(desk, lasts=MINUTES)
    await asyncio.sleep(0.5)  # the first one's time is over
    assert desk.replica.served.asleep
    await sleep(desk, lasts=0.1)
    await until(lambda: desk.replica.serving, "a replica that has woken", MINUTES)


async def test_weights_that_went_with_the_memory_come_back_by_a_push_only(new_bench: NewBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is told to release its memory as on a GPU; on a CPU it keeps it, so that only the protocol is seen here."""
    monkeypatch.setattr(devices, "engines_release", lambda config: True)
    desk = await new_bench(**COLOCATED)
    await desk.client.adopt(0, {})
    assert (await sleep(desk)).version == -1
    assert (await weights_state(desk.client)).version == -1
    occupation = desk.client.memory
    assert occupation.released == set(EVERYTHING)
    assert (await desk.ask("wake", WeightsWake(deadline=MINUTES), WeightsReady)).version == -1
    assert not desk.replica.serving
    assert desk.service.state == "fenced"
    assert occupation.released == set(EVERYTHING), "an engine without weights takes no memory"
    await desk.rollout.weights.colocation.make_room(MINUTES)
    assert occupation.released == set(EVERYTHING) - {WEIGHTS}
    await desk.client.set_weight_version(3)
    await desk.replica.serve(3)
    assert desk.replica.serving
    assert not occupation.released
    await desk.task()
    _, samples = await desk.generated()
    assert samples[0].segments[0][2] == 3


async def test_an_engine_ends_what_it_is_asked_to_and_takes_new_requests_once_it_is_awake(client: EngineClient) -> None:
    sampling = Sampling(temperature=1.0, max_new_tokens=LONG, stop_token_ids=[])
    requests = [GenerationRequest(tokens=PROMPT, max_new_tokens=LONG, ignore_eos=True) for _ in range(4)]
    running = asyncio.create_task(client.generate_group(requests, sampling))

    async def drawn() -> bool:
        return (await load(client)).used_tokens > len(PROMPT) + 8

    await until(drawn, "tokens", MINUTES)
    await client.memory.sleep((), deadline=MINUTES)
    stopped = await running
    assert {one.finish for one in stopped} == {"abort"}
    assert all(len(one.tokens) for one in stopped)
    await client.memory.wake(deadline=MINUTES)
    [after] = await client.generate_group([GenerationRequest(tokens=PROMPT, max_new_tokens=3, ignore_eos=True)], sampling)
    assert len(after.tokens) == 3
