"""The reward service: every environment of the run, each with a queue, a scorer and a limit of its own.

A consumer takes groups from a queue, reads and checks their samples, has them scored and filtered, and publishes the outcome. Here a
payload enters the run: what is valid says `shared.schema.sample.Sample.problem`; what was read may be scored, batched and trained.
"""

import asyncio
import contextlib
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from services.reward.custom_functions import FilterResult, is_scoring
from services.reward.remote_rewards import GroupJudge, Judge, JudgeCalls, RemoteScorer, prompt_text
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
from shared.bus import runs
from shared.bus.streams import generated_consumer
from shared.bus.work_queue import FETCH_SECONDS, MessageLease, WorkQueue
from shared.config.eval_views import missing_packages, named_rewards
from shared.config.reward_section import CUSTOM, JUDGE, REMOTE, WEIGHTED
from shared.config.run_config import RunConfig
from shared.environment.environment_client import open_environment
from shared.environment.protocol import EnvironmentFailed
from shared.hooks.filters import BUILT_IN
from shared.process.worker_pool import WorkerFailed
from shared.rewards.names import QUEUES, queue_of
from shared.runtime.errors import INFRASTRUCTURE, TASK, BadMessage, DeadlineExceeded, Fault, MessageTooLarge, PayloadMissing, raise_problems
from shared.runtime.tasks import cancelled
from shared.runtime.telemetry import declare_metrics
from shared.runtime.traces import Attributes, TraceSpan
from shared.schema import sample
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Failed, Generated, Scored
from shared.schema.sample import Sample, SampleLimits, Score
from shared.schema.service_messages import WORK, Doing
from shared.schema.versions import newest_possible
from shared.service.engine_load_balancer import model_routers
from shared.service.service_base import Service


class GroupFilter:
    """Applies the filters of a run. ``pool``: runs the user's own functions; None where the run has none."""

    def __init__(self, config: RunConfig, pool: HooksPool | None) -> None:
        # a rollout function of the user's calls the run's filters itself, or does not
        self._functions_own = config.rollout.rollout_function_path is not None
        self._pool = pool if any(not is_scoring(field) for field in hooks.paths(config, "reward")) else None
        self._built_in = BUILT_IN.get(config.rollout.dynamic_sampling_filter_path or "")
        self._args = hooks.Arguments(config)

    async def decide(self, group: str, samples: list[Sample], scores: list[Score]) -> FilterResult:
        """Returns the filters' outcome for a scored group. Raises DeadlineExceeded, WorkerFailed or BadMessage: the group is given up."""
        if is_evaluation(group) or self._functions_own:
            return FilterResult(scores)
        if self._pool is not None:
            return await self._pool.select(samples, scores)
        if self._built_in is None:
            return FilterResult(scores)
        # one that comes with Myxo looks at rewards alone and cannot hang: no process, no copy of the samples
        shown = [hooks.HookSample(reward=score.reward) for score in scores]
        for one, stored in zip(shown, samples, strict=True):
            one.role = stored.role  # type: ignore[attr-defined]
        output = self._built_in(self._args, shown)
        return FilterResult(scores, None if output.keep else output.reason)


class PayloadReader:
    """Reads groups out of the store. One for all queues of a service. ``vocabulary``: that of the run's model
    (`shared.bus.runs.vocabulary`)."""

    def __init__(self, service: Service, vocabulary: int) -> None:
        self._service, self._limits = service, SampleLimits(vocabulary, log_probs_reader=service.config.log_probs_reader)
        self._newest = -1

    async def read(self, group: Generated) -> list[Sample]:
        """Returns a group's samples, all valid. Raises BadMessage, which names sample and field; PayloadChanged, PayloadMissing."""
        blobs = await self._service.store.read(group.payload)
        samples = sample.decode(blobs, self._limits)
        newest = max((version for item in samples for _, _, version in item.segments), default=0)
        if newest > self._newest:  # seldom: when a push has ended since
            live = await runs.live_version(self._service.bus, self._service.run)
            self._newest = newest_possible(live, self._service.config.rollout.max_staleness)
        if newest > self._newest:
            for item in samples:
                item.check(replace(self._limits, newest=self._newest))
        _check_reference(group, samples)
        return samples


def _check_reference(group: Generated, samples: list[Sample]) -> None:
    if len(samples) != len(group.samples):
        raise BadMessage(f"{group.group}: the payload holds {len(samples)} samples, its reference {len(group.samples)}")
    if not samples:
        raise BadMessage(f"{group.group}: the payload holds no sample")
    lengths = tuple(item.length for item in samples)
    if lengths != group.payload.tokens:
        raise BadMessage(f"{group.group}: the payload's samples have {_few(lengths)} tokens, by its reference {_few(group.payload.tokens)}")
    if sample.rollouts(samples) != tuple(group.rollouts):
        raise BadMessage(f"{group.group}: the payload's samples come from other rollouts than its reference says")
    for position, (item, meta) in enumerate(zip(samples, group.samples, strict=True)):
        if (item.group, item.index) != (group.group, position):
            raise BadMessage(f"{group.group}: the payload holds sample {item.name[:100]} in the place of {group.group}/{position}")
        if item.meta() != meta:
            raise BadMessage(f"sample {item.name}: its reference says {meta}, the payload {item.meta()}")


def _few(lengths: tuple[int, ...]) -> str:
    return str(list(lengths[:8])) if len(lengths) <= 8 else f"{list(lengths[:8])} and {len(lengths) - 8} more"


def score_span(group: Generated, outcome: Scored | Failed, started: float, ended: float) -> TraceSpan:
    """Returns the span of scoring that ended with ``outcome``. Times are seconds since the epoch."""
    known: Attributes = {"group": group.group, "attempt": group.attempt, "environment": group.environment}
    error = ""
    if isinstance(outcome, Scored):
        known |= {"rewards": outcome.rewards, "unread": len(outcome.unread), "filtered": outcome.filtered}
    else:
        error = outcome.reason
    return TraceSpan(trace=group.group, name="score", started=started, ended=ended, error=error, attributes=known)


declare_metrics("""
    samples_scored_total | samples | scored since the service started
    groups_scored_total{environment} | groups | scored since the service started
    groups_not_scored_total{environment} | groups | that could not be scored
    groups_tried_again_total{environment} | groups | handed to another service, or to the same once more, since processes or servers had
        failed
    responses_unread_total{environment} | samples | that the verifier could not read
    score_seconds_total{environment} | s | spent on scoring, summed over groups
""")

_ON_INPUT = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""Errors of code on input that no one has thought of: it costs the group that brought it, not the service. Errors of servers are not
among them."""


SLOW_SECONDS = 30.0  # scoring that takes so long, and longer than its time limit, is stuck
HAND_BACK_SECONDS = 1.0  # The time after which a group goes to another service, or to this one again, where no other is


class GroupConsumer:
    """A queue and its groups in progress; a slow environment delays only the groups of its own queue. ``scorer``: says how many groups of
    the queue are in hand at once, and when it takes work. ``router``: scores them."""

    def __init__(self, service: Service, reader: PayloadReader, scorer: Scorer, router: RewardRouter, group_filter: GroupFilter) -> None:
        self._service, self._reader, self._scorer, self._router, self._filter = service, reader, scorer, router, group_filter
        consumer = generated_consumer(service.run, service.config.bus, scorer.name)
        self._queue = WorkQueue(service.bus, consumer, Generated, self._give_up, service.instance)
        self.in_hand: set[asyncio.Task[None]] = set()
        self._scoring: dict[str, float] = {}  # group → when its scoring began, seconds since the epoch, the oldest first
        service.activities.watch(self.doing)

    async def run(self) -> None:
        """Scores until cancelled. Raises the error that keeps an outcome from being sent."""
        limit, running = self._scorer.limit, self.in_hand
        while True:
            if await self._may_fetch():
                for lease in await self._queue.fetch(limit - len(running)):
                    running.add(self._service.spawn(self._handle(lease)))
            if len(running) >= limit:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in running if task.done()]:
                running.discard(task)
                task.result()

    def doing(self) -> Doing | None:
        """Returns what the environment does with the groups in hand, since it began with the oldest one."""
        if not self._scoring:
            return None
        oldest, since = next(iter(self._scoring.items()))
        limit = self._service.config.reward.reward_timeout
        groups = f"{len(self._scoring)} {'group' if len(self._scoring) == 1 else 'groups'}"
        what = f"scores {groups} by {self._scorer.name}, the oldest is {oldest}"
        after = f"a verifier is given up after reward.reward_timeout = {limit:g} s, remote ones after their own timeouts"
        return Doing(part=WORK, what=what, since=since, next_action=after, stuck=time.time() - since > max(limit, SLOW_SECONDS))

    async def close(self) -> None:
        """Drops the groups in progress, and hands them back to the queue."""
        await cancelled(self.in_hand)

    async def _may_fetch(self) -> bool:
        """Returns whether the environment takes work, and outcomes have room; waits a while where not."""
        if self._service.held_back:
            await asyncio.sleep(FETCH_SECONDS)
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FETCH_SECONDS):
                for event in self._scorer.opens:
                    await event.wait()
        return all(event.is_set() for event in self._scorer.opens)

    async def _handle(self, lease: MessageLease[Generated]) -> None:
        started = time.time()
        try:
            async with lease.held():
                if (outcome := await self._outcome(lease)) is None:
                    return await lease.hand_back(delay=HAND_BACK_SECONDS)
                try:
                    await self._service.report(outcome)
                except (MessageTooLarge, *_ON_INPUT) as error:  # the latter: what does not go into a message
                    outcome = self._failed(lease.message, str(error), TASK)
                    await self._service.report(outcome)
        except asyncio.CancelledError:
            await lease.hand_back()
            raise
        await lease.ack()
        if self._service.traces.on:
            self._service.traces.add(score_span(lease.message, outcome, started, time.time()))

    async def _give_up(self, failed: Failed) -> None:
        self._service.metrics.add("groups_not_scored", environment=self._scorer.name)
        await self._service.report(failed)

    async def _outcome(self, lease: MessageLease[Generated]) -> Scored | Failed | None:
        """Returns a group's outcome; None where it is tried once more, since it was not scored for a fault that is not its own."""
        group = lease.message
        log = self._service.log.bind(group=group.group, environment=group.environment)
        if lease.exhausted:
            return self._failed(group, f"given up after {lease.deliveries - 1} deliveries", INFRASTRUCTURE)
        try:
            return await self._scored(group, log)
        except (PayloadMissing, BadMessage, WorkerFailed, EnvironmentFailed, DeadlineExceeded) as error:
            away = not all(event.is_set() for event in self._scorer.opens)
            if error.fault == INFRASTRUCTURE and (lease.deliveries == 1 or away):
                log.warning("group_handed_back", error=str(error))
                self._service.metrics.add("groups_tried_again", environment=group.environment)
                return None
            (log.error if error.fault == TASK else log.warning)("group_not_scored", error=str(error), fault=error.fault)
            return self._failed(group, str(error), error.fault)
        except _ON_INPUT as error:
            log.exception("group_not_scored")
            return self._failed(group, f"{type(error).__name__}: {error}", TASK)

    async def _scored(self, group: Generated, log: Any) -> Scored:
        samples = await self._reader.read(group)
        scores = await self._timed(group, samples)
        decided = await self._filter.decide(group.group, samples, scores)
        metrics, final = self._service.metrics, decided.scores
        metrics.add("samples_scored", len(scores))
        metrics.add("groups_scored", environment=group.environment)
        unread = tuple((index, score.unread) for index, score in enumerate(final) if score.unread)
        if unread:
            metrics.add("responses_unread", len(unread), environment=group.environment)
            log.warning("responses_unread", samples=dict(unread))
        return Scored(
            **dict(group) | {"samples": [item.meta(item.token_digest()) for item in samples]},
            rewards=[score.reward for score in final],
            parts=tuple(score.parts for score in final) if any(score.parts for score in final) else (),
            removed=tuple(index for index, score in enumerate(final) if score.removed),
            unread=unread,
            filtered=decided.filtered,
        )

    async def _timed(self, group: Generated, samples: list[Sample]) -> list[Score]:
        started = time.monotonic()
        self._scoring[group.group] = time.time()
        try:
            return await self._router.score(group, samples)
        finally:
            self._scoring.pop(group.group, None)
            self._service.metrics.add("score_seconds", time.monotonic() - started, environment=group.environment)

    def _failed(self, group: Generated, reason: str, fault: Fault) -> Failed:
        self._service.metrics.add("groups_not_scored", environment=group.environment)
        by = self._service.instance
        return Failed(group=group.group, attempt=group.attempt, reason=reason, by=by, fault=fault, payload=group.payload)


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
            remote = RemoteScorer(config, await asyncio.to_thread(prompt_text, service.config))
            opened.push_async_callback(remote.close)
            scorers.append(remote)
        if JUDGE in queues:
            calls = JudgeCalls(service.config)
            opened.push_async_callback(calls.close)
            scorers += [Judge(config, calls), GroupJudge(config, calls)]
        if WEIGHTED in queues:
            scorers.append(WeightedScorer(config, {scorer.name: scorer for scorer in scorers}))
        group_filter = GroupFilter(service.config, functions)
        reader = PayloadReader(service, await runs.vocabulary(service.bus, service.run))
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
    config, scorers, queues = service.config.reward, list[Scorer](), service.config.queues()
    raise_problems([*missing_packages(service.config)])
    named = {queue_of(name) for _, name in named_rewards(service.config)}
    for queue in sorted(set(QUEUES.values()).intersection(queues)):
        names = [name for name in QUEUES if QUEUES[name] == queue]
        pool = VerifierPool(queue, names, config.reward_workers, sandbox=service.config.sandbox)
        opened.push_async_callback(pool.close)
        if queue in named:  # those of prompts start later: a first group should not wait for imports, or find that there is no sandbox
            await pool.start()
        scorers.append(VerifierScorer(queue, pool, service.config))
    if functions is not None and CUSTOM in queues:
        scorers.append(CustomScorer(functions, config))
    return scorers


async def _count(service: Service, consumers: list[GroupConsumer]) -> None:
    while True:
        service.metrics.set("scoring", sum(len(consumer.in_hand) for consumer in consumers))
        await asyncio.sleep(POLL_INTERVAL_S)
