"""How fast a real engine is said to generate: while groups are under way, and in all."""

import asyncio
import itertools
import time

import pytest

from services.rollout import rollout_service
from services.rollout.rollout_service import WINDOW_SECONDS
from shared.schema.messages import Sampling
from tests.integration.engine.bench import NewBench
from tests.support.waiting import until

SAMPLES, TOKENS = 4, 400


@pytest.mark.extra
async def test_tokens_count_as_they_are_drawn_and_the_rate_adds_up_to_them(new_bench: NewBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_service, "RATE_SECONDS", 0.2)
    desk = await new_bench(rollout={"rollout_max_response_len": TOKENS})
    gauges, seen = desk.service.metrics.values, list[tuple[float, float]]()
    set_gauge = desk.service.metrics.set

    def noted(name: str, value: float, **labels: object) -> None:
        set_gauge(name, value)
        if name == "generated_tokens_per_s":
            seen.append((time.monotonic(), value))

    monkeypatch.setattr(desk.service.metrics, "set", noted)
    desk.working.append(asyncio.create_task(desk.rollout.measure()))
    await until(lambda: seen, "the engine's first count")
    for _ in range(3):  # a group that draws its end tokens early is over before it is seen
        await desk.task(n=SAMPLES, sampling=Sampling(temperature=1.0, max_new_tokens=TOKENS))
        done = desk.rollout.tokens
        await until(lambda done=done: max(gauges["generated_tokens"], desk.rollout.tokens) > done, "tokens", 240)
        under_way = desk.rollout.tokens == done
        await desk.client.pause("retract")  # as in a push
        await desk.client.resume()
        _, samples = await desk.generated()
        if under_way:
            break
    else:
        raise AssertionError("no tokens were counted before their group had ended")
    await until(lambda: gauges["generated_tokens"] == desk.rollout.tokens, "the count of the samples that came back", 60)
    await until(lambda: gauges["generated_tokens_per_s"] == 0, "an engine at rest", 60)
    assert len(samples) == SAMPLES
    total = desk.rollout.tokens
    steps = [(now - before, rate) for (before, _), (now, rate) in itertools.pairwise(seen)]
    coarse = max(seconds for seconds, _ in steps) / WINDOW_SECONDS  # a busy machine reads late
    assert sum(seconds * rate for seconds, rate in steps) == pytest.approx(total, rel=0.05 + coarse), "rate times time"
    assert max(rate for _, rate in seen) <= total / WINDOW_SECONDS, "no window holds more than all"
