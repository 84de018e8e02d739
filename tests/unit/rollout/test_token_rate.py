"""The rate of generation, and speculation that is switched by it."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from services.rollout import rollout_service
from services.rollout.engine.transport import EngineUnreachable, parse_generated_tokens
from services.rollout.rollout_service import WINDOW_SECONDS, GeneratedTokens, Rollout, TokenRate
from services.rollout.speculation_switch import ENOUGH, TURN_SECONDS, LoadWindows, RateWindow, SpeculationTrial, has_turn
from services.rollout.speculation_switch import WINDOW_SECONDS as SWITCH_SECONDS
from shared.schema.service_messages import ServiceStatus
from tests.support.tables import table
from tests.support.valid_messages import example


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
sglang:realtime_tokens_total{dp_rank="1",mode="decode",num_prefill_ranks="0",tp_rank="2"} 3.0
sglang:realtime_tokens_total{dp_rank="1",mode="decode",num_prefill_ranks="1",tp_rank="2"} 1.0
sglang:realtime_tokens_total{dp_rank="1",mode="decode",num_prefill_ranks="1",tp_rank="3"} 1.0
sglang:queue_time_seconds_count{dp_rank="0",pp_rank="0",tp_rank="0"} 64.0
sglang:queue_time_seconds_count{dp_rank="0",pp_rank="1",tp_rank="0"} 64.0
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


# --- an engine of ``speculation = "auto"`` speculates while that gives more than it costs, by rates at like load

START, END = 10.0, 6000.0
Rates = Callable[[float, bool], float]
"""Tokens/s at a time, with speculation or without."""


def switches(rates: Rates, load: Callable[[float, bool], int] = lambda now, speculates: 32) -> list[tuple[float, bool, str]]:
    """Returns when an engine is restarted, whether it speculates then, and why; its rates have 5 % of noise."""
    trial, windows, noise = SpeculationTrial(), LoadWindows(), random.Random(1)
    now, tokens, speculates, life, found = 0.0, 0.0, True, 0, list[tuple[float, bool, str]]()
    while now < END:
        now += 1.0
        tokens += rates(now, speculates) * noise.gauss(1.0, 0.05)
        trial.runs(speculates, now)
        if (window := windows.note(now, tokens, load(now, speculates), life)) is not None:
            trial.note(window)
        if not now % 5 and (words := trial.decide(now, START)) is not None:
            speculates, life, now = not speculates, life + 1, now + START
            found.append((now, speculates, words))
    return found


def constant(gain: float) -> Rates:
    return lambda now, speculates: 1000.0 * (gain if speculates else 1.0)


@table(
    ("rates", "speculates", "restarts"),
    [
        (constant(1.6), True, range(2, 3)),  # to measure plain decoding, and back
        (constant(1.08), True, range(2, 3)),
        (constant(0.6), False, range(5, 14)),  # and tries again, ever more seldom
        (constant(1.0), None, range(1, 4)),  # either, and no restart for nothing
        (lambda now, on: 1000.0 if not on else 600.0 if now < 2500 else 1700.0, True, range(4, 10)),  # the draft becomes better
        (lambda now, on: 1000.0 if not on else 1600.0 if now < 2500 else 500.0, False, range(3, 10)),  # the policy leaves it behind
        (lambda now, on: (1000.0 if not on else 1600.0) / (1 + now / 2000), True, range(2, 12)),  # both slow down: contexts grow
        (lambda now, on: 0.0, True, range(1)),
    ],
)
def test_it_ends_with_what_is_faster(rates: Rates, speculates: bool | None, restarts: range) -> None:
    found = switches(rates)
    changed = [speculates for _, speculates, _ in found]
    assert speculates in (None, (changed or [True])[-1]) and len(found) in restarts, found
    assert changed == [bool(index % 2) for index in range(len(changed))]


def test_time_without_its_gain_is_bounded() -> None:
    """Of 6,000 s an engine that is slower with speculation runs few with it, and says why it stopped by its figures."""
    found = switches(constant(0.5))
    ends = [*(at for at, _, _ in found[1:]), END]
    slow = found[0][0] + sum(end - begin for (begin, speculates, _), end in zip(found, ends, strict=True) if speculates)
    assert slow < 0.15 * END
    assert "it costs more than it gives: 5" in found[2][2] and "at about 32 requests" in found[2][2], found


def test_rates_at_other_loads_are_not_compared() -> None:
    found = switches(constant(0.2), lambda now, speculates: 64 if speculates else 4)
    assert all("tokens/s" not in words for _, _, words in found) and [speculates for _, speculates, _ in found][:2] == [False, True]


def test_windows_are_of_one_load_and_one_state() -> None:
    windows, found = LoadWindows(), list[RateWindow | None]()
    for second in range(60):
        running = 0 if 12 <= second < 14 else 8 if second < 30 else 24
        found.append(windows.note(float(second), 100.0 * second, running, state=second > 45))
    ends = [second for second, window in enumerate(found) if window is not None]
    assert ends == [10, 24, 40, 56] and {window for window in found if window is not None} == {RateWindow(6, 100.0), RateWindow(9, 100.0)}
    assert ends[0] == SWITCH_SECONDS and ENOUGH > 2  # a variance is known of them


def replica(number: int, state: str = "ready") -> ServiceStatus:
    return example(ServiceStatus, service="rollout", instance=f"r{number}", state=state, version=1)


def test_replicas_that_decide_at_the_same_time_restart_one_after_another() -> None:
    all_ready = [replica(number) for number in range(3)]
    turns = [{one.instance for one in all_ready if has_turn(one.instance, all_ready, at)} for at in range(int(3 * TURN_SECONDS))]
    assert set().union(*turns) == {"r0", "r1", "r2"} and max(map(len, turns)) == 1
    assert any(not one for one in turns), "a pause between two, in which the first is seen to be away"
    away = [replica(0, "starting"), *all_ready[1:]]
    assert not any(has_turn(one.instance, away, at) for one in away for at in range(int(3 * TURN_SECONDS)))
    assert has_turn("r0", [], 0.0), "alone"
    lent = [all_ready[0], replica(1, "asleep")]
    assert any(has_turn("r0", lent, at) for at in range(int(TURN_SECONDS))), "an engine on a trainer's GPUs is none of those that serve"
