"""The reward service: every environment of the run, each with a queue, a scorer and a limit of its own."""

from __future__ import annotations

import asyncio

from services.reward.intake import Intake
from services.reward.scorer import ExternalScorer, Scorer, VerifierScorer
from services.reward.watch import Watch
from shared.environment.client import open_environment
from shared.service import Service

LOOK_SECONDS = 0.5
"""How often the gauge of groups in hand is brought up to date."""


class Reward:
    """Scores the groups of a run."""

    def __init__(self, service: Service) -> None:
        self._service, config = service, service.config.reward
        self._watches: list[Watch] = []
        verifiers = {name: VerifierScorer(name, config) for name in config.environment_names() if name not in config.external}
        self._first = verifiers.get(config.rm_type)
        scorers: list[Scorer] = [*verifiers.values()]
        for name, url in config.external.items():
            environment = open_environment(name, url, service.bus, service.run)
            self._watches.append(Watch(service, environment))
            scorers.append(ExternalScorer(environment, self._watches[-1], service.run, config))
        self._intakes = [Intake(service, scorer) for scorer in scorers]

    async def run(self) -> None:
        """Scores until asked to stop."""
        if self._first is not None:  # the run's own verifier: its first group should not wait for imports
            await self._first.start()
        self._service.state = "ready"
        work = [*(watch.run() for watch in self._watches), *(intake.run() for intake in self._intakes), self._count()]
        try:
            async with self._service.background(*work):
                await self._service.stopping.wait()
        finally:
            await asyncio.gather(*(intake.close() for intake in self._intakes), *(watch.leave() for watch in self._watches))

    async def _count(self) -> None:
        while True:
            self._service.metrics.set("scoring", sum(len(intake.in_hand) for intake in self._intakes))
            await asyncio.sleep(LOOK_SECONDS)


async def serve(service: Service) -> None:
    """The body of the reward service."""
    await Reward(service).run()
