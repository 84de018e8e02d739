"""The rollout service on the bus: it takes tasks while its replica serves weights, stores samples, and publishes references to them."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from pydantic import ValidationError

from services.rollout.agents.agent_groups import AgentGroups
from services.rollout.agents.gateways import Gateways
from services.rollout.custom_generate import CustomGenerate
from services.rollout.engine.decode_graphs import FLAG, captured_requests
from services.rollout.engine.engine_errors import EngineError, InvalidRequest
from services.rollout.engine_nodes.engine_follower import follow
from services.rollout.engine_profiler import EngineProfiler
from services.rollout.episodes import EpisodeGenerate
from services.rollout.generate import generate_group
from services.rollout.generation_spans import handed_back
from services.rollout.in_flight import InFlight, Stopped
from services.rollout.partial_samples import UNROUTED, restored, samples_of
from services.rollout.played_group import PlayedGroup
from services.rollout.producer.active_producer import ActiveProducer
from services.rollout.producer.engine_spread import EngineSpread
from services.rollout.producer.evaluator import Evaluator
from services.rollout.producer.producer import Producer
from services.rollout.replica import Replica
from services.rollout.request_slots import GroupSlots, RequestSlots
from services.rollout.router import Router, router_url
from services.rollout.sample_seeds import SampleSeeds
from services.rollout.task_outcomes import TaskOutcomes
from services.rollout.token_rate import DrawnTokens, TokenRate
from services.rollout.weight_catch_up import WeightCatchUp
from services.rollout.weight_receiver import WeightsReceiver
from shared.bus.bus_errors import StreamFull
from shared.bus.registry import ENGINE_NODE
from shared.bus.streams import task_consumer
from shared.bus.subjects import EVAL, TRAIN
from shared.bus.work_queue import MessageLease, WorkQueue
from shared.config import devices, sglang_flags
from shared.data.tokenizer import Tokenizer
from shared.hooks import HookFailed
from shared.hooks.loading import eval_function, generate_paths, paths
from shared.model.replayed_choices import replayed_choices
from shared.runtime.errors import INFRASTRUCTURE, TASK, BadMessage, DeadlineExceeded, MyxoError, raise_problems
from shared.runtime.tasks import cancelled, fatal
from shared.runtime.telemetry import MetricSpec, declare_metrics
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Generated, Interrupted, Task
from shared.schema.sample import Sample
from shared.schema.service_messages import Doing
from shared.service.activities import WORK
from shared.service.service_base import Service
from shared.store.payload_store import StoreFull

declare_metrics(
    MetricSpec("generated_tokens_per_s", "tokens/s", "tokens that the replica's engine has drawn in the last 5 s / 5 s; read every second"),
    MetricSpec(
        "generated_tokens",
        "tokens",
        "tokens that its engines have drawn since the service started: response tokens, of samples that ended, were aborted or are "
        "under way",
    ),
    MetricSpec("running_groups", "groups", "that are being generated"),
    MetricSpec("running_samples", "samples", "of groups that are being generated, those that have ended included"),
    MetricSpec(
        "request_slots", "requests", "that the replica may have in its engine at once: `rollout_concurrency`, or by the engine's load"
    ),
    MetricSpec("used_slots", "requests", "that it has in its engine now, or rollouts of functions and agents"),
    MetricSpec("running_requests", "requests", "that the engine computes now, by its own count"),
    MetricSpec("queued_requests", "requests", "that wait in the engine for its memory, by its own count"),
    MetricSpec("kv_usage", "", "share of the engine's memory for keys and values that is in use"),
    MetricSpec(
        "lost_rollouts",
        "rollouts",
        "that were given up since it started, since their function ([hooks](hooks.md#generating)) or agent failed too often or was late",
    ),
    MetricSpec(
        "aborted_rollouts",
        "rollouts",
        "[surplus rollouts](agents.md#surplus-rollouts) that were aborted, or ended too late, since the others had ended",
        counter=True,
    ),
)

POLL_INTERVAL_S = 0.05
"""The interval at which a replica checks whether it has weights, free capacity, or stale generations."""

PUSH_SECONDS = 4.0
"""The time that a stopping replica stays for a push that it has agreed to take part in."""

HAND_ON_SECONDS = 1.5
"""The time that a stopping replica waits until its unfinished groups are stored and handed on."""

RETRY_SECONDS = 1.0
"""The pause after the engine could not be asked to abort stale requests."""

Generator = Callable[[Task, list[Sample], InFlight | None, GroupSlots], Awaitable[PlayedGroup]]
"""Generates a task, going on from what an earlier attempt left."""

FETCHED_GROUPS = 8
"""The most groups that are taken at once: replicas that have room take turns then."""

QUIET_SECONDS = 10.0
"""An engine with groups in hand that draws no token for so long does not go on, or waits for agents and environments."""

RATE_SECONDS = 1.0
"""The interval at which the engine's token count is read and the gauges are set."""

FIRST_SECONDS = 0.1
"""The same until it is known that the replica, which serves, has drawn its first tokens."""


class Rollout:
    """The rollout service of one replica.

    Attributes:
        tokens: generated tokens of the groups that have ended. running: the groups in hand.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._config = service, service.config
        self._tokenizer = Tokenizer(service.config.model.hf_checkpoint)
        self.replica = Replica(service)
        captured = captured_requests(service.config, devices.resolve(service.config.rollout.rollout_device))
        self.in_flight, self._slots = InFlight(service.config), RequestSlots(service.config, captured)
        if captured is not None and self._slots.limit > captured:
            service.log.warning("slots_beyond_graphs", slots=self._slots.limit, captured=captured, flag=FLAG)
        self._seeds, self._choices = SampleSeeds.of(service.config), replayed_choices(service.config)
        self.weights = WeightsReceiver(service, self.replica)
        self._catch_up = WeightCatchUp(service, self.replica, self.weights.expects_push)
        self._custom = CustomGenerate(service, self.replica, self._tokenizer)
        self._agents = AgentGroups(service, self.replica, self._tokenizer, Gateways(service))
        steps = service.config.episode.episode_url is not None
        self._episodes = EpisodeGenerate(service, self.replica, self._tokenizer) if steps else None
        self._hooks = bool(paths(service.config))
        self._outcomes = TaskOutcomes(service)
        function = self._config.rollout.rollout_function_path
        self.spread = EngineSpread(service, self.replica)
        parts = (self.replica, self.spread, self._outcomes, self._tokenizer, self._count)
        self.producer = None if function is None else Producer(service, *parts)
        self.evaluator = None if eval_function(self._config) is None else Evaluator(service, self.replica)
        self.running: dict[asyncio.Task[None], Task] = {}
        self._taken: dict[asyncio.Task[None], tuple[float, GroupSlots]] = {}  # when each was taken, seconds since the epoch, oldest first
        self._generated = False  # a token of a task has been drawn
        self._drawn = (0.0, time.time())  # tokens of the engine, and when there were more the last time
        service.activities.watch(self.doing)
        self.tokens = 0

    async def run(self) -> None:
        """Generates until asked to stop; the groups in progress are then handed on, or go back to the queue."""
        service = self._service
        await self.start_functions()
        await self.weights.listen()
        await self._catch_up.listen()
        routers = [Router(service, url)] if (url := router_url()) else []
        work = [self.replica.keep_engine(), self.replica.keep_nodes(), self._catch_up.keep()]
        work += [self.evaluate(), self.measure(), self.stop_stale()]
        if self._config.ingest.ingest_groups != "alone":
            work.append(self.produce())
        work += [router.keep() for router in routers]
        if (profiler := EngineProfiler(service, self.replica)).wanted:
            work.append(profiler.run())
        async with service.background(*work):
            try:
                await service.stopping.wait()
            finally:
                await asyncio.gather(self.in_flight.leave(self.replica.client), self.weights.settled(PUSH_SECONDS))
                if self.running:
                    await asyncio.wait(self.running, timeout=HAND_ON_SECONDS)
                await cancelled(self.running)
                await self.close_functions()
                for router in routers:
                    await router.leave()
                await self._outcomes.close()

    async def start_functions(self) -> None:
        """Starts the processes of the run's generate functions and agents, if it has some. Raises ConfigError."""
        if generate_paths(self._config):
            await self._custom.start()
        await self._agents.start()

    async def close_functions(self) -> None:
        """Kills the processes of generate functions and agents, and closes the connections of episodes."""
        await self._custom.close()
        await self._agents.close()
        if self._episodes is not None:
            await self._episodes.close()

    async def produce(self) -> None:
        """Generates training prompts, or has the user's rollout function do it in one of the replicas."""
        await (self.take(TRAIN) if self.producer is None else ActiveProducer(self._service, self.producer, self.spread).run())

    async def evaluate(self) -> None:
        """Generates held-out prompts, or has the user's own function do it."""
        await (self.take(EVAL) if self.evaluator is None else self.evaluator.run())

    async def take(self, task_class: str) -> None:
        """Fetches tasks of a class while the replica serves and has capacity for it."""
        service = self._service
        queue = WorkQueue(service.bus, task_consumer(service.run, self._config.bus, task_class), Task)
        while not service.stopping.is_set():
            room = min(self._slots.room(task_class), FETCHED_GROUPS)
            if not self.replica.serving or room <= 0 or service.held_back:
                await asyncio.sleep(POLL_INTERVAL_S)
                continue
            for lease in await queue.fetch(room):
                slots = self._slots.taken(lease.message)
                handling = asyncio.create_task(self._handle(lease, slots))
                self.running[handling], self._taken[handling] = lease.message, (time.time(), slots)
                handling.add_done_callback(self._handled)

    def _count(self, tokens: int) -> None:
        self.tokens += tokens

    def _handled(self, handling: asyncio.Task[None]) -> None:
        del self.running[handling]
        _, slots = self._taken.pop(handling)
        slots.close()
        if not handling.cancelled() and (error := handling.exception()) is not None:
            if isinstance(error, StoreFull | StreamFull):
                return fatal("the storing of a group", error)
            self._service.log.error("task_failed", error=f"{type(error).__name__}: {error}", exc_info=error)

    async def _handle(self, lease: MessageLease[Task], slots: GroupSlots) -> None:
        task, service, started = lease.message, self._service, time.time()
        log = service.log.bind(group=task.group, attempt=task.attempt)
        try:
            async with lease.held():
                if task.deadline and time.time() >= task.deadline:  # nobody waits for it any more
                    log.info("task_late")
                elif lease.exhausted:
                    failed = self._outcomes.failed(task, f"given up after {lease.deliveries - 1} deliveries", INFRASTRUCTURE)
                    await self._outcomes.publish(task, failed, started)
                else:
                    await self._generate_in_time(task, started, slots)
            await lease.ack()
        except asyncio.CancelledError:
            await lease.hand_back()
            raise
        except (StoreFull, StreamFull):  # there was no room for the run's whole `bus.full_timeout`: this service ends
            await lease.hand_back()
            raise
        except (DeadlineExceeded, EngineError) as error:
            log.warning("group_handed_back", error=str(error))
            service.traces.add(handed_back(task, error, service.instance, started, time.time()))
            await lease.hand_back(delay=1.0)
        # these would fail again: a prompt that does not fit the model, a broken hook, more samples than a reference may list
        except (BadMessage, InvalidRequest, HookFailed, ValidationError) as error:
            log.warning("group_refused", error=str(error))
            await self._outcomes.publish(task, self._outcomes.failed(task, str(error), getattr(error, "fault", TASK)), started)
            await lease.ack()

    async def _generate_in_time(self, task: Task, started: float, slots: GroupSlots) -> None:
        """Generates a group and publishes what became of it; nothing once its deadline has passed."""
        try:
            async with asyncio.timeout(task.deadline - time.time() if task.deadline else None) as limit:
                outcome = await self._generate(task, slots)
        except TimeoutError:
            if not limit.expired():
                raise
            self._service.log.info("task_late", group=task.group)
            return
        await self._outcomes.publish(task, outcome, started)

    async def _generate(self, task: Task, slots: GroupSlots) -> Generated | Interrupted:
        started = time.time()
        in_flight = None if is_evaluation(task.group) else self.in_flight
        earlier = await self._outcomes.earlier(task)
        samples, stopped, aborted = await self._generator(task)(task, earlier, in_flight, slots)
        if stopped is not None:
            return await self._interrupted(task, samples, stopped)
        if aborted:
            self._service.metrics.add("aborted_rollouts", aborted)
        generated = await self._outcomes.generated(task, samples, started, time.time(), aborted)
        self.tokens += sum(sample.tokens for sample in generated.samples)
        return generated

    def _generator(self, task: Task) -> Generator:
        """Returns what generates a task: an agent, a function of its own, the run's episodes or function, or the engine alone."""
        if self._agents.program(task) is not None:
            return self._agents.group
        if self._episodes is not None and task.generate_function is None:
            return self._episodes.group
        return self._by_engine if self._custom.path(task) is None else self._custom.group

    async def _by_engine(self, task: Task, earlier: list[Sample], in_flight: InFlight | None, slots: GroupSlots) -> PlayedGroup:
        """Returns the task's samples; with why they were stopped, as far as they have come."""
        partials, why = restored(earlier, task, None if is_evaluation(task.group) else self._choices), None
        for index, partial in enumerate(partials):
            partial.seed = self._seeds.of_sample(index)
        try:
            deadline = self._config.rollout.generate_timeout
            await generate_group(self.replica, task, partials, self._tokenizer, deadline, in_flight, slots)
        except Stopped as stopped:
            why = stopped
        samples = samples_of(task, partials, self._tokenizer)
        for sample in samples:
            if (problem := sample.attributes.get(UNROUTED)) is not None:
                self._service.log.warning("sample_not_trained", sample=sample.name, reason=problem)
        if self._hooks:  # functions of the user's see the prompt as it was rendered
            text = self._custom.prompt(task)
            for sample in samples:
                sample.attributes["prompt"] = text
        return PlayedGroup(samples, why)

    async def _interrupted(self, task: Task, samples: list[Sample], stopped: Stopped) -> Interrupted:
        """Returns the message that hands a stopped group on, with its partial samples unless these are too old."""
        kept = not stopped.stale and any(len(sample.response) for sample in samples)
        return await self._outcomes.interrupted(task, samples if kept else [], stale=stopped.stale)

    async def stop_stale(self) -> None:
        """Aborts, while new weights are served, the generations that these have made too old to be trained.

        Repeats the request until they have ended, since the engine ignores an id whose request has not reached it yet.
        """
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            client, version = self.replica.client, self.replica.version
            if client is None:
                continue
            try:
                await self.in_flight.stop_stale(client, version)
            except MyxoError as error:
                self._service.log.warning("stale_not_stopped", version=version, error=str(error))
                await asyncio.sleep(RETRY_SECONDS)

    def doing(self) -> Doing | None:
        """Returns what the replica does with the groups in hand, since it took the oldest one."""
        if not self.running:
            return None
        (since, _), config = next(iter(self._taken.values())), self._config.rollout
        groups = f"{len(self.running)} {'group' if len(self.running) == 1 else 'groups'}"
        silent_since = max(self._drawn[1], since)
        quiet = self.replica.serving and time.time() - silent_since >= QUIET_SECONDS
        if any(self._agents.program(task) is not None for task in self.running.values()):
            what, after = f"plays {groups} with agents", f"a rollout is given up after rollout.agent_timeout = {config.agent_timeout:g} s"
        elif self._episodes is not None:
            limit = self._config.episode.episode_timeout
            what = f"plays {groups} in {self._config.episode.episode_url}"
            after = f"a step of an episode is given up after episode.episode_timeout = {limit:g} s"
        else:
            what = f"generates {groups}"
            after = f"a group goes back to the queue after rollout.generate_timeout = {config.generate_timeout:g} s"
        if quiet:
            what, since = f"{what}, but its engine draws no token", silent_since
        return Doing(part=WORK, what=what, since=since, next_action=after, stuck=quiet)

    def _note_drawn(self, tokens: int) -> None:
        """Notes how many tokens the engine has drawn."""
        if (drew := tokens != self._drawn[0]) or not self.running:
            if drew and self.running and self.replica.serving and not self._generated:  # one that does not serve yet was tried
                self._generated = True
                self._service.log.info("first_tokens", tokens=tokens)
            self._drawn = (tokens, time.time())

    async def measure(self) -> None:
        """Updates the gauges until cancelled."""
        drawn, rate, metrics = DrawnTokens(), TokenRate(), self._service.metrics
        while True:
            tokens = await drawn.read(self.replica.client, self.tokens)
            self._note_drawn(tokens)
            metrics.set("generated_tokens_per_s", rate.note(time.monotonic(), tokens))
            metrics.set("generated_tokens", tokens)
            metrics.set("running_groups", len(self.running) + (self.producer.held if self.producer is not None else 0))
            metrics.set("running_samples", sum(task.n for task in self.running.values()))
            metrics.set("lost_rollouts", self._custom.lost + self._agents.lost)
            load = None if self.replica.client is None else self.replica.client.load
            self._slots.note(load, tokens, time.monotonic())
            metrics.set("request_slots", self._slots.limit)
            metrics.set("used_slots", self._slots.held)
            if load is not None:
                metrics.set("running_requests", load.running)
                metrics.set("queued_requests", load.queued)
                metrics.set("kv_usage", load.kv_usage)
            await asyncio.sleep(RATE_SECONDS if self._generated or not self.replica.serving else FIRST_SECONDS)


async def serve(service: Service) -> None:
    """Runs the rollout service, or a further node of its engine. Raises ConfigError, or Problems, for flags that the installed SGLang does
    not take."""
    if given := service.config.rollout.sglang:
        try:
            flags = await asyncio.to_thread(sglang_flags.of_installed)
            raise_problems([] if flags is None else list(flags.problems(given)))
        except sglang_flags.NoCatalogue as error:
            service.log.warning("engine_flags_not_checked", error=str(error))
    await (follow(service) if service.name == ENGINE_NODE else Rollout(service).run())
