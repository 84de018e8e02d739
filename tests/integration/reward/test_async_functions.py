"""Async reward functions: many groups wait in one process, and none pays for what another does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from services.reward.scorer import CustomScorer, HooksPool
from shared.config.reward_section import RewardSection
from shared.process.worker_pool import WorkerFailed
from shared.runtime.errors import DeadlineExceeded
from shared.schema.sample import Sample
from tests.support.run_config import run_config

JUDGE = "tests.support.reward_hooks:judge"
PATIENT = 60.0
Started = Callable[..., Awaitable[HooksPool]]


@pytest.fixture
async def started(tmp_path: Path) -> AsyncIterator[Started]:
    pools: list[HooksPool] = []

    async def start(timeout: float = PATIENT, workers: int = 1, path: str = JUDGE) -> HooksPool:
        reward = {"custom_rm_path": path, "reward_timeout": timeout, "reward_workers": workers}
        pools.append(HooksPool(run_config(tmp_path, reward=reward)))
        await pools[-1].start()
        return pools[-1]

    yield start
    for pool in pools:
        await pool.close()


def group(text: str) -> list[Sample]:
    ones = np.ones(2, np.uint8)
    tokens = np.arange(2, dtype=np.int32)
    sample = Sample(
        group=f"g-{text}", index=0, prompt=tokens, response=tokens, log_probs=np.zeros(2, np.float32), mask=ones, segments=[(0, 2, 3)],
        finish="stop", text=text, prompt_text="40+2=", label="42", metadata={}, rollout=0,
    )  # fmt: skip
    return [sample]


async def scored(pool: HooksPool, *texts: str) -> list[float | str]:
    """Rewards of groups that are scored at once; the error's text where one is given up."""
    answers = await asyncio.gather(*(pool.score(group(text), None) for text in texts), return_exceptions=True)
    found: list[float | str] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            assert isinstance(answer, DeadlineExceeded | WorkerFailed), answer
            found.append(str(answer))
        else:
            found.append(answer[0].reward)
    return found


def late(done: str, seconds: float) -> str:
    return f"1 rewards did not come from reward.custom_rm_path = {JUDGE} within {seconds:g} s; its {done}, the group is given up"


async def test_groups_wait_together_in_one_process(started: Started) -> None:
    pool = await started()
    assert CustomScorer(pool, RewardSection(reward_workers=8)).limit == 16, "of a reward service, whatever its workers"
    assert await scored(pool, *["together 40"] * 40) == [40.0] * 40
    assert len(pool.processes) == 1


@pytest.mark.extra
async def test_a_plain_function_has_one_group_at_a_time(started: Started) -> None:
    pool = await started(path="tests.support.reward_hooks:alone")
    assert CustomScorer(pool, RewardSection(reward_workers=8)).limit == 32
    assert await scored(pool, *["0.05"] * 6) == [1.0] * 6


async def test_a_late_group_is_cancelled_and_the_others_are_not(started: Started) -> None:
    pool = await started(4.0)
    first, waiting = pool.processes, asyncio.create_task(scored(pool, "late", "deaf"))
    await asyncio.sleep(2)
    others = asyncio.create_task(scored(pool, "wait 2.5", "wait 2.5"))  # they end after those two are late
    assert await waiting == [late("call was cancelled", 4.0)] * 2
    assert await scored(pool, "wait 0.1") == [0.1], "in a fresh process"
    assert await others == [2.5, 2.5]
    assert await scored(pool, "wait 0.1") == [0.1]
    assert first[0].exit_code() == -9, "what was late may have left something behind"
    assert len(pool.processes) == 1


async def test_a_group_that_blocks_the_loop_is_killed_and_the_others_are_scored_elsewhere(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.process.worker_pool.LOOP_SECONDS", 1.0)
    pool = await started(2.0)
    assert await scored(pool, "wait 0.5", "spin", "wait 0.6") == [0.5, late("process was killed", 2.0), 0.6]


@pytest.mark.extra
async def test_a_group_that_ends_the_process_costs_no_other(started: Started) -> None:
    pool = await started()
    one, dead, other = await scored(pool, "wait 0.5", "die", "wait 0.6")
    assert (one, other) == (0.5, 0.6)
    assert dead == f"the functions {JUDGE}'s process ended in the middle of a call"


@pytest.mark.extra
async def test_async_functions_that_never_wait_have_their_deadlines_one_after_the_other(started: Started) -> None:
    pool = await started(3.0)
    assert await scored(pool, *["compute 1.2"] * 5) == [1.2] * 5, "6 s in all"
