"""The reward service: every environment of the run, each with a queue, a scorer and a limit of its own."""

import asyncio
from contextlib import AsyncExitStack

from services.reward.group_consumer import GroupConsumer, GroupFilter, PayloadReader
from services.reward.judge import GroupJudge, Judge, JudgeCalls
from services.reward.remote_rewards import RemoteScorer, prompt_text
from services.reward.scorer import (
    CustomScorer,
    EnvironmentHealthCheck,
    ExternalScorer,
    HooksPool,
    RewardRouter,
    Scorer,
    VerifierPool,
    VerifierScorer,
    WeightedScorer,
)
from shared import hooks
from shared.config.reward_section import CUSTOM, JUDGE, REMOTE, WEIGHTED
from shared.environment.environment_client import open_environment
from shared.rewards.names import QUEUES, queue_of
from shared.runtime.telemetry import declare_metrics
from shared.service.engine_load_balancer import model_routers
from shared.service.service_base import Service

declare_metrics("scoring | groups | what is being scored")

POLL_INTERVAL_S = 0.5  # The interval at which the gauge of groups in progress is updated


async def serve(service: Service) -> None:
    """Scores the groups of a run until asked to stop. Raises ConfigError for a function that cannot be imported."""
    async with model_routers(service), AsyncExitStack() as opened:
        functions = HooksPool(service.config) if hooks.paths(service.config, "reward") else None
        if functions is not None:
            opened.push_async_callback(functions.close)
            await functions.start()
        scorers = await _own_scorers(service, functions, opened)
        checks = []
        for name, url in service.config.reward.external.items():
            environment = open_environment(name, url, service.bus, service.run)
            opened.push_async_callback(environment.close)
            checks.append(EnvironmentHealthCheck(service, environment))
            scorers.append(ExternalScorer(environment, checks[-1], service.config))
        config, queues = service.config.reward, service.config.queues()
        if REMOTE in queues:
            remote = RemoteScorer(config, prompt_text(service.config))
            opened.push_async_callback(remote.close)
            scorers.append(remote)
        if JUDGE in queues:
            calls = JudgeCalls(config)
            opened.push_async_callback(calls.close)
            scorers += [Judge(config, calls), GroupJudge(config, calls)]
        if WEIGHTED in queues:
            scorers.append(WeightedScorer(config, {scorer.name: scorer for scorer in scorers}))
        group_filter = GroupFilter(service.config, functions)
        reader = await PayloadReader.open(service)
        router = RewardRouter(service.config, {scorer.name: scorer for scorer in scorers})
        consumers = [GroupConsumer(service, reader, scorer, router, group_filter) for scorer in scorers]
        service.state = "ready"
        work = [*(check.run() for check in checks), *(consumer.run() for consumer in consumers), _count(service, consumers)]
        try:
            async with service.background(*work):
                await service.stopping.wait()
        finally:
            await asyncio.gather(*(consumer.close() for consumer in consumers), *(check.leave() for check in checks))


async def _own_scorers(service: Service, functions: HooksPool | None, opened: AsyncExitStack) -> list[Scorer]:
    config, scorers = service.config.reward, list[Scorer]()
    queues = service.config.queues()
    for queue in sorted(set(QUEUES.values()).intersection(queues)):
        names = [name for name in QUEUES if QUEUES[name] == queue]
        pool = VerifierPool(queue, names, config.reward_workers, sandbox=service.config.sandbox)
        opened.push_async_callback(pool.close)
        if queue == queue_of(config.rm_type):  # the run's own verifier: its first group should not wait for imports
            await pool.start()
        scorers.append(VerifierScorer(queue, pool, service.config))
    if functions is not None and CUSTOM in queues:
        scorers.append(CustomScorer(functions, config))
    return scorers


async def _count(service: Service, consumers: list[GroupConsumer]) -> None:
    while True:
        service.metrics.set("scoring", sum(len(consumer.in_hand) for consumer in consumers))
        await asyncio.sleep(POLL_INTERVAL_S)
