"""A run with a real reward service, and hands to give it work and take its results."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from services.reward.reward_service import serve
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.registry import ENVIRONMENT, Registry
from shared.bus.streams import scored_consumer
from shared.bus.subjects import Subjects
from shared.bus.work_queue import WorkQueue
from shared.config.eval_views import group_config
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.schema import sample
from shared.schema.digests import reference
from shared.schema.messages import Failed, Generated, Outcome
from shared.schema.sample import Sample
from shared.schema.service_messages import ServiceStatus
from shared.schema.weight_messages import WeightsLive
from shared.service.service_base import Service, attended
from shared.store.payload_store import Store
from tests.support.poison import Poison, poisoned
from tests.support.run_config import run_config
from tests.support.service_process import ServiceProcess
from tests.support.valid_messages import example
from tests.support.waiting import until

VOCABULARY = 100
"""Token ids of the run's model."""

LIVE = 3
"""The version that its replicas serve."""


class Bench:
    """A run with a reward service, and hands to give it work and take its results."""

    def __init__(self, bus: Bus, store: Store, config: RunConfig, urls: tuple[str, str], logs: Path) -> None:
        self.bus, self.store, self.config, self.names = bus, store, config, Subjects(config.run.name)
        self.nats_url, self._redis_url, self._logs = *urls, logs
        self._scored = WorkQueue(bus, scored_consumer(config.run.name, config.bus), Outcome)
        self.processes: list[ServiceProcess] = []
        self._inside: list[tuple[Service, asyncio.Task[None]]] = []

    async def serve(self) -> None:
        """Runs a reward service in this process, which starts in a third of the time, and waits until it is ready."""
        service = Service("reward", "reward-1", self.config.run.name, self.bus, self.config, self._redis_url)

        async def work() -> None:
            async with attended(service):
                await serve(service)

        task = asyncio.create_task(work())
        self._inside.append((service, task))
        await until(lambda: task.done() or service.state == "ready", "the service")
        if task.done():
            task.result()

    async def close(self) -> None:
        """Ends what it has started."""
        for process in self.processes:
            process.__exit__()
        for service, task in self._inside:
            service.stopping.set()
            await task
            await service.store.close()

    async def launch(self, instance: str = "reward-1") -> ServiceProcess:
        """Starts a reward service and waits until it is ready."""
        environment = {"NATS_URL": self.nats_url, "MYXO_RUN": self.config.run.name, "MYXO_INSTANCE": instance}
        process = ServiceProcess("reward", self._logs / f"{instance}.log", environment)
        self.processes.append(process)

        async def ready() -> bool:
            assert process.process.poll() is None, process.words()
            cards = await Registry(self.bus, self.config.run.name).alive("reward")
            return any((card.pid, card.state) == (process.process.pid, "ready") for card in cards)

        await until(ready, instance)
        return process

    async def generated(
        self,
        group: str,
        *texts: str,
        label: str | None = "42",
        environment: str | None = None,
        rollouts: list[int] | None = None,
        tokens: tuple[int, ...] | None = None,
        poison: Poison | None = None,
        given: dict[int, Any] | None = None,
        turns: dict[int, list[str]] | None = None,
        roles: tuple[str, ...] | None = None,
        **changes: Any,
    ) -> Generated:
        """Puts a group's samples into the store and their reference on the queue of ``environment`` (None: the run's own).

        ``rollouts``: of each sample, where several come from one. ``tokens``: their
        lengths, as the reference says. ``poison``: a change of the last one. ``given``: rewards that samples came with, by index.
        ``turns``: the model's own, of samples that have more in them. ``roles``: of each sample.
        """
        samples = [
            example(
                Sample,
                **{"group": group, "index": index, "response": [0, 1], "segments": [(0, 2, LIVE)], "text": text},
                **{"prompt_text": "40+2=", "label": label, "metadata": {"level": 3}},
                rollout=index if rollouts is None else rollouts[index],
                given_reward=(given or {}).get(index),
                turns=(turns or {}).get(index, []),
                role=roles[index] if roles else "",
            )
            for index, text in enumerate(texts)
        ]
        keys = [self.names.payload_key(group, 0, 0)]
        [blob] = sample.encode(samples, 1 << 20)
        blob = poisoned(blob, poison) if poison is not None else blob
        await self.store.write({keys[0]: blob})
        message = Generated(
            group=group,
            attempt=0,
            payload=reference(self.names.run, {keys[0]: blob}, tokens or [one.length for one in samples]),
            samples=[one.meta() for one in samples],
            rollouts=rollouts or [],
            replica="replica-1",
            environment=environment or group_config(self.config, group).reward.environment_of(None),
            started=1.0,
            ended=2.0,
        ).model_copy(update=changes)
        await self.bus.publish(self.names.generated(message.environment), message)
        return message

    async def outcomes(self, count: int) -> dict[str, Outcome]:
        """The next so many results, by group."""
        found: dict[str, Outcome] = {}

        async def enough() -> bool:
            for lease in await self._scored.fetch(count):
                assert lease.message.group not in found
                found[lease.message.group] = lease.message
                await lease.ack()
            return len(found) >= count

        await until(enough, f"{count} outcomes")
        return found

    async def card(self, environment: str, state: str) -> ServiceStatus:
        """The card of an external environment, as soon as it is in that state."""

        async def there() -> ServiceStatus | None:
            cards = await Registry(self.bus, self.config.run.name).alive(ENVIRONMENT)
            return next((card for card in cards if (card.instance, card.state) == (environment, state)), None)

        card: ServiceStatus = await until(there, f"{environment} {state}")
        return card

    async def failure(self, group: str) -> str:
        """The reason why the only group in work failed."""
        [(name, outcome)] = (await self.outcomes(1)).items()
        assert name == group
        assert isinstance(outcome, Failed), outcome
        return outcome.reason


NewBench = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def bench(
    bus: Bus, store: Store, nats: EmbeddedNats, valkey: EmbeddedValkey, run_name: str, tmp_path: Path
) -> AsyncIterator[NewBench]:
    """Makes the test's run, with config sections laid over the smallest config."""
    benches: list[Bench] = []

    async def make(**sections: dict[str, Any]) -> Bench:
        config = run_config(tmp_path, run={"name": run_name}, **sections)
        await runs.create(bus, config, valkey.url, VOCABULARY)
        live = WeightsLive(version=LIVE, replicas=[], seconds=1.0, bytes=1, at=1.0)
        await bus.put(Subjects(run_name).weights_bucket, "live", live.encode())
        benches.append(Bench(bus, store, config, (nats.url, valkey.url), tmp_path))
        return benches[-1]

    yield make
    for one in benches:
        await one.close()
