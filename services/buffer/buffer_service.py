"""The buffer on the bus: it has `services.buffer.policy` decide about events, writes the records to the ledger, and only then acts on them.

One lock orders all decisions. Everything done twice after a crash (tasks published, payloads freed) is safe to do twice. Of several buffers
one is active: it holds the lease (`shared.bus.leader_lease`). The others stand by: they follow the ledger and answer no requests.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from services.buffer import policy
from services.buffer.buffer_config import BufferConfig
from services.buffer.evaluation_logger import EvaluationLogger, log_evaluation, show_evaluations
from services.buffer.group_spans import GroupSpans
from services.buffer.ledger_writer import BadRecord, LedgerWriter
from services.buffer.outcome_consumer import OutcomeConsumer
from services.buffer.prompt_supply import PromptSupply, check_data, open_prompts
from services.buffer.rollout_keeper import EndedGroup, RolloutKeeper, ended_groups, perhaps_not_kept
from services.buffer.run_failure import RunFailure
from services.buffer.state import BufferState
from services.buffer.store_room import StoreRoom
from services.buffer.task_publisher import TaskPublisher
from services.buffer.trainer_requests import FIELD, BufferFilter, TrainerRequests
from shared.bus import runs
from shared.bus.connection import TRANSIENT, WrongSequence
from shared.bus.leader_lease import LeaderLease, LeaseLost, LeaseTiming
from shared.bus.registry import STANDBY
from shared.bus.streams import Consumer, generated_consumer, scored_consumer, task_consumer
from shared.bus.subjects import EVAL, TRAIN
from shared.bus.work_queue import WorkQueue
from shared.config.engine_limits import longest_trained
from shared.hooks.loading import eval_function, shows_samples
from shared.runtime import failure_summary
from shared.runtime.errors import BadMessage, DeadlineExceeded, MyxoError
from shared.runtime.telemetry import Metrics, declare_metrics
from shared.schema import ledger
from shared.schema.ledger import BatchFormed, GroupDead, GroupsDropped, LedgerRecord, group_id
from shared.schema.ledger_audit import NOT_SAID
from shared.schema.messages import BatchRefused, BatchRequest, Durable, EvaluationsRequest, Message, Task, Trained
from shared.schema.weight_messages import WeightsLive
from shared.service.service_base import Service


class EndsSinceBatch:
    """Counts the groups that ended without being trained since a batch was last formed."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()
        self._dead, self._reason = 0, ""

    def see(self, record: LedgerRecord) -> None:
        """Takes a record; they come in the ledger's order."""
        match record:
            case BatchFormed():
                self._dropped.clear()
                self._dead, self._reason = 0, ""
            case GroupsDropped(groups=groups, reason=reason):
                self._dropped[reason] += len(groups)
            case GroupDead(reason=reason):
                self._dead, self._reason = self._dead + 1, reason

    def words(self) -> str:
        """Returns what became of them; empty where there are none."""
        parts = [f"{count} dropped ({reason})" for reason, count in self._dropped.most_common(2)]
        parts += [f"{self._dead} died, the last for: {failure_summary.short(self._reason)}"] if self._dead else []
        return f"of the groups since the last batch {' and '.join(parts)}" if parts else ""


def awaited(state: BufferState, limits: BufferConfig, held_back: str, ends: str, source: str = "") -> str:
    """Returns, in words, the reason why the next batch waits.

    Args:
        held_back: why the buffer holds back. ends: as `EndsSinceBatch.words` returns it. source: what gives prompts too slowly.
    """
    if held_back:
        return held_back
    if state.live_version < 0:
        return "a rollout replica that serves weights (none does yet)"
    if source:
        return source
    if state.evaluations:
        evaluation = next(iter(state.evaluations.values()))
        where = f"{evaluation.dataset} under version {evaluation.version}"
        return f"the evaluation of {where} ({len(evaluation.pending)} of {evaluation.prompts} prompts outstanding)"
    if not state.outstanding:
        return "; ".join(filter(None, [_held_by_bound(state, limits), ends]))
    away = f"{len(state.outstanding)} groups with the rollout and reward services"
    return "; ".join(filter(None, [f"{away}; live version {state.live_version}", f"{state.dead} dead so far", ends]))


def _held_by_bound(state: BufferState, limits: BufferConfig) -> str:
    if state.formed_steps >= limits.rollout.num_rollout:
        return "no group any more: every batch is formed"
    bound = limits.rollout.max_staleness
    return (
        f"newer weights than version {state.live_version}: the staleness bound (rollout.max_staleness = {bound}) admits no further group "
        "before they are live"
    )


declare_metrics("""
    admitted | groups | admitted since the run began
    trained | groups | of them, trained
    dropped | groups | of them, dropped
    dead | groups | of them, given up
    groups_dead_total{fault} | groups | and held-out prompts, that were given up since the service started, by [what was at
        fault](rewards.md#what-a-group-dies-of)
    in_flight | groups | admitted and not ended
    ready | groups | of those in flight, scored and ready for a batch
    outstanding | groups | of those in flight, sent out and not back yet
    trained_steps | steps | that are trained
    durable_steps | steps | that a checkpoint holds
    live_version | version | of the weights that are served; -1 before the first
    followed | | the number of the newest ledger record that a standby has read | in a standby
    evaluations | | evaluations that have ended
    eval_pending | prompts | held-out prompts of evaluations under way that are not back yet
    queue_task | messages | groups to generate that wait for a worker
    queue_eval | messages | held-out prompts that wait for a worker
    queue_generated | messages | groups to score that wait for a worker
    queue_scored | messages | outcomes for the buffer that wait for a worker
    queue_(task;eval;generated;scored)_held | messages | of the same queue, what workers have and did not ack yet
    queue_lag{queue,consumer} | messages | both together: what says [how many workers](monitoring.md#scaling-by-the-queues) would have
        something to do
""")

# Gauges that are fields of the state
_OF_STATE = ("admitted", "trained", "dropped", "dead", "in_flight", "trained_steps", "durable_steps", "live_version")


def show_groups(metrics: Metrics, state: BufferState) -> None:
    """Sets the gauges of groups by state."""
    for name in _OF_STATE:
        metrics.set(name, getattr(state, name))
    metrics.set("ready", len(state.ready))
    metrics.set("outstanding", len(state.outstanding))
    metrics.set("evaluations", len(state.evaluated))
    metrics.set("eval_pending", sum(len(evaluation.pending) for evaluation in state.evaluations.values()))


class QueueGauges:
    """The depths of the run's queues: what waits for a worker, and what workers have and did not ack yet.

    ``queue_lag`` is both together by queue and consumer, which is what says how many workers would have something to do.
    """

    def __init__(self, service: Service) -> None:
        self._metrics, run, bus = service.metrics, service.run, service.config.bus
        queues: dict[str, list[Consumer]] = {
            "task": [task_consumer(run, bus, TRAIN)],
            "eval": [task_consumer(run, bus, EVAL)],
            "generated": [generated_consumer(run, bus, name) for name in service.config.queues()],
            "scored": [scored_consumer(run, bus)],
        }
        self._queues = {name: {of.name: WorkQueue(service.bus, of, Task) for of in consumers} for name, consumers in queues.items()}

    async def show(self, deadline: float) -> None:
        """Reads the depths and sets the gauges. Raises DeadlineExceeded."""
        for name, consumers in self._queues.items():
            depths = await asyncio.gather(*(queue.depth(deadline=deadline) for queue in consumers.values()))
            self._metrics.set(f"queue_{name}", sum(waiting for waiting, _ in depths))
            self._metrics.set(f"queue_{name}_held", sum(held for _, held in depths))
            for consumer, (waiting, held) in zip(consumers, depths, strict=True):
                self._metrics.set("queue_lag", waiting + held, in_status=False, queue=name, consumer=consumer)


POLL_INTERVAL_S = 2.0  # The interval at which live version and queue depths are read, besides the events that announce them
FOLLOW_SECONDS = 5.0  # The interval at which a buffer on standby reads new records of the ledger
HAND_OVER_SECONDS = 1.5  # The time that a stopping buffer waits for its last decision
DRAIN_SECONDS = 1.5  # The time for which it still keeps the responses of groups that have ended

# The latest records of the ledger whose groups a buffer that takes over keeps, where its predecessor had not come to it
RECENT_RECORDS = 256
Request = TypeVar("Request", bound=Message)


class Buffer:
    """A buffer of a run: on standby until it gets the lease, then the active one until its end."""

    def __init__(self, service: Service, prompts: PromptSupply) -> None:
        config = service.config
        self._service, self._config, self._bus, self._log = service, config, service.bus, service.log
        self._limits = BufferConfig(
            config.rollout,
            config.weights,
            config.eval,
            eval_sets={name: len(held_out) for name, held_out in prompts.heldout.items()},
            passes=config.monitoring.passrate_threshold,
            has_critic=config.algorithm.has_critic,
            longest_sample=longest_trained(config),
            message_bytes=service.bus.message_limit,
            rollout_only=config.debug.debug_rollout_only,
            named_rewards=shows_samples(config),
            eval_function=eval_function(config) is not None,
        )
        self._tasks = TaskPublisher(service.bus, config, prompts, service.store)
        self._prompts = prompts
        path = config.rollout.buffer_filter_path
        self._filter = BufferFilter(config, path) if path is not None else None
        self._lease = LeaderLease(service.bus, service.run, "buffer", service.instance, LeaseTiming(config.bus.lease_duration))
        self._failure = RunFailure(service, self._limits.max_dead_in_a_row, self._lease.held)
        self._ledger = LedgerWriter(service.bus, service.run, self._lease.held, self._followed)
        self._spans = GroupSpans()
        self._state = BufferState()
        self._ends = EndsSinceBatch()
        self._room = StoreRoom(service)
        self._lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._to_free: asyncio.Queue[list[str]] = asyncio.Queue()
        self._keeper = RolloutKeeper(service, prompts, self._to_free.put_nowait, partial(self._decide, list))
        self._recent: deque[list[EndedGroup]] = deque(maxlen=RECENT_RECORDS)
        self._eval_log = EvaluationLogger(service, self._keeper.release, partial(self._decide, list))
        self._broken: asyncio.Queue[Exception] = asyncio.Queue()

    async def run(self) -> None:
        """Stands by while another buffer is active, then recovers from the ledger and serves until asked to stop.

        Raises LeaseLost once another buffer is active, or may be.
        """
        if not await self._stand_by():
            return
        try:
            async with self._service.background(self._lease.keep()):
                await self._serve()
        finally:
            await self._lease.release()

    async def _stand_by(self) -> bool:
        service, followed = self._service, float("-inf")
        while not await self._lease.attempt():
            if service.state != STANDBY:
                service.state = STANDBY
                self._log.info("standing_by")
            if time.monotonic() - followed >= FOLLOW_SECONDS:
                with contextlib.suppress(DeadlineExceeded, *TRANSIENT):
                    await self._ledger.follow()
                followed = time.monotonic()
                service.metrics.set("followed", self._ledger.last)
                await service.announce()
            if not await service.pause(self._lease.timing.poll):
                return False
        return True

    async def _serve(self) -> None:
        service, subjects = self._service, self._service.subjects
        self._log.info("active", followed=self._ledger.last)
        took_over, service.state = service.state == STANDBY, "starting"
        self._limits = replace(self._limits, active_since=time.time())
        await self._recover()
        trainer = TrainerRequests(
            service, self._limits, self._state, self._decide, self._changed, self._failure, self._room, self._awaited, self._filter
        )
        await self._bus.serve(subjects.batch, BatchRequest, self._as_holder(trainer.batch))
        await self._bus.serve(subjects.trained, Trained, self._as_holder(trainer.trained))
        await self._bus.serve(subjects.durable, Durable, self._as_holder(trainer.durable))
        await self._bus.serve(subjects.refused, BatchRefused, self._as_holder(trainer.refused))
        await self._bus.serve(subjects.evaluations, EvaluationsRequest, self._as_holder(self._on_evaluations))
        service.state = "ready"
        await self._failure.look()
        if took_over:
            await service.announce()
            await service.publish_event("took_over")
        watching = (self._watch_versions(), self._watch_gauges(), self._until_broken())
        free, most_pictures = self._eval_log.release, self._prompts.most_pictures
        outcomes = OutcomeConsumer(service, self._limits, self._state, self._lease.held, self._decide, free, self._admits, most_pictures)
        publishing = self._tasks.publishers(outcomes.settle, self._state)
        async with service.background(*publishing, self._keeper.run(), self._eval_log.run(), self._free(), outcomes.run(), *watching):
            await service.stopping.wait()
            with contextlib.suppress(TimeoutError):  # the end comes between two decisions, and none follows
                await asyncio.wait_for(self._lock.acquire(), HAND_OVER_SECONDS)
            await self._keeper.drain(DRAIN_SECONDS)

    async def _recover(self) -> None:
        """Reads the state from the ledger, and repeats actions that a killed predecessor may have missed: tasks, freeing, the run's end."""
        await self._ledger.follow()
        state = self._state = self._ledger.state
        begun, now = bool(state.admitted or state.evaluations or state.evaluated), time.time()
        # of a changed file: what a stopped replica or a ready group hands on continues the prompt that the group's number stood for
        kept = state.ready.values() if self._limits.rollout.staleness_policy == "continue" else ()
        anew = [policy.requeue(group, "changed data", now) for group in (() if self._prompts.drawn else [*state.outstanding, *kept])]
        await check_data(self._service, self._prompts.fingerprints, partial(self._record, anew), begun=begun)
        self._keeper.take(perhaps_not_kept(state, self._recent, time.time()))
        self._keeper.release(reversed(self._ledger.released))  # what was let go last is likeliest to be there
        show_evaluations(self._service, state.evaluated.values())
        self._log.info("recovered", admitted=state.admitted, trained=state.trained, in_flight=state.in_flight)
        self._tasks.outstanding(state, self._limits)
        if state.finished_steps >= self._limits.rollout.num_rollout:
            await runs.set_phase(self._bus, self._service.run, runs.FINISHED)

    def _as_holder(self, handler: Callable[[Request], Awaitable[Message]]) -> Callable[[Request], Awaitable[Message]]:
        """Answers only while this buffer is active: a client of a deposed buffer repeats its request, which then reaches the next one."""

        async def answer(request: Request) -> Message:
            try:
                await self._lease.held()
                try:
                    return await handler(request)
                finally:  # only the active buffer may refuse, too
                    await self._lease.held()
            except (LeaseLost, WrongSequence):
                return await asyncio.get_running_loop().create_future()  # until this process ends, which it does

        return answer

    # --- deciding, recording, acting

    async def _decide(self, decision: Callable[[], Sequence[LedgerRecord]]) -> None:
        """Makes a decision once those before it are recorded, records it and acts on it.

        Raises BadRecord where it cannot be made or recorded, and the decision's own MyxoErrors.
        """
        async with self._lock:
            try:
                decided = decision()
            except MyxoError:
                raise
            except Exception as error:
                raise BadRecord(f"no decision: {type(error).__name__}: {error}") from error
            await self._record(decided)
            while records := [
                *policy.close(self._state, self._limits, time.time(), logging=bool(self._eval_log.open) or self._end_waits()),
                *(policy.admit(self._state, self._limits, time.time()) if self._admits() else []),
            ]:
                await self._record(records)
        async with self._changed:
            self._changed.notify_all()

    def _end_waits(self) -> bool:
        return self._state.durable_steps >= self._limits.rollout.num_rollout > self._state.finished_steps and self._keeper.delays_end

    def _admits(self) -> bool:
        """Returns whether groups may be let in: not into a run that has failed, nor while the store or a stream is full."""
        return not self._failure.reason and not self._service.held_back

    async def _record(self, records: Sequence[LedgerRecord]) -> None:
        for record, data in self._ledger.tried(records):
            try:
                await self._ledger.append(record, data)
                self._keeper.take(ended_groups(self._state, record))
                self._prompts.follow(self._state, record)
                if isinstance(record, ledger.EvalEnded) and (most := self._prompts.most_pictures):  # no service reports these any more
                    for name in self._state.evaluations[record.version, record.dataset].pending:
                        self._to_free.put_nowait(list(itertools.islice(self._service.subjects.picture_keys(name, 0), most)))
                self._state.apply(record)
                self._trace(record)
                self._ends.see(record)
                await self._failure.see(record, self._state.dead)
                self._eval_log.see(record)
                self._eval_log.release(self._state.released)
                await self._act(record)
            except Exception as error:
                self._broken.put_nowait(error)
                raise

    def _followed(self, state: BufferState, record: LedgerRecord) -> None:
        """Takes note of a record that another buffer has written, and ``state`` before it; its spans are the other's."""
        if self._ledger.behind <= RECENT_RECORDS:
            self._recent.append(ended_groups(state, record))
        self._prompts.follow(state, record)
        self._trace(record, export=False)

    def _trace(self, record: LedgerRecord, *, export: bool = True) -> None:
        if (traces := self._service.traces).on:
            for span in self._spans.apply(record):
                if export:
                    traces.add(span)

    async def _until_broken(self) -> None:
        """Ends this buffer once a record could not be made or followed: state and ledger may differ then, or another buffer is active."""
        raise await self._broken.get()

    async def _act(self, record: LedgerRecord) -> None:
        match record:
            case ledger.GroupsAdmitted(first=first, count=count):
                for number in range(first, first + count):
                    self._tasks.group(self._state.groups[group_id(number)], self._state, self._limits)
            case ledger.GroupRequeued(group=name, attempt=attempt, reason=reason):
                log = self._log.info if reason == policy.STALE else self._log.warning
                log("group_requeued", group=name, attempt=attempt, reason=reason)
                self._tasks.group(self._state.groups[name], self._state, self._limits)
            case ledger.GroupsDropped(groups=names, reason=reason):
                self._log.info("groups_dropped", groups=names, reason=reason)
            case (
                ledger.GroupDead(group=name, reason=reason, fault=fault)
                | ledger.EvalScored(group=name, rewards=[], reason=reason, fault=fault)
            ):
                self._log.warning("group_dead", group=name, reason=reason, fault=fault)
                self._service.metrics.add("groups_dead", fault=fault or NOT_SAID)
            case ledger.SampleRefused(step=step, group=name, sample=sample, reason=reason):
                self._log.warning("sample_refused", step=step, group=name, sample=sample, reason=reason)
            case ledger.BatchAmended(step=step, removed=removed, added=added):
                self._log.warning("batch_amended", step=step, removed=removed, added=added)
            case ledger.EvalStarted(version=version, dataset=dataset, skipped=skipped):
                if skipped:
                    self._log.warning("evaluated_in_place_of", version=version, dataset=dataset, due=skipped, reason="none began of these")
                self._tasks.evaluation(self._state.evaluations[version, dataset], self._limits)
            case ledger.EvalEnded():
                log_evaluation(self._service, record)
            case ledger.RunFinished(steps=steps):
                self._log.info("run_finished", steps=steps)
                await runs.set_phase(self._bus, self._service.run, runs.FINISHED)

    async def _free(self) -> None:
        while True:
            await self._service.store.free(await self._to_free.get())

    # --- incoming messages

    async def _watch_versions(self) -> None:
        """Reads the live version from KV, when an event says that there is a new one and, where an event was missed, now and then."""
        subjects = self._service.subjects
        news, refused = asyncio.Event(), b""

        async def on_event(_: object) -> None:
            news.set()

        await self._bus.connection.subscribe(subjects.event("weights", "live"), cb=on_event)
        while True:
            news.clear()
            if (value := await self._bus.get(subjects.weights_bucket, "live", deadline=120)) and value != refused:
                try:
                    version = WeightsLive.decode(value).version
                    await self._decide(partial(policy.live, self._state, self._limits, version, time.time()))
                except (BadMessage, BadRecord, policy.WrongVersion) as error:
                    self._log.error("live_version_refused", error=str(error))
                    refused = value
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), POLL_INTERVAL_S)

    async def _on_evaluations(self, request: EvaluationsRequest) -> Message:
        return self._eval_log.after(request, self._state.evaluated)

    # --- status and gauges

    def _awaited(self) -> str:
        if self._filter is not None and self._filter.choice is not None:
            return f"the choice of {FIELD}"
        queued = self._tasks.queued if self._prompts.drawn else 0
        source = f"prompts of data.data_source ({self._config.data.data_source}): {queued} groups have none yet" if queued else ""
        return awaited(self._state, self._limits, self._service.held_back, self._ends.words(), source)

    async def _watch_gauges(self) -> None:
        """Updates the gauges (groups by state, queue depths), and resumes once a failed run continues, or a full store has room."""
        queues = QueueGauges(self._service)
        while True:
            late = policy.is_late(self._state, self._limits, time.time()) or self._keeper.is_late
            if await self._failure.look(self._state.finished_steps >= self._limits.rollout.num_rollout) or await self._room.look() or late:
                await self._decide(lambda: [])
            show_groups(self._service.metrics, self._state)
            self._prompts.gauge(self._service.metrics)
            self._keeper.gauge(self._service.metrics)
            await queues.show(deadline=120)
            await asyncio.sleep(POLL_INTERVAL_S)


async def serve(service: Service) -> None:
    """Serves as the run's buffer until it is asked to stop."""
    await Buffer(service, await open_prompts(service)).run()
