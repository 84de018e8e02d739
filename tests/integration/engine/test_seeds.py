"""Samples with seeds of their own: drawn alike by every engine, in every company, and across an interruption."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineProcess
from services.rollout.engine.generation import GenerationRequest
from shared.hooks.arguments import Arguments
from shared.schema.messages import Sampling
from tests.integration.engine.conftest import Checkpoints, running_engine
from tests.integration.engine.hall import NewHall
from tests.support.run_config import run_config

SAMPLING = Sampling(temperature=1.0, top_p=0.95, max_new_tokens=24)
PROMPTS = [np.arange(5, 5 + length, dtype=np.int32) for length in (3, 8, 11)]
N = 4

Drawn = list[list[list[int]]]
"""The tokens of each prompt's samples."""


def group(prompt: int) -> list[GenerationRequest]:
    return [GenerationRequest(PROMPTS[prompt], 24, ignore_eos=True, seed=42 + index) for index in range(N)]


async def in_company(client: EngineClient) -> Drawn:
    """All groups at once: the tokens of each sample."""
    drawn = await asyncio.gather(*(client.generate_group(group(prompt), SAMPLING) for prompt in range(len(PROMPTS))))
    return [[generation.tokens.tolist() for generation in generations] for generations in drawn]


async def one_by_one(client: EngineClient) -> Drawn:
    """Each sample alone, the last first, and each of them cut in two: the second request continues the first one's tokens."""
    drawn: Drawn = [[[] for _ in range(N)] for _ in PROMPTS]
    for prompt in reversed(range(len(PROMPTS))):
        for index, request in reversed(list(enumerate(group(prompt)))):
            [first] = await client.generate_group([replace(request, max_new_tokens=9)], SAMPLING)
            continued = np.concatenate([request.tokens, first.tokens])
            [rest] = await client.generate_group([replace(request, rid=f"{request.rid}r", tokens=continued, max_new_tokens=15)], SAMPLING)
            drawn[prompt][index] = [*first.tokens.tolist(), *rest.tokens.tolist()]
    return drawn


async def drawn_by(engine: EngineProcess, draw: Callable[[EngineClient], Awaitable[Drawn]]) -> Drawn:
    async with await EngineClient.connect(engine.receiver) as client:
        return await draw(client)


@pytest.mark.extra(each=True)
def test_seeds_draw_the_same_samples_in_two_engines(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Two engines with other seeds of their own; the first one's requests in company, the second one's alone and interrupted."""
    found = []
    for name, seed, draw in (("first", 1, in_company), ("second", 2, one_by_one)):
        (tmp_path / name).mkdir()
        flags: dict[str, Any] = {"enable-deterministic-inference": True, "random-seed": seed}
        with running_engine(checkpoint(0).path, tmp_path / name, flags) as engine:
            found.append(asyncio.run(drawn_by(engine, draw)))
    assert found[0] == found[1]
    assert all(len({tuple(tokens) for tokens in samples}) == N for samples in found[0])  # the samples of a group differ


@pytest.fixture(scope="session")
def seeded_engine(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with running_engine(checkpoint(0).path, tmp_path_factory.mktemp("seeded"), {"enable-deterministic-inference": True}) as process:
        yield process


@pytest.mark.extra
@pytest.mark.parametrize("engine_name", ["seeded_engine"])
async def test_a_session_that_asks_again_gets_another_answer_and_an_evaluations_client_by_its_seed(hall: NewHall) -> None:
    room, texts = await hall(), {}
    for name, fields, seed in (("trained", {}, 5), ("again", {}, None), ("evaluated", {"evaluation": True}, 5)):
        played = await room.session(seed=7, **fields)
        asked: dict[str, Any] = {"model": "0", "messages": [{"role": "user", "content": "x"}], "seed": seed}
        async with played.client(room.urls[0]) as client:
            answers = [await client.chat.completions.create(**asked) for _ in range(3)]
        texts[name] = [one.choices[0].message.content for one in answers]
    assert len(set(texts["trained"])) == 3 and texts["again"] == texts["trained"], "a session's own seeds, the same in each life"
    assert len(set(texts["evaluated"])) == 1 and texts["evaluated"][0] not in texts["trained"]


async def test_without_the_flag_samples_have_no_seed(client: EngineClient) -> None:
    once, again = [await in_company(client) for _ in range(2)]
    assert once != again


@pytest.mark.parametrize(
    ("sglang", "first"),
    [
        ({}, None),
        ({"enable-deterministic-inference": False}, None),
        ({"enable-deterministic-inference": True}, 7),
        ({"--enable_deterministic_inference": True}, 7),
        ({"rl-on-policy-target": "fsdp"}, 7),
        ({"enable-deterministic-inference": False, "rl-on-policy-target": "fsdp"}, 7),
    ],
)
def test_seeds_follow_from_the_engines_flags(tmp_path: Path, sglang: dict[str, Any], first: int | None) -> None:
    config = run_config(tmp_path, data={"rollout_seed": 7}, rollout={"sglang": sglang})
    assert [config.sample_seed(index) for index in range(3)] == ([None] * 3 if first is None else [7, 8, 9])
    assert Arguments(config).sglang_enable_deterministic_inference is (first is not None)
