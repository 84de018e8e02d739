"""The rollout service on the bus: takes tasks while its replica serves weights, stores samples, and publishes references to them."""

import asyncio
import time
from collections import deque

import numpy as np
from pydantic import ValidationError

from services.rollout.agent_groups import AgentGroups, Gateways
from services.rollout.custom_generate import CustomGenerate
from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.transport import EngineError
from services.rollout.engine_nodes import follow
from services.rollout.episodes import EpisodeGenerate
from services.rollout.evaluator import Evaluator
from services.rollout.in_flight import InFlight, Stopped
from services.rollout.played_group import EngineGroups, GroupPlayer
from services.rollout.producer import Producer, run_where_active
from services.rollout.replica import Replica
from services.rollout.replica_command import FLAG, captured_requests
from services.rollout.request_slots import DeliveryPace, GroupSlots, RequestSlots, evaluates
from services.rollout.router_registration import Router, router_url
from services.rollout.speculation_switch import keep_worth
from services.rollout.task_outcomes import TaskOutcomes
from services.rollout.weight_catch_up import WeightCatchUp
from services.rollout.weight_receiver import WeightsReceiver
from shared.bus.bus_errors import NotPermitted, StreamFull
from shared.bus.connection import TRANSIENT
from shared.bus.registry import ENGINE_NODE, MODEL
from shared.bus.streams import task_consumer
from shared.bus.subjects import EVAL, TRAIN
from shared.bus.work_queue import MessageLease, WorkQueue
from shared.config import devices, sglang_flags
from shared.data.tokenizer import Tokenizer
from shared.environment.protocol import EnvironmentAway
from shared.hooks.loading import eval_function, generate_paths
from shared.runtime.errors import INFRASTRUCTURE, TASK, DeadlineExceeded, MyxoError, PayloadMissing, raise_problems
from shared.runtime.tasks import cancelled, fatal
from shared.runtime.telemetry import declare_metrics
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Generated, Interrupted, Task
from shared.schema.service_messages import WORK, Doing
from shared.service.engine_load_balancer import EngineSpread, model_routers
from shared.service.service_base import Service
from shared.sessions.session import EVAL_GAUGE, SessionUnknown
from shared.store.payload_store import StoreFull, StoreRefused

WINDOW_SECONDS = 5.0
COUNT_SECONDS = 5.0  # the deadline for reading an engine's count. While it does not answer, no new tokens are known, and the rate falls.


class TokenRate:
    """Measures tokens a second over the last `WINDOW_SECONDS`.

    A reading divides the tokens of the window by the whole window, also at the start, so that the rate's integral over a run is the run's
    tokens; it is 0 once a window has had no tokens. Between two readings tokens count as evenly generated."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float]] = deque()

    def note(self, now: float, tokens: float) -> float:
        """Returns the rate at ``now`` (monotonic seconds), when ``tokens`` have been generated in all."""
        self._readings.append((now, tokens))
        begin = now - WINDOW_SECONDS
        while len(self._readings) > 1 and self._readings[1][0] <= begin:
            self._readings.popleft()
        times, counts = zip(*self._readings, strict=True)
        return (tokens - float(np.interp(begin, times, counts))) / WINDOW_SECONDS


class GeneratedTokens:
    """Counts the tokens that the replica's engines have generated, one engine after another. ``total``: tokens in all, of finished, aborted
    and unfinished samples alike, without prompts."""

    def __init__(self) -> None:
        self.total = 0
        self._engine: EngineClient | None = None
        self._last = self._delivered = 0

    async def read(self, client: EngineClient | None, delivered: int) -> int:
        """Returns ``total``, brought up to date.

        ``client``: of the present engine, None while there is none. ``delivered``: tokens of the groups that have ended; they are counted
        where an engine does not count by itself (`[rollout.sglang] enable_metrics = false`, or an old SGLang)."""
        ended, self._delivered = delivered - self._delivered, delivered
        if client is None:
            return self.total
        try:
            count = await client.generated_tokens(deadline=COUNT_SECONDS)
        except (DeadlineExceeded, EngineError):  # `Replica.keep_engine` deals with an engine that is gone
            return self.total
        if count is None:
            self.total += ended
            return self.total
        if client is self._engine:  # tokens that a new engine has generated before were its own warm-up
            self.total += max(0, count - self._last)
        self._engine, self._last = client, count
        return self.total


STEP_POLL_INTERVAL_S = 0.5  # the interval at which the run's step is read
PROFILE_START_SECONDS = 60.0


async def profile_engine(service: Service, replica: Replica) -> None:
    """Waits for the first of the chosen steps, has the engine trace a number of forward passes (SGLang's /start_profile), which it ends by
    itself, and returns; where the steps are over, it says so."""
    debug = service.config.debug
    while not replica.serving or (step := await _trained_steps(service)) < debug.profile_step_start:
        await asyncio.sleep(STEP_POLL_INTERVAL_S)
    if step >= debug.profile_step_end:
        service.log.warning("engine_not_profiled", step=step, profile_step_end=debug.profile_step_end)
        return
    directory, client = (service.config.run.root / "profile" / service.instance).absolute(), replica.client
    assert client is not None  # of a replica that serves
    activities = ["CPU", "GPU"] if devices.resolve(service.config.rollout.rollout_device) == "cuda" else ["CPU"]
    request = {"output_dir": str(directory), "num_steps": debug.profile_engine_steps, "activities": activities}
    try:
        directory.mkdir(parents=True, exist_ok=True)  # an engine that cannot, at the end of its trace, dies of it
        await client.transport.post("/start_profile", request, PROFILE_START_SECONDS, "nothing is traced")
        service.log.info("engine_profiled", step=step, directory=str(directory), forward_passes=debug.profile_engine_steps)
    except (MyxoError, OSError) as error:
        service.log.error("engine_not_profiled", step=step, error=str(error))


async def _trained_steps(service: Service) -> int:
    try:
        alive = await service.registry.alive("buffer")
    except (MyxoError, *TRANSIENT):
        return -1
    return max((int(status.gauges.get("trained_steps", -1)) for status in alive), default=-1)


declare_metrics("""
    generated_tokens_per_s | tokens/s | tokens that the replica's engine has generated in the last 5 s / 5 s; read every second
    generated_tokens | tokens | tokens that its engines have generated since the service started: response tokens, of samples that ended,
        were aborted or are under way
    model_tokens_per_s | tokens/s | tokens that a frozen model's engine has generated in the last 5 s | of frozen models
    running_groups | groups | that are being generated
    running_samples | samples | of groups that are being generated, those that have ended included
    request_slots | requests | that the replica may have in its engine at once: `rollout_concurrency`, or by the engine's load
    expected_staleness | versions | that will have come when a group that is begun now is handed in, by this replica's measured speed;
        beyond `max_staleness` it takes one group at a time | with update_weight_transport = s3
    used_slots | requests | that it has in its engine now, or rollouts of functions and agents
    running_requests | requests | that the engine computes now, by its own count
    queued_requests | requests | that wait in the engine for its memory, by its own count
    kv_usage | | share of the engine's memory for keys and values that is in use
    accept_length | tokens | that a verification of drafts brought, under the newest version | with [speculation](speculation.md)
    accept_rate | | share of drafted tokens that were accepted, under the newest version | with [speculation](speculation.md)
    accept_length_of{tokens} | tokens | the same as accept_length, of responses of at most so many tokens | with
        [speculation](speculation.md)
    lost_rollouts | rollouts | that were given up since it started, since their function ([hooks](hooks.md#generating)), agent or
        environment failed too often or was late
    aborted_rollouts_total | rollouts | [surplus rollouts](agents.md#surplus-rollouts) that were aborted, or ended too late, since the
        others had ended
""")

POLL_INTERVAL_S = 0.05  # the interval at which a replica checks whether it has weights, free capacity, or stale generations
PUSH_SECONDS = 4.0  # the time that a stopping replica stays for a push that it has agreed to take part in
HAND_ON_SECONDS = 1.5  # the time that a stopping replica waits until its unfinished groups are stored and handed on
RETRY_SECONDS = 1.0  # the pause after the engine could not be asked to abort stale requests

# no room for the run's whole `bus.full_timeout`, or what the account may not do: the group goes back and this service ends
ENDING = (StoreFull, StreamFull, StoreRefused, NotPermitted)
FETCHED_GROUPS = 8  # the most groups that are taken at once: replicas that have room take turns then
# an engine with groups in hand that generates no token for so long does not continue, or waits for agents and environments
QUIET_SECONDS = 10.0
RATE_SECONDS = 1.0  # the interval at which the engine's token count is read and the gauges are set
FIRST_SECONDS = 0.1  # the same until it is known that the replica, which serves, has generated its first tokens


class Rollout:
    """The rollout service of one replica. ``tokens``: generated tokens of the groups that have ended. ``running``: the groups in hand."""

    def __init__(self, service: Service) -> None:
        self._service, self._config = service, service.config
        self._tokenizer = Tokenizer(service.config.model.hf_checkpoint)
        self.replica = Replica(service)
        captured = captured_requests(service.config, devices.resolve(service.config.rollout.rollout_device))
        self.in_flight, self._slots = InFlight(service.config), RequestSlots.of(service.config, captured)
        if captured is not None and self._slots.slots > captured:
            service.log.warning("slots_beyond_graphs", slots=self._slots.slots, captured=captured, flag=FLAG)
        if self._config.trainer.lent:
            self.replica.hand_on = self.in_flight.stop_all
        self.weights = WeightsReceiver(service, self.replica)
        self._catch_up = WeightCatchUp(service, self.replica, self.weights.expects_push)
        self._plain = EngineGroups(service, self.replica, self._tokenizer)
        self._agents = AgentGroups(service, self.replica, self._tokenizer, Gateways(service))
        self._custom = CustomGenerate(service, self.replica, self._tokenizer, self._agents)
        self._episodes = EpisodeGenerate(service, self.replica, self._tokenizer) if service.config.episode.episode_url is not None else None
        by_objects = service.config.weights.update_weight_transport == "s3"
        self._pace = DeliveryPace(service.config.rollout.max_staleness) if by_objects else None
        self._players: list[GroupPlayer] = [self._custom, self._agents, *([self._episodes] if self._episodes is not None else [])]
        self._outcomes = TaskOutcomes(service)
        self.spread = EngineSpread(service, self.replica, fleet=bool(evaluates(service.config)))
        parts = (service, self.replica, self.spread, self._outcomes, self._tokenizer)
        self.producer = Producer(*parts) if self._config.rollout.rollout_function_path else None
        self.evaluator = None if eval_function(self._config) is None else Evaluator(service, self.replica)
        self.running: dict[asyncio.Task[None], Task] = {}
        self._taken: dict[asyncio.Task[None], tuple[float, GroupSlots]] = {}  # when each was taken, seconds since the epoch, oldest first
        self._evaluates = evaluates(service.config)
        service.metrics.set(EVAL_GAUGE, float(bool(self._evaluates)))
        self._generated = False  # a token of a task has been generated
        self._last_generated = (0.0, time.time())  # tokens of the engine, and when there were more the last time
        service.activities.watch(self.doing)
        self.tokens = 0

    async def run(self) -> None:
        """Generates until asked to stop; the groups in progress are then handed on, or go back to the queue."""
        service = self._service
        await self.start_functions()
        await self.weights.listen()
        await self._catch_up.listen()
        routers = [Router(service, url)] if (url := router_url()) and not self._evaluates else []
        work = [self.replica.keep_engine(), self.replica.keep_nodes(), self._catch_up.keep()]
        work += [self.evaluate(), self.measure(), self.stop_stale()]
        work.append(keep_worth(service, self.replica, self.in_flight, lambda: self._last_generated[0]))
        if self._config.ingest.ingest_groups != "alone":
            work.append(self.produce())
        work += [router.keep() for router in routers]
        if service.config.debug.use_pytorch_profiler and "rollout" in service.config.debug.profile_target:
            work.append(profile_engine(service, self.replica))
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
        for player in self._players:
            await player.close()

    async def produce(self) -> None:
        """Generates training prompts, or has the user's rollout function do it in one replica; not where this one evaluates or prefills."""
        if self._evaluates or not self.replica.takes_tasks:
            await self._service.stopping.wait()
            return
        await (self.take(TRAIN) if self.producer is None else run_where_active(self._service, self.producer, self.spread))

    async def evaluate(self) -> None:
        """Generates held-out prompts, or has the user's own function do it; not where other replicas evaluate."""
        if self._evaluates is False or not self.replica.takes_tasks:
            await self._service.stopping.wait()
            return
        await (self.take(EVAL) if self.evaluator is None else self.evaluator.run())

    async def take(self, task_class: str) -> None:
        """Fetches tasks of a class while the replica serves and has capacity for it."""
        service, surplus = self._service, self._config.rollout.surplus_rollouts if task_class == TRAIN else 0
        queue = WorkQueue(service.bus, task_consumer(service.run, self._config.bus, task_class), Task, service.report, service.instance)
        while not service.stopping.is_set():
            room = min(self._slots.room(task_class), FETCHED_GROUPS)
            if self._pace is not None and task_class == TRAIN:
                room = self._pace.room(room, self.replica.version, len(self.running))
            ready = self.replica.serving and not self.replica.lags(task_class)
            if not ready or room <= 0 or service.held_back or self.in_flight.leaving:
                await asyncio.sleep(POLL_INTERVAL_S)
                continue
            for lease in await queue.fetch(room):
                slots = self._slots.take(task_class, lease.message.n + surplus)
                handling = asyncio.create_task(self._handle(lease, slots))
                self.running[handling], self._taken[handling] = lease.message, (time.time(), slots)
                handling.add_done_callback(self._handled)

    def _handled(self, handling: asyncio.Task[None]) -> None:
        task = self.running.pop(handling)
        _, slots = self._taken.pop(handling)
        self._outcomes.forget(task)
        slots.close()
        if not handling.cancelled() and (error := handling.exception()) is not None:
            if isinstance(error, ENDING):
                return fatal("the storing of a group", error)
            self._service.log.error("task_failed", error=f"{type(error).__name__}: {error}", exc_info=error)

    async def _handle(self, lease: MessageLease[Task], slots: GroupSlots) -> None:
        task, service, started = lease.message, self._service, time.time()
        log = service.log.bind(group=task.group, attempt=task.attempt)
        try:
            async with lease.held():
                if task.deadline and service.bus.now() >= task.deadline:  # no one waits for it any more
                    log.info("task_late")
                elif lease.exhausted:
                    failed = self._outcomes.failed(task, f"given up after {lease.deliveries - 1} deliveries", INFRASTRUCTURE)
                    await self._outcomes.publish(task, failed, started)
                elif (spooled := await self._outcomes.spooled(lease)) is not None:
                    await self._outcomes.publish(task, spooled, started)
                else:
                    await self._generate_in_time(task, started, slots)
                    if self._pace is not None and not is_evaluation(task.group):
                        self._pace.note_group(time.time() - started)
            await lease.ack()
        except (asyncio.CancelledError, *ENDING):
            await lease.hand_back()
            raise
        except (DeadlineExceeded, EngineError, EnvironmentAway, SessionUnknown, Stopped) as error:  # a session that the store has lost
            log.warning("group_handed_back", error=str(error))
            self.replica.miss(EVAL if is_evaluation(task.group) else TRAIN, task.min_version)
            self._outcomes.trace(task, error, started)
            await lease.hand_back(delay=1.0)
        # these would fail again: a prompt that does not fit the model, a broken hook, more samples than a reference may list
        except (MyxoError, ValidationError) as error:
            log.error("group_refused", error=str(error))
            failed = self._outcomes.failed(task, str(error), getattr(error, "fault", TASK))
            lost = task.pictures if isinstance(error, PayloadMissing) else None  # the buffer stores a training group's anew
            await self._outcomes.publish(task, failed.model_copy(update={"payload": lost}), started)
            await lease.ack()

    async def _generate_in_time(self, task: Task, started: float, slots: GroupSlots) -> None:
        try:
            async with asyncio.timeout(task.deadline - self._service.bus.now() if task.deadline else None) as limit:
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
        try:
            samples, stopped, aborted = await self._player(task).group(task, earlier, in_flight, slots)
        except Stopped as before:  # it had begun none of its rollouts
            samples, stopped, aborted = [], before, 0
        if stopped is not None and in_flight is None:  # nobody asks for a held-out prompt again: it goes back to the queue
            raise stopped
        if stopped is not None:  # partial samples are handed on unless they are too old
            kept = not stopped.stale and any(len(sample.response) for sample in samples)
            return await self._outcomes.interrupted(task, samples if kept else [], stale=stopped.stale)
        if aborted:
            self._service.metrics.add("aborted_rollouts", aborted)
        generated = await self._outcomes.generated(task, samples, started, time.time(), aborted)
        self.tokens += sum(len(sample.response) for sample in samples)
        return generated

    def _player(self, task: Task) -> GroupPlayer:
        """Returns what plays a task: an agent, a function of its own, the run's episodes or function; else the engine alone."""
        if self._agents.program(task) is not None:
            return self._agents
        if self._episodes is not None and task.generate_function is None:
            return self._episodes
        return self._plain if self._custom.path(task) is None else self._custom

    async def stop_stale(self) -> None:
        """Aborts, while new weights are served, the generations that these have made too old to be trained. Repeats the request until they
        have ended, since the engine ignores an id whose request has not reached it yet."""
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
        silent_since = max(self._last_generated[1], since)
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
            after = f"{after}, where no engine serves after {config.patience:g} s"
        if quiet:
            what, since = f"{what}, but its engine generates no token", silent_since
        return Doing(part=WORK, what=what, since=since, next_action=after, stuck=quiet)

    def _note_generated(self, tokens: int) -> None:
        if (more := tokens != self._last_generated[0]) or not self.running:
            if more and self.running and self.replica.serving and not self._generated:  # one that does not serve yet was tried
                self._generated = True
                self._service.log.info("first_tokens", tokens=tokens)
            self._last_generated = (tokens, time.time())

    def _show_accepted(self) -> None:
        client, metrics = self.replica.client, self._service.metrics
        if client is None or not (counts := dict(client.accepted.counts)):
            return
        tokens, verifications, accepted, drafted = np.sum(list(counts.values()), axis=0)
        metrics.set("accept_length", float(tokens / verifications))
        metrics.set("accept_rate", float(accepted / max(drafted, 1)))
        for most, row in counts.items():
            metrics.set("accept_length_of", float(row[0] / row[1]), in_status=False, tokens=f"{most:g}")

    async def measure(self) -> None:
        """Updates the gauges until cancelled."""
        generated, rate, metrics, producer = GeneratedTokens(), TokenRate(), self._service.metrics, self.producer
        while True:
            tokens = await generated.read(self.replica.client, self.tokens + (0 if producer is None else producer.tokens))
            tokens *= self.replica.takes_tasks  # a sample's first token counts where it is decoded
            self._note_generated(tokens)
            held = 0 if producer is None else producer.held
            samples = sum(task.n for task in self.running.values()) + held * self._config.rollout.n_samples_per_prompt
            gauges: dict[str, float] = {"running_groups": len(self.running) + held, "running_samples": samples}
            if self.replica.takes_tasks:
                gauges |= {"generated_tokens_per_s": rate.note(time.monotonic(), tokens), "generated_tokens": tokens}
            load = None if self.replica.client is None else self.replica.client.load
            self._slots.note(load, tokens, time.monotonic())
            if self._pace is not None:
                self._pace.note_live(self._catch_up.newest, time.monotonic())
                metrics.set("expected_staleness", self._pace.staleness(self.replica.version))
            gauges |= {"lost_rollouts": sum(player.lost for player in self._players)}
            gauges |= {"request_slots": self._slots.slots, "used_slots": sum(self._slots.held.values())}
            if load is not None:
                gauges |= {"running_requests": load.running, "queued_requests": load.queued, "kv_usage": load.kv_usage}
            for name, value in gauges.items():
                metrics.set(name, value)
            self._show_accepted()
            await asyncio.sleep(RATE_SECONDS if self._generated or not self.replica.serving else FIRST_SECONDS)


async def serve_model(service: Service) -> None:
    """Serves a frozen model until asked to stop: to functions and gateways, by its engine's proxy. It takes no tasks, and no trainer knows
    of it."""
    replica, generated, rate = Replica(service), GeneratedTokens(), TokenRate()

    async def measure() -> None:
        while True:
            tokens = rate.note(time.monotonic(), await generated.read(replica.client, 0))
            running = 0 if replica.client is None or replica.client.load is None else replica.client.load.running
            service.metrics.set("model_tokens_per_s", tokens)
            service.metrics.set("running_requests", running)
            if replica.serving:
                service.detail = f"{service.model}: {running} requests, {tokens:.0f} tokens/s"
            await asyncio.sleep(RATE_SECONDS)

    async with service.background(replica.keep_engine(), measure()):
        await service.stopping.wait()


async def serve(service: Service) -> None:
    """Runs the rollout service, or a further node of its engine, or serves a frozen model. Raises ConfigError, or Problems, for flags that
    the installed SGLang does not take."""
    if given := service.config.rollout.sglang:
        try:
            flags = await asyncio.to_thread(sglang_flags.of_installed)
            raise_problems([] if flags is None else list(flags.problems(given)))
        except sglang_flags.NoCatalogue as error:
            service.log.warning("engine_flags_not_checked", error=str(error))
    if service.name in (ENGINE_NODE, MODEL) or service.config.tinker.tinker_endpoint:
        await (follow(service) if service.name == ENGINE_NODE else serve_model(service))
        return
    async with model_routers(service):
        await Rollout(service).run()
