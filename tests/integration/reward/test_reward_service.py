"""The real reward process over real servers: what it is given comes out scored, or failed with the reason."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import redis

from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.streams import generated_consumer
from shared.bus.work_queue import WorkQueue
from shared.process.embedded_servers import EmbeddedValkey
from shared.schema.digests import reference
from shared.schema.messages import Failed, Generated, Outcome, SampleMeta, Scored
from shared.schema.sample import token_digest
from shared.schema.weight_messages import WeightsLive
from shared.service import service_base
from tests.support.poison import POISON
from tests.support.reward_bench import LIVE, NewBench
from tests.support.run_config import run_config
from tests.support.waiting import until

HANGS = "\\boxed{9^{9^{9^{9}}}}"
"""math-verify computes on this for seconds, until its own limit."""


async def test_groups_are_scored_in_order_and_keep_what_is_known_of_them(bench: NewBench) -> None:
    desk = await bench(reward={"rm_type": "math_verify"})
    process = await desk.launch()
    group = await desk.generated("g00000007", "42", "so \\boxed{84/2}", "41", "")
    outcome = (await desk.outcomes(1))["g00000007"]
    assert isinstance(outcome, Scored)
    assert outcome.rewards == [1.0, 1.0, 0.0, 0.0]
    assert (outcome.payload, outcome.environment) == (group.payload, "math_verify")
    assert [replace(meta, digest=0) for meta in outcome.samples] == group.samples
    assert (outcome.attempt, outcome.replica, outcome.started, outcome.ended) == (0, "replica-1", 1.0, 2.0)
    digest = token_digest(np.array([1]), np.arange(2))
    assert outcome.samples[0] == SampleMeta(tokens=2, oldest=3, newest=3, finish="stop", trained=2, digest=digest)
    assert process.stop() == 0
    assert await Registry(desk.bus, desk.config.run.name).alive() == []


async def test_a_reward_that_a_sample_was_generated_with_counts_in_place_of_scoring(bench: NewBench) -> None:
    desk = await bench(reward={"rm_type": "exact", "reward_key": "score"})
    await desk.serve()
    await desk.generated("g0", "42", "41", "42", given={0: -0.25, 1: {"score": 0.5, "turns": 2}})
    await desk.generated("g1", "42", label=None, given={0: 1})
    await desk.generated("g2", "42", given={0: {"turns": 2.0}})
    outcomes = await desk.outcomes(3)
    mixed, unlabelled, nameless = outcomes["g0"], outcomes["g1"], outcomes["g2"]
    assert isinstance(mixed, Scored) and isinstance(unlabelled, Scored) and isinstance(nameless, Failed)
    assert mixed.rewards == [-0.25, 0.5, 1.0]
    assert mixed.parts == ({}, {"score": 0.5, "turns": 2.0}, {})
    assert unlabelled.rewards == [1.0], "no verifier was asked, which would need a label"
    assert "sample g2/0: the reward that it was generated with: no reward is named score; there are turns" in nameless.reason


TOOL_SAYS = "I do not know. [tool] \\boxed{42} [end] I still do not know."
TURNS = {0: ["I do not know.", "I still do not know."], 1: ["So \\boxed{42}.", "Thank you."]}


@pytest.mark.parametrize(
    ("which", "rewards"),
    [
        ("own", [0.0, 1.0]),
        pytest.param("last_turn", [0.0, 0.0], marks=pytest.mark.extra),
        pytest.param("full", [1.0, 1.0], marks=pytest.mark.extra),
    ],
)
async def test_a_tool_that_prints_the_answer_earns_the_model_nothing(bench: NewBench, which: str, rewards: list[float]) -> None:
    desk = await bench(reward={"scored_text": which, "rm_type": "math"})
    await desk.serve()
    await desk.generated("g0", TOOL_SAYS, "So \\boxed{42}. [tool] ok [end] Thank you.", turns=TURNS)
    outcome = (await desk.outcomes(1))["g0"]
    assert isinstance(outcome, Scored) and outcome.rewards == rewards


@pytest.mark.extra(each=True)
async def test_a_weighted_reward_scores_the_models_own_text_and_shows_a_function_all_of_it(bench: NewBench) -> None:
    function = "tests.support.reward_hooks:turns_and_length"
    weights = {"reward_weights": {"math": 1.0, "custom_rm": 100.0}, "rm_type": "weighted", "custom_rm_path": function}
    desk = await bench(reward=weights)
    await desk.serve()
    await desk.generated("g0", TOOL_SAYS, "\\boxed{42}", turns=TURNS | {1: []})
    outcome = (await desk.outcomes(1))["g0"]
    assert isinstance(outcome, Scored)
    assert [part["math"] for part in outcome.parts] == [0.0, 1.0]
    assert [part["custom_rm"] for part in outcome.parts] == [2 + len(TOOL_SAYS) / 1000, 1 + 10 / 1000]


async def test_a_response_that_is_late_has_0_and_says_why_and_the_right_answer_beside_it_counts(bench: NewBench) -> None:
    desk = await bench(reward={"rm_type": "math_verify", "reward_timeout": 2.0, "reward_workers": 1})
    process = await desk.launch()
    await desk.generated("g00000000", HANGS, "41", "so \\boxed{84/2}", "12 " * 30_000)
    await desk.generated("g00000001", "41", "42")
    outcomes = await desk.outcomes(2)
    late, fine = outcomes["g00000000"], outcomes["g00000001"]
    assert isinstance(late, Scored) and isinstance(fine, Scored)
    assert late.rewards == [0.0, 0.0, 1.0, 0.0]
    [(position, reason)] = late.unread
    assert position == 0 and re.fullmatch(r"verifier math_verify: a response of \d+ characters was not verified within \d\.\d s", reason)
    assert (fine.rewards, fine.unread) == ([0.0, 1.0], ())
    [card] = await Registry(desk.bus, desk.config.run.name).alive("reward")
    async with httpx.AsyncClient() as client:
        metrics = (await client.get(f"http://{card.http}/metrics" if "://" not in card.http else f"{card.http}/metrics")).text
    assert re.search(r'myxo_responses_unread_total\{.*environment="math_verify".*\} 1\.0', metrics)
    assert "12 12" not in process.words()


async def test_what_cannot_be_scored_fails_with_the_reason(bench: NewBench) -> None:
    desk = await bench(reward={"rm_type": "exact"})
    process = await desk.launch()
    await desk.generated("g0", "42", label=None)
    assert "expected the answer that exact compares with" in await desk.failure("g0")
    await desk.generated("g1", "42", payload=reference(desk.names.run, {"never:written": b"1"}))
    assert "the store holds no blob never:written" in await desk.failure("g1")
    await desk.generated("g2", "42", "43", samples=[SampleMeta(tokens=2, trained=2, oldest=3, newest=3, finish="stop")])
    assert "the payload holds 2 samples, its reference 1" in await desk.failure("g2")
    await desk.store.write({"broken": b"garbage"})
    await desk.generated("g3", "42", payload=reference(desk.names.run, {"broken": b"garbage"}))
    assert "that are not MessagePack" in await desk.failure("g3")
    await desk.generated("g4")
    assert "the payload holds no sample" in await desk.failure("g4")
    await desk.generated("g5", "42", environment="given")
    assert "a sample came without a reward, and nothing is named that scores it" in await desk.failure("g5")
    await desk.generated("g6", "42")
    assert isinstance((await desk.outcomes(1))["g6"], Scored)
    assert process.process.poll() is None


async def test_a_payload_that_was_overwritten_is_not_scored(bench: NewBench, valkey: EmbeddedValkey) -> None:
    """The store alone does not say what was announced: not even a valid payload, with other samples, passes for it."""
    desk = await bench(reward={"rm_type": "exact"})
    honest = await desk.generated("g0", "41", "41", environment="nobody")
    await desk.generated("g1", "42", "42", environment="nobody")
    with redis.Redis.from_url(valkey.url) as client:
        client.set(honest.payload.keys[0], client.get(desk.names.payload_key("g1", 0, 0)))
    await desk.bus.publish(desk.names.generated("exact"), honest)
    await desk.serve()
    said = await desk.failure("g0")
    assert re.search(f"payload at {honest.payload.keys[0]} has the digest .* was announced: it was overwritten or damaged", said)
    await desk.generated("g2", "42", payload=honest.payload.model_copy(update={"digest": ""}))
    assert "none was announced" in await desk.failure("g2")


async def test_a_store_that_is_away_costs_no_group(bench: NewBench, valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_base, "SECONDS", 0.1)  # of services that hold no groups
    desk = await bench(reward={"rm_type": "exact"})
    await desk.serve()
    await desk.generated("g0", "42")
    assert isinstance((await desk.outcomes(1))["g0"], Scored)
    write = desk.store.write

    async def write_last(blobs: Mapping[str, bytes]) -> None:
        await write(blobs)
        valkey.stop()

    monkeypatch.setattr(desk.store, "write", write_last)
    await desk.generated("g1", "42")
    await asyncio.sleep(3.0)  # longer than two deliveries took that did not wait
    valkey.start()
    assert isinstance((await desk.outcomes(1))["g1"], Scored)


@pytest.mark.extra(each=True)
async def test_a_sample_that_is_none_costs_its_group_and_says_why(bench: NewBench) -> None:
    desk = await bench(reward={"rm_type": "exact"})
    process = await desk.launch()
    for number, (poison, _) in enumerate(POISON.values()):
        await desk.generated(f"g{number:08d}", "42", "42", poison=poison)
    await desk.generated("fine", "42", "41")
    outcomes = await desk.outcomes(len(POISON) + 1)
    for number, (name, (_, reason)) in enumerate(POISON.items()):
        outcome = outcomes[f"g{number:08d}"]
        assert isinstance(outcome, Failed), name
        assert re.search(reason, outcome.reason), f"{name}: {outcome.reason}"
        assert outcome.payload is not None
    fine = outcomes["fine"]
    assert isinstance(fine, Scored) and fine.rewards == [1.0, 0.0]
    assert process.process.poll() is None and "Traceback" not in process.words()


async def test_a_reference_that_does_not_describe_its_samples_costs_its_group(bench: NewBench) -> None:
    desk = await bench(reward={"rm_type": "exact"})
    await desk.serve()
    await desk.generated("g0", "42", samples=[SampleMeta(tokens=2, trained=2, oldest=4, newest=4, finish="stop")])
    said = await desk.failure("g0")
    assert re.search(r"sample g0/0: its reference says SampleMeta\(.*oldest=4.*, the payload SampleMeta\(.*oldest=3", said)
    sent = await desk.generated("g1", "42", tokens=(7,))
    assert await desk.failure("g1") == "g1: the payload's samples have [3] tokens, by its reference [7]"
    await desk.generated("gx", "42", payload=sent.payload.model_copy(update={"tokens": (-1, 5)}))
    assert "Generated.payload.tokens" in await desk.failure("gx")
    await desk.generated("g2", "42", "42", rollouts=[0, 0])
    assert isinstance((await desk.outcomes(1))["g2"], Scored)
    await desk.generated("g3", "42", "42", rollouts=[0, 0], poison=lambda sample: sample.update(rollout=1))
    assert "come from other rollouts than its reference says" in await desk.failure("g3")


async def test_a_version_is_taken_as_soon_as_it_can_be_served(bench: NewBench) -> None:
    desk = await bench(reward={"rm_type": "exact"}, rollout={"max_staleness": 1})
    await desk.serve()

    async def outcome_of(group: str, version: int) -> Outcome:
        meta = SampleMeta(tokens=2, oldest=version, newest=version, finish="stop", trained=2)
        await desk.generated(group, "42", poison=lambda sample: sample.update(segments=[[0, 2, version]]), samples=[meta])
        return (await desk.outcomes(1))[group]

    assert isinstance(await outcome_of("g0", LIVE + 2), Scored)  # all the steps that groups are admitted for may have been trained
    refused = await outcome_of("g1", LIVE + 3)
    assert isinstance(refused, Failed) and f"version {LIVE + 3}; versions lie between 0 and {LIVE + 2}" in refused.reason
    live = WeightsLive(version=LIVE + 1, replicas=[], seconds=1.0, bytes=1, at=1.0)
    await desk.bus.put(desk.names.weights_bucket, "live", live.encode())
    assert isinstance(await outcome_of("g2", LIVE + 3), Scored)


async def test_no_group_is_scored_where_the_vocabulary_is_not_known(bus: Bus, run_name: str, tmp_path: Path) -> None:
    await runs.create(bus, run_config(tmp_path, run={"name": run_name}), None)
    with pytest.raises(runs.NoSuchRun, match=f"run '{run_name}' is on the bus without its model's vocabulary"):
        await runs.vocabulary(bus, run_name)


async def test_work_that_killed_its_workers_too_often_is_given_up(bench: NewBench) -> None:
    desk = await bench(reward={"rm_type": "exact"}, bus={"max_deliver": 2})
    await desk.generated("g00000000", "42")
    queue = WorkQueue(desk.bus, generated_consumer(desk.config.run.name, desk.config.bus, "exact"), Generated)
    for _ in range(2):
        [lease] = await until(lambda: queue.fetch(1), "the group")
        await lease.hand_back()
    await desk.launch()
    assert await desk.failure("g00000000") == "given up after 2 deliveries"


async def test_work_of_a_killed_service_is_done_by_the_next_and_every_group_comes_out(bench: NewBench) -> None:
    desk = await bench(reward={"rm_type": "math_verify", "reward_timeout": 60}, bus={"ack_wait": 2.0, "max_deliver": 5})
    first = await desk.launch()
    names = [f"g{number:08d}" for number in range(12)]
    for name in names:
        await desk.generated(name, "so \\boxed{84/2}", "3")
    found = await desk.outcomes(2)
    first.kill()
    await desk.launch("reward-2")
    while len(found) < len(names):  # one that was sent and not acknowledged comes once more; the buffer knows it by its attempt
        found |= await desk.outcomes(1)
    assert sorted(found) == names
    assert all(isinstance(outcome, Scored) and outcome.rewards == [1.0, 0.0] for outcome in found.values())
