"""Rollouts that are episodes: of an environment that steps, and of the package `verifiers` in its own environment, token by token."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.environments.guessing.guessing import GuessingGame
from shared.environment.http_environment import served_over_http
from shared.environment.serving import ServedEnvironment
from shared.schema.messages import Failed, Interrupted, Sampling
from shared.schema.sample import runs
from tests.integration.engine.bench import PROMPT, Bench, NewBench
from tests.integration.engine.conftest import Checkpoints
from tests.integration.engine.hall import NewHall
from tests.integration.engine.reference import log_probs
from tests.support.service_process import ROOT
from tests.support.tiny_model import EOS
from tests.support.waiting import until

EXACT = 1e-5


class Recording(GuessingGame):
    """The game, with what it was asked, on a number that nobody guesses unless told to let them win."""

    def __init__(self) -> None:
        self.resets: list[dict[str, Any]] = []
        self.steps: list[tuple[str, int]] = []
        self.said: list[str] = []
        self.wins_after, self.pause_s, self.fails = 3, 0.0, 0

    def reset(self, request: dict[str, Any]) -> Any:
        self.resets.append(request)
        return {"turns": 0}, [{"role": "user", "content": "a game:"}]

    async def step(self, state: Any, message: dict[str, Any], request: dict[str, Any]) -> Any:  # type: ignore[override]
        self.steps.append((request["session"], request["turn"]))
        self.said.append(message["content"])
        if self.fails:
            self.fails -= 1
            raise LookupError("no such game")
        await asyncio.sleep(self.pause_s)
        state["turns"] += 1
        done = state["turns"] == self.wins_after
        return ([] if done else [{"role": "user", "content": f"<{state['turns']}>"}]), {"reward": 0.25, "form": 1.0}, done


@pytest.fixture
async def game() -> AsyncIterator[tuple[Recording, str]]:
    made = Recording()
    async with served_over_http(ServedEnvironment("game", made), "127.0.0.1", 0) as url:
        yield made, url


async def bench_of(new_bench: NewBench, url: str, sections: dict[str, Any] = {}, **episode: Any) -> Bench:  # noqa: B006
    episode = {"episode_url": url, "episode_turn_tokens": 4, **episode}
    return await new_bench(episode=episode, reward={"rm_type": "math_verify"}, **sections)


@pytest.mark.timeout(600)
async def test_an_episode_to_its_end(new_bench: NewBench, game: tuple[Recording, str], checkpoint: Checkpoints) -> None:
    made, url = game
    desk = await bench_of(new_bench, url, episode_turn_tokens=200)
    await desk.task(sampling=Sampling(temperature=1.0, max_new_tokens=700))
    group, samples = await desk.generated()
    whole = [(one, desk.rollout._tokenizer.pieces(one.response.tolist())) for one in samples]
    said = ["".join(pieces[start:end]).removesuffix(EOS) for one, pieces in whole for start, end, _ in one.turn_rewards]
    assert sorted(made.said) == sorted(said), "what ends a message is not part of it"
    assert len(group.samples) == 2 and {request["rollout"] for request in made.resets} == {0, 1}
    assert made.resets[0]["prompt"] == "40+2=" and made.resets[0]["metadata"] == {"level": 3}
    assert sorted(turn for _, turn in made.steps) == [0, 0, 1, 1, 2, 2] and len({session for session, _ in made.steps}) == 2
    for one in samples:
        assert one.prompt.tolist() == [*PROMPT.tolist(), *desk.rollout._tokenizer.encode("a game:").tolist()]
        assert one.given_reward == {"reward": 0.75, "form": 3.0} and one.metadata == {"level": 3, "turns": 3}
        assert [reward for *_, reward in one.turn_rewards] == [0.25] * 3
        assert [(start, end) for start, end, _ in one.turn_rewards] == runs(one.mask != 0)
        assert one.finish == "stop" and "<1>" in one.text and "<2>" in one.text
        masked = desk.rollout._tokenizer.decode(one.response[one.mask == 0])
        assert masked == "<1><2>", "what the environment said, and nothing else, is not trained"
        assert one.segments == [(0, len(one.response), 0)] and one.problem() is None
        reference = np.where(one.mask, log_probs(checkpoint(0).model, one.prompt, one.response), 0)
        assert np.abs(reference - one.log_probs).max() < EXACT


@pytest.mark.timeout(600)
async def test_an_episode_ends_with_its_tokens_or_turns(new_bench: NewBench, game: tuple[Recording, str]) -> None:
    made, url = game
    made.wins_after = 99
    most = len(PROMPT) + len("a game:") + 8  # tokens of a trained episode: the first turn, what answers it and one more
    sections = {"rollout": {"rollout_max_context_len": most}, "eval": {"sets": [{"name": "heldout", "path": "heldout.jsonl"}]}}
    desk = await bench_of(new_bench, url, sections, episode_turns=2, episode_reward="last")
    await desk.task("eval.heldout.0.0", sampling=Sampling(temperature=1.0, max_new_tokens=60))
    _, samples = await desk.generated()
    assert [(one.finish, one.metadata["turns"], one.given_reward) for one in samples] == [("length", 2, {"reward": 0.25, "form": 1.0})] * 2
    await desk.task(group="g00000008", sampling=Sampling(temperature=1.0, max_new_tokens=9))
    _, samples = await desk.generated()
    assert all(len(one.response) <= 9 and one.finish == "length" for one in samples)
    await desk.task("g00000009", sampling=Sampling(temperature=1.0, max_new_tokens=60, min_new_tokens=60))
    _, samples = await desk.generated()
    assert [(len(one.prompt) + len(one.response), one.finish, one.metadata["turns"]) for one in samples] == [(most, "length", 1)] * 2


@pytest.mark.timeout(600)
async def test_an_environment_that_fails_costs_its_group_and_is_named(new_bench: NewBench, game: tuple[Recording, str]) -> None:
    made, url = game
    made.fails = 99
    desk = await bench_of(new_bench, url)
    await desk.task()
    outcome = await desk.outcome()
    assert isinstance(outcome, Failed)
    assert f"episode.episode_url = {url}" in outcome.reason and "LookupError: no such game" in outcome.reason
    desk.working.append(asyncio.create_task(desk.rollout.measure()))
    await until(lambda: desk.service.metrics.values.get("lost_rollouts"), "lost rollouts are counted")
    made.fails = 0
    await desk.task(group="g00000009")
    group, _ = await desk.generated()
    assert group.group == "g00000009"


@pytest.mark.timeout(600)
async def test_an_episode_goes_on_in_its_session_elsewhere(new_bench: NewBench, game: tuple[Recording, str]) -> None:
    """It is stopped as by a replica that leaves, between two turns, and its samples are given to the next attempt."""
    made, url = game
    made.pause_s = 0.5
    desk = await bench_of(new_bench, url)
    if not desk.rollout._episodes.goes_on:  # type: ignore[union-attr]
        desk.rollout._episodes.goes_on = True  # type: ignore[union-attr]  # as slime's --partial-rollout has it
    sampling = Sampling(temperature=1.0, max_new_tokens=60)
    await desk.task(sampling=sampling)
    await until(lambda: len(made.steps) == 2, "a first step of both episodes", 240)
    await desk.rollout.in_flight.leave(desk.client)
    stopped = await desk.outcome()
    assert isinstance(stopped, Interrupted) and stopped.payload is not None
    desk.rollout.in_flight.leaving = False  # as at another replica
    made.fails = 1
    await desk.task(stopped.group, attempt=1, partial=stopped.payload, sampling=sampling)
    _, samples = await desk.generated()
    assert len(made.resets) == 3, "the one whose step failed begins anew, and the other continues"
    assert sorted(turn for _, turn in made.steps) == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [one.given_reward for one in samples] == [{"reward": 0.75, "form": 3.0}] * 2
    assert all([(start, end) for start, end, _ in one.turn_rewards] == runs(one.mask != 0) for one in samples), "of both attempts"


PYTHON, TASKSET = os.environ.get("VERIFIERS_PYTHON", ""), os.environ.get("VERIFIERS_TASKSET", "")
SERVE = ROOT / "examples" / "environments" / "verifiers" / "serve.py"
CONFIG = os.environ.get("VERIFIERS_ENV", '{"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}')
ROLES = json.loads(os.environ.get("VERIFIERS_ROLES", "[]"))
ENVIRONMENT = ["--taskset", TASKSET, "--env", CONFIG]


@pytest.mark.extra
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (PYTHON and TASKSET), reason="VERIFIERS_PYTHON and _TASKSET")
async def test_an_environment_plays_as_it_is(room: NewHall, checkpoint: Checkpoints, tmp_path: Path) -> None:
    listed = await asyncio.create_subprocess_exec(PYTHON, str(SERVE), "tasks", *ENVIRONMENT, "--count", "2", stdout=asyncio.subprocess.PIPE)
    rows = [json.loads(line) for line in (await listed.communicate())[0].splitlines()]
    assert len(rows) == 2
    path = f"{Path(PYTHON).parent}:{os.environ['PATH']}"
    served = await asyncio.create_subprocess_exec(
        *(PYTHON, str(SERVE), "serve", *ENVIRONMENT, "--port", "0", "--tokenizer", str(checkpoint(0).path)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PATH": path},
        cwd=tmp_path,
    )
    try:
        assert served.stdout is not None
        said = (await asyncio.wait_for(served.stdout.readline(), 300)).decode()
        url = re.search(r"http://\S+/play", said)
        assert url, said
        rollout = {"agent_options": {"url": url[0]}, "agent_timeout": 600, "agent_roles": ROLES}
        desk = (await room("shared.agents.http_agent:play", rollout=rollout)).desk
        row = rows[1]
        await desk.task(prompt=row["prompt"], metadata=row["metadata"], sampling=Sampling(temperature=1.0, max_new_tokens=12))
        _, samples = await desk.generated()
        assert len(samples) >= 2 and {one.rollout for one in samples} == {0, 1}
        assert {one.role for one in samples} <= set(ROLES or [""])
        for one in samples:
            assert isinstance(one.given_reward, dict) and isinstance(one.given_reward["reward"], float)
            trained = one.mask.astype(bool)
            assert trained.any() and one.segments == [(0, len(one.response), 0)]
            expected = log_probs(checkpoint(0).model, one.prompt, one.response)
            np.testing.assert_allclose(one.log_probs[trained], expected[trained], atol=1e-4)
            print(desk.rollout._tokenizer.decode(one.prompt)[-300:], "|", one.text, one.given_reward)
    finally:
        served.terminate()
        await served.wait()
