"""The reward service: every environment of the run, each with a queue, a scorer and a limit of its own."""

import asyncio

from services.reward.environment_health import EnvironmentHealthCheck
from services.reward.group_consumer import GroupConsumer
from services.reward.group_filter import GroupFilter
from services.reward.scorer import CustomScorer, ExternalScorer, Scorer, VerifierScorer
from services.reward.worker_pool import HooksPool
from shared import hooks
from shared.config.sections import CUSTOM, VERIFIERS
from shared.environment.environment_client import open_environment
from shared.runtime.service_base import Service

POLL_INTERVAL_S = 0.5
"""The interval at which the gauge of groups in progress is updated."""


class Reward:
    """Scores the groups of a run."""

    def __init__(self, service: Service) -> None:
        self._service, config = service, service.config.reward
        self._health_checks: list[EnvironmentHealthCheck] = []
        names = config.environment_names()
        verifiers = {name: VerifierScorer(name, config) for name in VERIFIERS if name in names}
        self._first = verifiers.get(config.rm_type)
        scorers: list[Scorer] = [*verifiers.values()]
        self._functions = HooksPool(service.config) if hooks.paths(service.config, "reward") else None
        if self._functions is not None and CUSTOM in names:
            scorers.append(CustomScorer(self._functions, config))
        for name, url in config.external.items():
            environment = open_environment(name, url, service.bus, service.run)
            self._health_checks.append(EnvironmentHealthCheck(service, environment))
            scorers.append(ExternalScorer(environment, self._health_checks[-1], service.run, config))
        group_filter = GroupFilter(service.config, self._functions)
        self._consumers = [GroupConsumer(service, scorer, group_filter) for scorer in scorers]

    async def run(self) -> None:
        """Scores until asked to stop. Raises ConfigError for a function that cannot be imported."""
        if self._functions is not None:
            await self._functions.start()
        if self._first is not None:  # the run's own verifier: its first group should not wait for imports
            await self._first.start()
        self._service.state = "ready"
        work = [*(check.run() for check in self._health_checks), *(consumer.run() for consumer in self._consumers), self._count()]
        try:
            async with self._service.background(*work):
                await self._service.stopping.wait()
        finally:
            await asyncio.gather(*(consumer.close() for consumer in self._consumers), *(check.leave() for check in self._health_checks))
            if self._functions is not None:
                await self._functions.close()

    async def _count(self) -> None:
        while True:
            self._service.metrics.set("scoring", sum(len(consumer.in_hand) for consumer in self._consumers))
            await asyncio.sleep(POLL_INTERVAL_S)


async def serve(service: Service) -> None:
    """Runs the reward service."""
    await Reward(service).run()
