"""Verifier processes: they answer in time or are killed, and none takes another's calls down; many async calls wait in one."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from services.reward.scorer import CustomScorer, HooksPool, Verification, VerifierPool
from shared.config.reward_section import RewardSection
from shared.process import worker_pool
from shared.process.worker_pool import LOOP_SECONDS, WorkerFailed
from shared.rewards.reference import Reference
from shared.runtime.errors import DeadlineExceeded
from shared.schema.sample import Sample, Score
from tests.support.run_config import run_config
from tests.support.valid_messages import example

SOON = 60.0
"""A deadline that a healthy verifier does not reach on a slow machine."""

Started = Callable[..., Awaitable[VerifierPool]]


@pytest.fixture
async def started() -> AsyncIterator[Started]:
    pools: list[VerifierPool] = []

    async def start(size: int = 1, name: str = "odd", module: str = "tests.integration.reward.odd_worker") -> VerifierPool:
        pools.append(VerifierPool(f"verifiers-{name}", [name], size, module))
        await pools[-1].start()
        return pools[-1]

    yield start
    for pool in pools:
        await pool.close()


async def rewards(pool: VerifierPool, responses: list[str], label: str, deadline: float) -> list[float]:
    return [score.reward for score in await scores_of(pool, responses, label, deadline)]


async def scores_of(pool: VerifierPool, responses: list[str], label: str, deadline: float, name: str = "odd") -> list[Score]:
    return await pool.score(Verification(name, responses, [Reference(label)]), deadline)


async def test_one_reward_a_response_in_order(started: Started) -> None:
    pool = await started()
    assert await rewards(pool, ["a", "b", " a "], "a", SOON) == [1.0, 0.0, 1.0]
    assert await rewards(pool, [], "a", SOON) == []
    assert await rewards(pool, ["zeile\n1\u2028", "\x00"], "zeile\n1\u2028", SOON) == [1.0, 0.0]


@pytest.mark.parametrize("hang", [pytest.param("sleep", marks=pytest.mark.extra), "spin"])
async def test_a_response_that_is_late_gets_0_and_costs_neither_the_others_nor_the_process(started: Started, hang: str) -> None:
    pool = await started()
    before = pool.processes
    scores = await scores_of(pool, ["a", hang, "a", "b"], "a", 2.0)
    assert [score.reward for score in scores] == [1.0, 0.0, 1.0, 0.0]
    assert [bool(score.unread) for score in scores] == [False, True, False, False]
    assert re.fullmatch(rf"verifier odd: a response of {len(hang)} characters was not verified within \d\.\d s", scores[1].unread)
    assert pool.processes == before


@pytest.mark.extra
async def test_a_response_that_holds_up_its_process_gets_0_and_the_others_are_asked_again(started: Started) -> None:
    pool = await started()
    [worker] = pool.processes
    scores = await scores_of(pool, ["a", "deaf", "a"], "a", 1.5)
    assert [score.reward for score in scores] == [1.0, 0.0, 1.0]
    assert "did not come from verifier odd within" in scores[1].unread and "its process was killed" in scores[1].unread
    assert worker.exit_code() == -9
    assert await rewards(pool, ["a"], "a", SOON) == [1.0]


@pytest.mark.extra
async def test_a_process_that_is_late_to_start_is_no_fault_of_a_response(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = await started()
    monkeypatch.setattr(worker_pool, "START_SECONDS", 0.01)
    await pool.close()
    with pytest.raises((DeadlineExceeded, WorkerFailed)):
        await scores_of(pool, ["a", "a"], "a", SOON)


@pytest.mark.extra
async def test_a_hanging_call_holds_up_only_its_own_worker(started: Started) -> None:
    pool = await started(2)
    hanging = asyncio.create_task(rewards(pool, ["sleep"], "a", SOON))
    assert await asyncio.gather(*(rewards(pool, ["a"], "a", SOON) for _ in range(6))) == [[1.0]] * 6
    assert not hanging.done()
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    assert await asyncio.gather(*(rewards(pool, ["a"], "a", SOON) for _ in range(2))) == [[1.0]] * 2


@pytest.mark.parametrize("reward", ["nan", *(pytest.param(reward, marks=pytest.mark.extra) for reward in ("inf", "-inf"))])
async def test_a_reward_that_is_no_finite_number_costs_that_one(started: Started, reward: str) -> None:
    pool = await started()
    scores = await scores_of(pool, ["a", reward], "a", SOON)
    assert [score.reward for score in scores] == [1.0, 0.0]
    assert scores[1].unread == f"verifier odd: ValueError: a reward is {reward}; expected a finite number"


@pytest.mark.parametrize(
    ("response", "why"),
    [
        ("raise", "RuntimeError: cannot read this"),
        ("memory", "MemoryError"),
        pytest.param("deep", "RecursionError", marks=pytest.mark.extra),
    ],
)
async def test_what_a_verifier_raises_over_a_response_costs_that_one(started: Started, response: str, why: str) -> None:
    pool = await started()
    before = pool.processes
    scores = await scores_of(pool, ["a", response], "a", SOON)
    assert [score.reward for score in scores] == [1.0, 0.0]
    assert scores[1].unread.startswith(f"verifier odd: {why}")
    assert await rewards(pool, ["a"], "a", SOON) == [1.0]
    assert pool.processes == before


async def test_a_process_that_dies_in_a_call_is_replaced(started: Started) -> None:
    pool = await started()
    for _ in range(2):
        scores = await scores_of(pool, ["a", "die"], "a", SOON)
        assert [score.reward for score in scores] == [1.0, 0.0]
        assert scores[1].unread == "verifiers-odd's process ended in the middle of a call"
    assert await rewards(pool, ["a"], "a", SOON) == [1.0]


async def test_what_a_library_prints_does_not_mix_with_the_answers(started: Started) -> None:
    pool = await started()
    assert await rewards(pool, ["chatter", "a"], "a", SOON) == [0.0, 1.0]
    assert await rewards(pool, ["a"], "a", SOON) == [1.0]


async def test_an_answer_that_cannot_be_read_is_the_end_of_the_process(started: Started) -> None:
    pool = await started()
    [score] = await scores_of(pool, ["babble"], "a", SOON)
    assert (score.reward, score.unread) == (0.0, "verifiers-odd's process answered b'not '")
    assert await rewards(pool, ["a"], "a", SOON) == [1.0]


async def test_a_pool_that_is_closed_leaves_no_process(started: Started) -> None:
    pool = await started(2)
    workers = pool.processes
    assert len(workers) == 2
    await pool.close()
    assert [worker.exit_code() for worker in workers] == [-9, -9]


async def test_a_verifier_that_does_not_exist_is_told_at_the_start() -> None:
    pool = VerifierPool("nobody", ["no-such-verifier"], 1)
    with pytest.raises(WorkerFailed, match="nobody's process ended before it was ready"):
        await pool.start()


LOOPS = {
    "numbers": "12 " * 33_000,
    "boxes": "\\boxed{" * 125_000,
    "closed boxes": "\\boxed{" * 62_500 + "}" * 62_500,
    "dollars": "$12$ " * 20_000,
    "tower of powers": "\\boxed{9^{9^{9^{9}}}}",
    "brackets": "\\boxed{" + "(" * 300 + "1" + ")" * 300 + "}",
}


@pytest.mark.extra
async def test_looping_responses_cost_a_group_none_of_its_right_answers(started: Started, capfd: pytest.CaptureFixture[str]) -> None:
    pool = await started(1, "math_verify", "services.reward.worker")
    start = time.monotonic()
    scores = await scores_of(pool, ["\\boxed{\\frac{2}{4}}", *LOOPS.values(), "3", "so 0.5"], "0.5", 20.0, "math_verify")
    assert [score.reward for score in scores] == [1.0, *(0.0 for _ in LOOPS), 0.0, 1.0]
    assert time.monotonic() - start < 20.0 + LOOP_SECONDS
    late = [name for name, score in zip(LOOPS, scores[1:], strict=False) if score.unread]
    assert "tower of powers" in late and not {"numbers", "boxes", "closed boxes", "dollars"} & set(late)
    await pool.close()
    assert "12 12" not in (said := capfd.readouterr().err) and len(said) < 2000


@pytest.mark.extra
async def test_a_label_that_takes_for_ever_fails_the_group(started: Started) -> None:
    pool = await started(1, "math_verify", "services.reward.worker")
    with pytest.raises(WorkerFailed, match=r"verifier math_verify: the label was not read within 0\.5 s"):
        await scores_of(pool, ["1", "2"], "(" * 300 + "1" + ")" * 300, 0.5, "math_verify")
    with pytest.raises(WorkerFailed, match=r"ValueError: the label '1\+1.* has 2001 characters; an answer has at most 1000"):
        await scores_of(pool, ["1", "2"], "1+" * 1000 + "1", SOON, "math_verify")
    [score] = await scores_of(pool, ["2"], "2", SOON, "math_verify")
    assert score.reward == 1.0


JUDGE = "tests.support.reward_hooks:judge"
PATIENT = 60.0
StartedHooks = Callable[..., Awaitable[HooksPool]]


@pytest.fixture
async def started_hooks(tmp_path: Path) -> AsyncIterator[StartedHooks]:
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
    return [example(Sample, group=f"g-{text}", text=text, prompt_text="40+2=", label="42")]


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


async def test_groups_wait_together_in_one_process(started_hooks: StartedHooks) -> None:
    pool = await started_hooks()
    assert CustomScorer(pool, RewardSection(reward_workers=8)).limit == 16, "of a reward service, whatever its workers"
    assert await scored(pool, *["together 40"] * 40) == [40.0] * 40
    assert len(pool.processes) == 1


@pytest.mark.extra
async def test_a_plain_function_has_one_group_at_a_time(started_hooks: StartedHooks) -> None:
    pool = await started_hooks(path="tests.support.reward_hooks:alone")
    assert CustomScorer(pool, RewardSection(reward_workers=8)).limit == 32
    assert await scored(pool, *["0.05"] * 6) == [1.0] * 6


async def test_a_late_group_is_cancelled_and_the_others_are_not(started_hooks: StartedHooks) -> None:
    pool = await started_hooks(4.0)
    first, waiting = pool.processes, asyncio.create_task(scored(pool, "late", "deaf"))
    await asyncio.sleep(2)
    others = asyncio.create_task(scored(pool, "wait 2.5", "wait 2.5"))  # they end after those two are late
    assert await waiting == [late("call was cancelled", 4.0)] * 2
    assert await scored(pool, "wait 0.1") == [0.1], "in a fresh process"
    assert await others == [2.5, 2.5]
    assert await scored(pool, "wait 0.1") == [0.1]
    assert first[0].exit_code() == -9, "what was late may have left something behind"
    assert len(pool.processes) == 1


@pytest.mark.extra
async def test_async_functions_that_never_wait_have_their_deadlines_one_after_the_other(started_hooks: StartedHooks) -> None:
    pool = await started_hooks(3.0)
    assert await scored(pool, *["compute 1.2"] * 5) == [1.2] * 5, "6 s in all"
