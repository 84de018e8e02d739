"""The real reward service with environments outside of it: over HTTP and NATS, down, hung, restarted, wrong.

Where its logs or its exit matter it is a process, else it runs in the process of the tests.
"""

import asyncio
import json
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from shared.bus.registry import Registry
from shared.bus.streams import generated_consumer
from shared.bus.work_queue import WorkQueue
from shared.process.embedded_servers import EmbeddedNats, free_port
from shared.schema.messages import Failed, Generated, Scored
from tests.integration.environments.live import mute_server, node_example, page_example, python_example
from tests.support.reward_bench import Bench, NewBench
from tests.support.waiting import until

PATIENT = 120.0
"""A reward_timeout that no slow machine reaches."""

QUICK = {"registry_ttl": 4.0}
"""An environment is asked to describe itself every 0.8 s, and has 2 s for it."""

CARRIES = ["(03 04)42", "41", "42"]


async def waiting(desk: Bench, environment: str) -> tuple[int, int]:
    """(waiting, in hand) of an environment's queue."""
    return await WorkQueue(desk.bus, generated_consumer(desk.config.run.name, desk.config.bus, environment), Generated).depth()


async def test_an_http_environment_scores_with_its_parts(bench: NewBench, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://me:hush@127.0.0.1:{port}"
    desk = await bench(reward={"rm_type": "environment", "environment_url": url, "reward_timeout": PATIENT})
    with python_example(port, tmp_path / "example.log"):
        process = await desk.launch()
        card = await desk.card("environment", "ready")
        assert (card.http, card.detail) == (f"http://127.0.0.1:{port}", "")
        group = await desk.generated("g00000007", *CARRIES)
        outcome = (await desk.outcomes(1))["g00000007"]
        assert isinstance(outcome, Scored)
        assert list(zip(outcome.rewards, outcome.parts, strict=True)) == [
            (1.0, {"worked": 1.0}),
            (0.0, {"worked": 0.0}),
            (1.0, {"worked": 0.0}),
        ]
        samples = [replace(meta, digest=0) for meta in outcome.samples]  # which reward has set
        assert (outcome.environment, outcome.payload, samples) == ("environment", group.payload, group.samples)
        await desk.generated("g00000008", "42", label=None)
        assert "answered score with HTTP 400: a sum needs its label" in await desk.failure("g00000008")
        [service] = await Registry(desk.bus, desk.config.run.name).alive("reward")
        with urllib.request.urlopen(f"http://{service.http}/metrics", timeout=30) as response:
            metrics = response.read().decode()
        for line in ("groups_scored_total", "groups_not_scored_total"):
            assert f'myxo_{line}{{environment="environment",instance="reward-1",run="{desk.config.run.name}"}} 1.0' in metrics
        await desk.generated("g00000009", "42", "7", poison=lambda last: last.update(label="7"))
        own = (await desk.outcomes(1))["g00000009"]
        assert isinstance(own, Scored) and own.rewards == [1.0, 1.0], "a sample's own label counts"
        assert process.stop() == 0
    assert await Registry(desk.bus, desk.config.run.name).alive() == []
    assert "hush" not in process.words()


async def test_every_environment_of_a_run_is_served(bench: NewBench, nats: EmbeddedNats, tmp_path: Path) -> None:
    port = free_port()
    table = {"node": f"http://127.0.0.1:{port}", "on-the-bus": "nats:grader"}
    desk = await bench(reward={"rm_type": "exact", "environments": table, "reward_timeout": PATIENT})
    with node_example(port, tmp_path / "node.log"), page_example(nats.url, desk.config.run.name, tmp_path):
        await desk.serve()
        for name in table:
            await desk.card(name, "ready")
        for name in ("exact", "f1", *table):
            texts = *CARRIES, "\u2028 \U0001f9ee", "7"
            await desk.generated(f"of-{name}", *texts, environment=name, poison=lambda last: last.update(label="7"))
        outcomes = await desk.outcomes(4)
    got = {}
    for outcome in outcomes.values():
        assert isinstance(outcome, Scored), outcome
        got[outcome.environment] = outcome.rewards
    assert got == {
        "exact": [0.0, 0.0, 1.0, 0.0, 1.0],
        "f1": [0.0, 0.0, 1.0, 0.0, 1.0],
        "node": [1.0, 0.0, 1.0, 0.0, 1.0],
        "on-the-bus": [0.0, 0.0, 1.0, 0.0, 1.0],
    }


async def test_a_hung_environment_holds_up_nobody_else(bench: NewBench) -> None:
    async with mute_server() as url:
        reward = {"rm_type": "exact", "environments": {"mute": url}, "reward_timeout": PATIENT, "environment_concurrency": 2}
        desk = await bench(reward=reward, bus=QUICK)
        await desk.serve()
        for number in range(3):
            await desk.generated(f"mute-{number}", "42", environment="mute")

        async def in_hand() -> bool:
            return await waiting(desk, "mute") == (1, 2)

        await until(in_hand, "as many groups in the environment's hands as it may have")
        assert (await desk.card("mute", "late")).detail == "describe was not answered within 2 s"
        fine = [f"fine-{number}" for number in range(8)]
        for name in fine:
            await desk.generated(name, "42")
        outcomes = await desk.outcomes(8)
    assert sorted(outcomes) == fine
    assert all(isinstance(outcome, Scored) for outcome in outcomes.values())


async def test_a_hung_environment_loses_its_groups_at_their_deadline(bench: NewBench) -> None:
    async with mute_server() as url:
        desk = await bench(reward={"rm_type": "environment", "environment_url": url, "reward_timeout": 1.0})
        process = await desk.launch()
        for number in range(3):
            await desk.generated(f"g{number}", "42", "41")
        outcomes = await desk.outcomes(3)
    for outcome in outcomes.values():
        assert isinstance(outcome, Failed)
        assert outcome.reason == (
            f"2 rewards did not come from environment environment at {url} within 1 s; the group is given up (it did not answer)"
        )
        assert (outcome.by, outcome.payload is not None) == ("reward-1", True)
    assert process.process.poll() is None


@pytest.mark.extra(each=True)
async def test_an_environment_that_went_away_gets_what_was_in_its_hands_once_more(bench: NewBench, tmp_path: Path) -> None:
    port = free_port()
    desk = await bench(reward={"rm_type": "environment", "environment_url": f"http://127.0.0.1:{port}", "reward_timeout": 3.0})
    posted = asyncio.Event()
    await desk.generated("in-hand", "42")
    queue = WorkQueue(desk.bus, generated_consumer(desk.config.run.name, desk.config.bus, "environment"), Generated)
    [lease] = await until(lambda: queue.fetch(1), "the group")
    await lease.hand_back()  # as a reward service does that stops: it comes for the second time
    async with mute_server(port, posted):
        process = await desk.launch()
        await until(posted.is_set, "the group in the environment's hands")
    await desk.card("environment", "away")
    await desk.generated("waits", "42")
    await until(lambda: "group_handed_back" in process.words(), "the group to be handed back at its deadline")
    with python_example(port, tmp_path / "example.log"):
        outcomes = await desk.outcomes(2)
    assert {name: type(outcome) for name, outcome in outcomes.items()} == {"in-hand": Scored, "waits": Scored}


@pytest.mark.extra(each=True)
async def test_a_weighted_reward_waits_for_an_environment_that_is_away(bench: NewBench, tmp_path: Path) -> None:
    port = free_port()
    weights, table = {"exact": 1.0, "sums": 1.0}, {"sums": f"http://127.0.0.1:{port}"}
    desk = await bench(reward={"rm_type": "weighted", "reward_weights": weights, "environments": table, "reward_timeout": 0.5})
    await desk.serve()
    await desk.card("sums", "away")
    await desk.generated("g0", "42")
    await asyncio.sleep(4.0)  # a group in hand would be given up twice, with a second between
    with python_example(port, tmp_path / "example.log"):
        outcome = (await desk.outcomes(1))["g0"]
    assert isinstance(outcome, Scored) and outcome.rewards == [2.0], outcome


@pytest.mark.extra
async def test_an_environment_on_the_bus_may_come_later_too(bench: NewBench, nats: EmbeddedNats, tmp_path: Path) -> None:
    desk = await bench(reward={"rm_type": "grader", "environments": {"grader": "nats:grader"}, "reward_timeout": PATIENT})
    await desk.serve()
    card = await desk.card("grader", "away")
    assert (card.detail, card.http) == (f"no reply on {desk.config.run.name}.environment.grader.describe", "nats:grader")
    await desk.generated("g0", "42", "41")
    with page_example(nats.url, desk.config.run.name, tmp_path):
        outcome = (await desk.outcomes(1))["g0"]
    assert isinstance(outcome, Scored)
    assert outcome.rewards == [1.0, 0.0]


async def test_no_group_is_lost_when_an_environment_restarts_in_the_middle(bench: NewBench, tmp_path: Path) -> None:
    port = free_port()
    desk = await bench(
        reward={
            "rm_type": "environment",
            "environment_url": f"http://127.0.0.1:{port}",
            "reward_timeout": PATIENT,
            "environment_concurrency": 4,
        }
    )
    with node_example(port, tmp_path / "node.log") as environment:
        await desk.serve()
        await desk.card("environment", "ready")
        for number in range(60):
            await desk.generated(f"g{number}", *CARRIES)
        outcomes = await desk.outcomes(10)
        environment.kill()
        for number in range(60, 80):
            await desk.generated(f"g{number}", *CARRIES)
        await desk.card("environment", "away")
        environment.start()
        outcomes |= await desk.outcomes(80 - len(outcomes))
    assert sorted(outcomes) == sorted(f"g{number}" for number in range(80))
    assert [outcome for outcome in outcomes.values() if not isinstance(outcome, Scored)] == []


async def test_an_answer_that_does_not_fit_fails_the_group_by_name(bench: NewBench, odd: str) -> None:
    desk = await bench(reward={"rm_type": "environment", "environment_url": f"{odd}/nan", "reward_timeout": PATIENT})
    await desk.serve()
    await desk.generated("g0", *CARRIES)
    reason = f"environment environment at {odd}/nan: rewards[2] is nan; expected a finite number, or an object with reward"
    assert await desk.failure("g0") == reason


@pytest.mark.extra(each=True)
async def test_what_is_no_environment_of_this_version_gets_no_group(bench: NewBench, odd: str) -> None:
    table = {"new": f"{odd}/other-version", "meta": "http://0xa9fea9fe", "elsewhere": f"{odd}/redirected-describe"}
    desk = await bench(reward={"rm_type": "exact", "environments": table}, bus=QUICK)
    process = await desk.launch()
    for name in table:
        await desk.generated(f"of-{name}", "42", environment=name)
    assert (await desk.card("new", "refused")).detail.startswith("protocol is 2; expected 1")
    assert "169.254.169.254, a link-local address, which is never connected to" in (await desk.card("meta", "refused")).detail
    assert "a redirect, which is not followed" in (await desk.card("elsewhere", "refused")).detail
    await desk.generated("fine", "42")
    assert isinstance((await desk.outcomes(1))["fine"], Scored)
    first = await desk.card("new", "refused")

    async def described_again() -> bool:
        return (await desk.card("new", "refused")).at > first.at + 1

    await until(described_again, "another look at the environment")
    assert [await waiting(desk, name) for name in table] == [(1, 0)] * 3
    said = [json.loads(line) for line in process.words().splitlines() if '"environment_state"' in line]
    assert sorted(line["environment"] for line in said) == sorted(table), "the log says it once"
