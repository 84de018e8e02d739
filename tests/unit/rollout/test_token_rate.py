"""The rate of generation: its integral over a run is the run's tokens, whatever groups end when."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from services.rollout import rollout_service
from services.rollout.engine.transport import EngineUnreachable, parse_generated_tokens
from services.rollout.rollout_service import WINDOW_SECONDS, GeneratedTokens, Rollout, TokenRate


def integral(times: list[float], counts: list[float]) -> tuple[float, list[float]]:
    """Rate times time over all readings, and the rates."""
    rate = TokenRate()
    rates = [rate.note(now, count) for now, count in zip(times, counts, strict=True)]
    return sum(value * (now - before) for value, now, before in zip(rates[1:], times[1:], times, strict=False)), rates


@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_rate_times_time_is_the_true_count(jitter: float) -> None:
    """A minute of generation at changing speeds, then a pause: regular readings give the count itself, irregular ones nearly."""
    dice = random.Random(3)
    times, counts = [0.0], [0.0]
    for second in range(80):
        speed = 0 if second in range(20, 31) or second >= 60 else dice.choice([100, 1000, 3000])
        times.append(times[-1] + 1 + dice.uniform(-jitter, jitter))
        counts.append(counts[-1] + speed * (times[-1] - times[-2]))
    total, rates = integral(times, counts)
    assert total == pytest.approx(counts[-1], rel=0.02 if jitter else 1e-9)
    assert max(rates) <= 3000 * (1 + 1e-9), "no rate is above the fastest second"
    assert rates[28] == rates[-1] == 0, "nothing was drawn for a window"


def test_a_pause_ends_in_zero_and_a_long_gap_between_readings_is_spread() -> None:
    rate = TokenRate()
    assert rate.note(0.0, 0) == 0
    assert rate.note(1.0, 500) == 500 / WINDOW_SECONDS, "before the first reading nothing was drawn"
    assert rate.note(21.0, 2500) == 100, "2000 tokens in 20 s"
    assert rate.note(21.0 + WINDOW_SECONDS, 2500) == 0


PAGE = """\
# HELP sglang:realtime_tokens_total Total number of tokens processed
sglang:realtime_tokens_total{dp_rank="0",mode="prefill_compute"} 960.0
sglang:realtime_tokens_total{dp_rank="0",mode="decode"} 1.9136e+04
sglang:realtime_tokens_total{dp_rank="1",mode="decode"} 4.0
sglang:queue_time_seconds_count{dp_rank="0"} 64.0
sglang:queue_time_seconds_sum{dp_rank="0"} 0.5
"""


def test_the_engines_own_count() -> None:
    assert parse_generated_tokens(PAGE, overlaps=False) == 19136 + 4 + 64
    assert parse_generated_tokens(PAGE, overlaps=True) == 19136 + 4
    assert parse_generated_tokens("sglang:gen_throughput{} 3.0\n", overlaps=False) is None


class Engine:
    """What `GeneratedTokens` asks of a client."""

    def __init__(self, *answers: int | Exception | None) -> None:
        self._answers = list(answers)

    async def generated_tokens(self, *, deadline: float) -> int | None:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_engines_come_and_go_and_some_do_not_count() -> None:
    drawn = GeneratedTokens()
    first, second, third = Engine(1, 11, EngineUnreachable("", "gone")), Engine(1, 21), Engine(None, None)
    assert [await drawn.read(first, 0) for _ in range(3)] == [0, 10, 10], "its warm-up does not count"
    assert await drawn.read(None, 0) == 10
    assert [await drawn.read(second, 30) for _ in range(2)] == [10, 30]
    assert [await drawn.read(third, ended) for ended in (30, 37)] == [30, 37], "then groups count when they end"


async def gauges(takes_tasks: bool = True, held: int = 0) -> dict[str, float]:
    """What a replica without an engine shows once; its rollout function holds so many groups of four."""
    shown: dict[str, float] = {}
    parts: Any = {
        "_service": SimpleNamespace(metrics=SimpleNamespace(set=shown.__setitem__)),
        "_config": SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=4)),
        "replica": SimpleNamespace(client=None, takes_tasks=takes_tasks, serving=True),
        "producer": SimpleNamespace(held=held, tokens=0),
        "_slots": SimpleNamespace(note=lambda *_: None, slots=8, held={}),
    }
    rollout = SimpleNamespace(**parts, running={}, tokens=0, _players=[], _pace=None, _generated=True)
    rollout._note_generated, rollout._show_accepted = lambda _: None, lambda: None
    measuring = asyncio.create_task(Rollout.measure(rollout))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    measuring.cancel()
    return shown


async def test_samples_that_a_rollout_function_has_are_running_as_its_groups_are() -> None:
    shown = await gauges(held=3)
    assert (shown["running_groups"], shown["running_samples"]) == (3, 12)


async def test_an_engine_that_only_prefills_has_no_rate_that_could_be_called_idle() -> None:
    assert "generated_tokens_per_s" in await gauges() and "generated_tokens_per_s" not in await gauges(takes_tasks=False)


async def test_a_judge_s_tokens_are_not_the_policy_s(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[str, float] = {}
    replica = SimpleNamespace(client=None, serving=False, keep_engine=lambda: asyncio.sleep(0))
    monkeypatch.setattr(rollout_service, "Replica", lambda service: replica)

    @contextlib.asynccontextmanager
    async def background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(one) for one in work]
        await asyncio.wait(tasks, timeout=0.1)
        yield
        for task in tasks:
            task.cancel()

    service: Any = SimpleNamespace(metrics=SimpleNamespace(set=shown.__setitem__), background=background, stopping=asyncio.Event())
    service.stopping.set()
    await rollout_service.serve_model(service)
    assert set(shown) == {"model_tokens_per_s", "running_requests"}
