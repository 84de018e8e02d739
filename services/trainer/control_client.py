"""The trainer's connection to the bus: rank 0's service runs on a thread of its own, with blocking calls for the training loop.

The loop computes for seconds at a time; heartbeats, health checks and weight requests must continue meanwhile. Every call here has a
deadline and runs on the client's event loop; only rank 0 has one.
"""

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from services.trainer.partition import Untrainable
from shared.bus import runs
from shared.bus.connection import TRANSIENT, RequestRefused
from shared.config.run_config import RunConfig
from shared.runtime.errors import BadInput, DeadlineExceeded, MyxoError
from shared.runtime.tasks import SupervisedThread, cancelled, log_failure
from shared.runtime.traces import Attributes, Traces, TraceSpan, push_trace, step_trace
from shared.schema.messages import (
    Accepted,
    Batch,
    BatchAnswer,
    BatchRefused,
    BatchRequest,
    Durable,
    EvalFigures,
    EvaluationsEnded,
    EvaluationsRequest,
    Message,
    RunDone,
    Trained,
)
from shared.schema.service_messages import LOOP, ServiceStatus
from shared.schema.versions import version_after
from shared.schema.weight_messages import WeightsLive, WeightsPushed
from shared.service.service_base import Look, Service, attended, connect


def step_spans(batch: Batch, started: float, ended: float) -> Iterator[TraceSpan]:
    """Yields the spans of a trained batch. Times are seconds since the epoch."""
    step, names = step_trace(batch.step), tuple(group.group for group in batch.groups)
    known: Attributes = {"step": batch.step, "version": batch.version}
    tokens = sum(sum(group.payload.tokens) for group in batch.groups)
    attributes: Attributes = {**known, "groups": len(names), "tokens": tokens}
    yield TraceSpan(trace=step, name="training step", started=started, ended=ended, root=True, links=names, attributes=attributes)
    for name in names:
        yield TraceSpan(trace=name, name="train", started=started, ended=ended, links=(step,), attributes={"group": name, **known})


def checkpoint_span(steps: int, started: float, ended: float) -> TraceSpan:
    """Returns the span of a checkpoint, in the trace of the last step that it holds: until the buffer has recorded that it is durable."""
    return TraceSpan(trace=step_trace(steps - 1), name="checkpoint", started=started, ended=ended, attributes={"steps": steps})


def push_spans(push: WeightsPushed, channel: str) -> Iterator[TraceSpan]:
    """Yields the spans of a push that has ended. ``channel``: the name of its first one."""
    trace, started, version = push_trace(push.version, channel), push.at - push.seconds, Attributes(version=push.version)
    served = ", ".join(replica.replica for replica in push.replicas if not replica.failure)
    attributes: Attributes = {**version, "bytes": push.bytes, "replicas": served, "stall_seconds": push.stall}
    yield TraceSpan(trace=trace, name="push", started=started, ended=push.at, root=True, error=push.failure, attributes=attributes)
    joined = started + push.joining
    steps = {"push: join": (started, push.joining), "push: transfer": (joined, push.transfer)}
    steps["push: activate"] = (push.at - push.activation, push.activation)
    for name, (at, seconds) in steps.items():
        if seconds:
            yield TraceSpan(trace=trace, name=name, started=at, ended=at + seconds, attributes=version)


Result = TypeVar("Result")

BUFFER = "the buffer"
# The longest time that the buffer may be away (restarting, replaying its ledger) before the trainer stops and is restarted itself
REQUEST_SECONDS = 300.0
STOP_SECONDS = 5.0  # the time that the buffer has to answer a trainer that was asked to stop: often the buffer was stopped at the same time
POLL_INTERVAL_S = 0.5  # the interval at which the registry is read for replicas
CALL_MARGIN = 10.0
# The interpreter's switch interval: the training loop issues kernels without a pause, and at Python's 5 ms each of a push's requests and
# answers would wait for it several times as long as it travels
SWITCH_SECONDS = 1e-4


class StopAsked(DeadlineExceeded):
    """The trainer was asked to stop while it waited for an answer."""


class ControlClient:
    """Rank 0's client, a context manager around the training loop. ``service``: trainer, or critic.

    The thread that serves it makes ``service`` (the attribute), and ends the process if it dies (`shared.runtime.tasks`).

    Attributes:
        replicas: the rollout replicas whose engines are up, as the registry was last read. evaluations: those that have ended, in
            their order, as far as the buffer has reported them.
    """

    service: Service

    def __init__(self, service: str = "trainer") -> None:
        self._name = service
        self._loop = asyncio.new_event_loop()
        self._thread = SupervisedThread(self._run, "control-client")
        self._started: Future[None] = Future()
        self._ended: asyncio.Event | None = None
        self._stop_asked = threading.Event()
        self._reading, self._evaluated = asyncio.Lock(), 0.0
        self._live_announced: WeightsLive | None = None
        self.replicas: list[ServiceStatus] = []
        self.evaluations: list[EvalFigures] = []

    def __enter__(self) -> "ControlClient":
        for stop_signal in (signal.SIGTERM, signal.SIGINT):
            signal.signal(stop_signal, lambda *_: self._stop_asked.set())
        sys.setswitchinterval(SWITCH_SECONDS)
        self._thread.start()
        self._started.result()
        return self

    def __exit__(self, *_: object) -> None:
        if self._ended is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(timeout=CALL_MARGIN)

    @property
    def config(self) -> RunConfig:
        return self.service.config

    @property
    def traces(self) -> Traces:
        return self.service.traces

    @property
    def stopping(self) -> bool:
        """Returns whether the process was asked to stop."""
        return self._stop_asked.is_set()

    # --- the buffer

    def batch(self, step: int, version: int, hold: bool = True) -> BatchAnswer:
        """Returns the batch of ``step``, or that it is not ready yet (after seconds; at once without ``hold``), or that the run is done.

        Raises StopAsked, as all calls to the buffer do; BadInput where checkpoints are gone.
        """
        request = BatchRequest(step=step, version=version, hold=hold)
        try:
            answer = self.call(self._ask(self.service.subjects.batch, request, BatchAnswer), REQUEST_SECONDS)
        except RequestRefused as error:
            if error.error == "CheckpointsGone":
                raise BadInput(str(error)) from error  # a restart would come to the same
            raise
        if isinstance(answer, RunDone) and not answer.reason:  # the buffer's status may not show all of them yet
            self.call(self._read_evaluations(), REQUEST_SECONDS)
        return answer

    def trained(self, report: Trained) -> None:
        """Returns once the buffer has recorded the step."""
        self.call(self._ask(self.service.subjects.trained, report, Accepted), REQUEST_SECONDS)

    def durable(self, steps: int) -> None:
        """Returns once the buffer has recorded that a checkpoint of ``steps`` steps is on disk."""
        self.call(self._ask(self.service.subjects.durable, Durable(steps=steps), Accepted), REQUEST_SECONDS)

    def refused(self, error: Untrainable) -> None:
        """Returns once the buffer has recorded which samples cannot be trained."""
        for item in error.samples:
            refusal = BatchRefused(step=error.step, group=item.group, sample=item.position, reason=item.reason, at=time.time())
            self.call(self._ask(self.service.subjects.refused, refusal, Accepted), REQUEST_SECONDS)

    # --- published reports

    def report(self, what: str, message: Message, plane: str = "trainer") -> None:
        """Publishes the event ``what`` of a plane, without waiting."""
        log_failure(self.begin(self.service.event(plane, what, message)), f"the report of {what}")

    def publish_event(self, what: str, detail: str) -> None:
        """Publishes an event about this service, without waiting."""
        log_failure(self.begin(self.service.publish_event(what, detail)), f"the event {what}")

    def set_state(self, state: str) -> None:
        self.service.state = state

    def report_activity(self, what: str, awaited_from: Sequence[str] = (), next_action: str = "") -> None:
        """Reports in the service's status what the loop does from now on, or what it waits for."""
        self.service.activities.begin(LOOP, what, awaited_from, next_action)

    def watch_activity(self, look: Look) -> None:
        """Has the service's status ask ``look`` what another part of this trainer does."""
        self.service.activities.watch(look)

    def gauges(self, values: Mapping[str, float], *, in_status: bool = True) -> None:
        """Sets live gauges for Prometheus, and with ``in_status`` for the registry, whose entries are to stay small."""
        for name, value in values.items():
            self.service.metrics.set(name, value, in_status=in_status)

    def weights_live(self, live: WeightsLive) -> None:
        """Makes ``live.version`` the run's live version, unless a later one was live before."""

        async def announce() -> None:
            await self._keep_live(live)
            await self.service.event("weights", "live", live)

        self.service.version, self._live_announced = live.version, live
        self.call(announce(), REQUEST_SECONDS + CALL_MARGIN)

    def live_version(self) -> int:
        """Returns the run's live version; -1: none has been announced, or what stands for it is none."""
        return self.call(self._known_version(), REQUEST_SECONDS)

    async def _known_version(self) -> int:
        service, rollout = self.service, self.config.rollout
        try:
            known = await runs.live_version(service.bus, service.run)
        except runs.UnreadableVersion as error:
            service.log.warning("live_version_unreadable", error=str(error), next_action="it is announced anew")
            return -1
        last = version_after(rollout.num_rollout, self.config.weights.update_weights_interval, rollout.num_rollout)
        return known if known <= last else -1

    async def _keep_live(self, live: WeightsLive) -> None:
        """Writes the live version, unless a later one, or this one, stands there."""
        if await self._known_version() < live.version:
            await self.service.bus.put(self.service.subjects.weights_bucket, "live", live.encode(), deadline=REQUEST_SECONDS)

    # --- running

    def call(self, work: Coroutine[Any, Any, Result], seconds: float) -> Result:
        """Runs ``work`` on the client's loop and waits. Raises what it raises, or DeadlineExceeded."""
        future = self.begin(work)
        try:
            return future.result(seconds + CALL_MARGIN)
        except TimeoutError:
            future.cancel()
            raise DeadlineExceeded("a call over the bus", "the trainer's own connection", seconds, "given up") from None

    def look(self) -> None:
        """Reads the registry now, before it is next due."""
        self.call(self._read_registry(), REQUEST_SECONDS)

    def begin(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Starts ``work`` on the client's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _ask(self, subject: str, request: Any, reply: type[Result]) -> Result:
        asking = self.service.bus.request(subject, request, reply, deadline=REQUEST_SECONDS, awaited_from=BUFFER)  # type: ignore[type-var]
        answer, patience = asyncio.ensure_future(asking), asyncio.ensure_future(self._stop_outlasted())
        try:
            await asyncio.wait({answer, patience}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            raise StopAsked(f"an answer on {subject}", BUFFER, STOP_SECONDS, "the trainer was asked to stop, and does")
        finally:
            await cancelled([answer, patience])

    async def _stop_outlasted(self) -> None:
        while not self.stopping:
            await asyncio.sleep(POLL_INTERVAL_S)
        await asyncio.sleep(STOP_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            else:
                raise
        finally:
            self._loop.close()

    async def _live(self) -> None:
        self.service = service = await connect(self._name, role="trainer")  # before anything that uses it is started
        self._ended = asyncio.Event()
        async with contextlib.aclosing(service), attended(service), service.background(self._look(), self._follow_evaluations()):
            self._started.set_result(None)
            await self._ended.wait()

    async def _read_registry(self) -> None:
        service, registry = self.service, self.service.registry
        read = [status for status in await registry.alive("rollout") if status.state not in ("starting", "stopping")]
        self.replicas = still_known(self.replicas, read, time.monotonic() - service.bus.restored_s, service.config.bus.registry_ttl)
        self._evaluated = max([0.0, *(status.gauges.get("evaluations", 0.0) for status in await registry.alive("buffer"))])

    async def _read_evaluations(self) -> None:
        async with self._reading:
            while True:
                request = EvaluationsRequest(known=len(self.evaluations))
                answer = await self._ask(self.service.subjects.evaluations, request, EvaluationsEnded)
                if not answer.evaluations:
                    return
                self.evaluations = [*self.evaluations, *answer.evaluations]

    async def _follow_evaluations(self) -> None:
        """Reads what the buffer's status announces; apart from `_look`, since a buffer may be away, and replicas must be seen meanwhile."""
        while True:
            if self._evaluated > len(self.evaluations):
                with contextlib.suppress(MyxoError):
                    await self._read_evaluations()
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _look(self) -> None:
        while True:
            try:
                await self._read_registry()
                if self._live_announced is not None:
                    await self._keep_live(self._live_announced)
            except (MyxoError, *TRANSIENT) as error:
                self.service.log.warning("registry_unread", error=str(error))
            await asyncio.sleep(POLL_INTERVAL_S)


def still_known(known: Sequence[ServiceStatus], read: Sequence[ServiceStatus], restored: float, ttl: float) -> list[ServiceStatus]:
    """Returns the statuses to go by: those read, and until a TTL after the bus came back those known before, which it may have let expire
    while none could be renewed. ``restored``: seconds since then."""
    if restored >= ttl:
        return list(read)
    renewed = {status.instance for status in read}
    return [*read, *(status for status in known if status.instance not in renewed)]
