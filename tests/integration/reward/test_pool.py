"""Verifier processes: they answer within the deadline or are killed, and none takes another's calls down."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from services.reward.worker_pool import VerifierPool
from services.reward.worker_process import START_SECONDS, WorkerFailed
from shared.runtime.errors import DeadlineExceeded

SOON = 60.0
"""A deadline that a healthy verifier does not reach on a slow machine."""

Started = Callable[..., Awaitable[VerifierPool]]


@pytest.fixture
async def started() -> AsyncIterator[Started]:
    pools: list[VerifierPool] = []

    async def start(size: int = 1, name: str = "odd", module: str = "tests.integration.reward.odd_worker") -> VerifierPool:
        pools.append(VerifierPool(name, size, module))
        await pools[-1].start()
        return pools[-1]

    yield start
    for pool in pools:
        await pool.close()


async def rewards(pool: VerifierPool, responses: list[str], label: str, deadline: float) -> list[float]:
    return [score.reward for score in await pool.score(responses, label, deadline)]


async def test_one_reward_a_response_in_order(started: Started) -> None:
    pool = await started()
    assert await rewards(pool, ["a", "b", " a "], "a", SOON) == [1.0, 0.0, 1.0]
    assert await rewards(pool, [], "a", SOON) == []
    assert await rewards(pool, ["zeile\n1\u2028", "\x00"], "zeile\n1\u2028", SOON) == [1.0, 0.0]


@pytest.mark.parametrize("hang", ["sleep", "spin"])
async def test_a_verifier_that_hangs_is_killed_at_its_deadline_and_replaced(started: Started, hang: str) -> None:
    pool = await started()
    [worker] = pool.processes
    start = time.monotonic()
    for _ in range(2):  # the second one hangs in a fresh process, which had its time to start before its deadline began
        with pytest.raises(DeadlineExceeded, match=r"2 rewards did not come from verifier odd within 1 s; its process was killed"):
            await rewards(pool, ["a", hang], "a", 1.0)
    assert time.monotonic() - start < START_SECONDS / 2
    assert worker.exit_code() == -9
    assert await rewards(pool, ["a"], "a", SOON) == [1.0]


async def test_a_hanging_call_holds_up_only_its_own_worker(started: Started) -> None:
    pool = await started(2)
    hanging = asyncio.create_task(rewards(pool, ["sleep"], "a", SOON))
    assert await asyncio.gather(*(rewards(pool, ["a"], "a", SOON) for _ in range(6))) == [[1.0]] * 6
    assert not hanging.done()
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    assert await asyncio.gather(*(rewards(pool, ["a"], "a", SOON) for _ in range(2))) == [[1.0]] * 2


@pytest.mark.parametrize("reward", ["nan", "inf", "-inf"])
async def test_a_reward_that_is_no_finite_number_fails_the_group(started: Started, reward: str) -> None:
    pool = await started()
    with pytest.raises(WorkerFailed, match=rf"verifier odd .*: scores\[1\].reward is {reward}; input should be a finite number"):
        await rewards(pool, ["a", reward], "a", SOON)
    assert await rewards(pool, ["a"], "a", SOON) == [1.0]


async def test_what_a_verifier_raises_fails_the_group_and_not_the_process(started: Started) -> None:
    pool = await started()
    before = pool.processes
    with pytest.raises(WorkerFailed, match="verifier odd: RuntimeError: cannot read this"):
        await rewards(pool, ["a", "raise"], "a", SOON)
    assert await rewards(pool, ["a"], "a", SOON) == [1.0]
    assert pool.processes == before


async def test_a_process_that_dies_in_a_call_is_replaced(started: Started) -> None:
    pool = await started()
    for _ in range(2):
        with pytest.raises(WorkerFailed, match="process ended in the middle of a call"):
            await rewards(pool, ["die"], "a", SOON)
    assert await rewards(pool, ["a"], "a", SOON) == [1.0]


async def test_what_a_library_prints_does_not_mix_with_the_answers(started: Started) -> None:
    pool = await started()
    assert await rewards(pool, ["chatter", "a"], "a", SOON) == [0.0, 1.0]
    assert await rewards(pool, ["a"], "a", SOON) == [1.0]


async def test_an_answer_that_cannot_be_read_fails_the_group_and_ends_the_process(started: Started) -> None:
    pool = await started()
    with pytest.raises(WorkerFailed, match=r"verifier odd's process answered b'not '"):
        await rewards(pool, ["babble"], "a", SOON)
    assert await rewards(pool, ["a"], "a", SOON) == [1.0]


async def test_a_pool_that_is_closed_leaves_no_process(started: Started) -> None:
    pool = await started(2)
    workers = pool.processes
    assert len(workers) == 2
    await pool.close()
    assert [worker.exit_code() for worker in workers] == [-9, -9]


async def test_a_verifier_that_does_not_exist_is_told_at_the_start() -> None:
    pool = VerifierPool("no-such-verifier", 1)
    with pytest.raises(WorkerFailed, match="verifier no-such-verifier's process ended before it was ready"):
        await pool.start()


async def test_the_math_verifier_is_killed_over_an_expression_without_end(started: Started) -> None:
    pool = await started(1, "math", "services.reward.worker")
    with pytest.raises(DeadlineExceeded):
        await rewards(pool, ["\\boxed{9^{9^{9^{9}}}}"], "1", 0.5)
    assert await rewards(pool, ["\\boxed{\\frac{2}{4}}", "3"], "0.5", SOON) == [1.0, 0.0]
