"""Many sessions at once, over the whole way: tasks, the rollout services' agents, gateways, engines; and who uses the CPU for it."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.agents.pace import Load
from benchmarks.agents.site import GROUP, POLL_SECONDS, Site, used_between
from shared.bus.streams import generated_consumer, scored_consumer
from shared.bus.subjects import TRAIN
from shared.bus.work_queue import WorkQueue
from shared.runtime.errors import MyxoError
from shared.runtime.tasks import cancelled
from shared.schema import sample
from shared.schema.messages import Generated, Outcome, Task
from shared.schema.sample import Sample

CROWD_SECONDS = 1800.0
ENVIRONMENT = "exact"


@dataclass
class _Watched:
    """What is seen meanwhile. ``groups``: that have ended. ``most``: sessions in hand at once. ``memory``: MB of all gateways, at most."""

    groups: int = 0
    most: int = 0
    memory: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


async def crowded(site: Site, load: Load) -> dict[str, Any]:
    """Has all sessions played at once. Raises MyxoError where they have not ended in time."""
    groups, watched = -(-load.sessions // GROUP), _Watched()
    watching = [asyncio.create_task(work) for work in (_watch(site, watched), _take_samples(site, watched), _take_failures(site, watched))]
    before, begun = site.cpu(), time.monotonic()
    try:
        for number in range(groups):
            await site.bus.publish(site.subjects.task(TRAIN), _task(load, number))
        while watched.groups + len(watched.failed) < groups:
            if time.monotonic() - begun > CROWD_SECONDS:
                raise MyxoError(f"of {groups} groups {watched.groups} had ended after {CROWD_SECONDS:g} s")
            for task in watching:
                if task.done():
                    task.result()
            await asyncio.sleep(POLL_SECONDS)
        seconds = time.monotonic() - begun
    finally:
        await cancelled(watching)
    return _figures(load, groups * GROUP, watched, seconds, used_between(before, site.cpu()))


def _figures(load: Load, sessions: int, watched: _Watched, seconds: float, used: dict[str, float]) -> dict[str, Any]:
    told = [one.given_reward for one in watched.samples if isinstance(one.given_reward, dict)]
    drawn = sum(int(one.mask.sum()) for one in watched.samples)
    return {
        "sessions": sessions,
        "at_once": watched.most,
        "turns": load.turns,
        "lost": sessions - len({(one.group, one.rollout) for one in watched.samples}),
        "failures": watched.failed[:3],
        "refused": sum(one["refused"] for one in told),
        "refused_without_retry_after": sum(one["told_nothing"] for one in told),
        "seconds": round(seconds, 2),
        "tokens_per_s": round(drawn / seconds, 1),
        "requests_per_s": round(sessions * load.turns / seconds, 1),
        "gateway_mb": round(watched.memory, 1),
        "cpu_s": used,
        "cpu_ms_per_request": {name: round(1000 * spent / sessions / load.turns, 2) for name, spent in used.items()},
    }


def _task(load: Load, number: int) -> Task:
    text = load.texts(number)[0]
    return Task(
        group=f"g{number:08d}",
        n=GROUP,
        prompt=text,
        prompt_tokens=np.ones(1, np.int32),
        environment=ENVIRONMENT,
        label="",
        sampling=load.sampling,
        min_version=0,
    )


async def _take_samples(site: Site, watched: _Watched) -> None:
    queue = WorkQueue(site.bus, generated_consumer(site.run, site.config.bus, ENVIRONMENT), Generated)
    while True:
        for lease in await queue.fetch(16):
            watched.samples += sample.decode(await site.store.read(lease.message.payload))
            watched.groups += 1
            await lease.ack()


async def _take_failures(site: Site, watched: _Watched) -> None:
    queue = WorkQueue(site.bus, scored_consumer(site.run, site.config.bus), Outcome)
    while True:
        for lease in await queue.fetch(16):
            watched.failed.append(str(getattr(lease.message, "reason", lease.message)))
            await lease.ack()


async def _watch(site: Site, watched: _Watched) -> None:
    """Counts open sessions by what services tell of themselves."""
    while True:
        statuses = await site.registry.alive("rollout")
        watched.most = max(watched.most, int(sum(one.gauges.get("running_samples", 0) for one in statuses)))
        watched.memory = max(watched.memory, site.memory())
        await asyncio.sleep(0.5)
