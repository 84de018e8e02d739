"""The replica's side of a push: prepare, receive, commit, or abort; and its sleep while a trainer computes on the same GPUs (`colocate`).

Requests of one push come in that order and carry its version; anything out of order is refused, so that a late message of an older push
cannot affect a newer one. One that is sent again, since the bus lost it or its answer, is answered as before. During prepare, the engine
continues to generate; from receive to commit nothing is served. Any failure there, a trainer that stops sending included, fences the
replica, unless nothing had been loaded yet: then it continues to serve its version. No version is served whose digest is not the one that
the commit names.

While a colocated trainer computes, nothing is generated, partial samples wait at the gate, and the engine has released its memory. Where it
has released its weights, too, the replica holds no version until the next push. A lent engine (`lend_gpus`) hands its partial samples on;
others continue them. The trainer announces when it begins and ends, and repeats while it computes that it still does; when these messages
stop, the replica treats it as gone and wakes by itself.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.rollout.engine.engine_client import EVERYTHING, WEIGHTS, EngineClient
from services.rollout.engine.receiver_client import ReceiverError
from services.rollout.replica import OPEN_SECONDS, Replica
from services.rollout.served_version import NO_WEIGHTS
from shared.bus.connection import TRANSIENT
from shared.config import devices
from shared.runtime.addresses import own_address
from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.runtime.telemetry import declare_metrics
from shared.runtime.traces import Attributes, Traces, TraceSpan, push_trace
from shared.schema.messages import Accepted, Message
from shared.schema.weight_messages import (
    WeightsAbort,
    WeightsAsleep,
    WeightsCommit,
    WeightsOffer,
    WeightsPrepare,
    WeightsReady,
    WeightsReceive,
    WeightsReceived,
    WeightsServed,
    WeightsSleep,
    WeightsWake,
)
from shared.service.service_base import Service

declare_metrics("""
    asleep | | 1 while a trainer computes on the engine's GPUs | with `colocate`, and of lent engines
    asleep_seconds | s | for which the engine slept last | with `colocate`, and of lent engines
""")

SLEEP_POLL_INTERVAL_S = 0.2


class ColocatedEngine:
    """Answers the trainer's requests to sleep and to wake, for one replica."""

    def __init__(self, service: Service, replica: Replica) -> None:
        self._service, self._replica = service, replica
        self._releases = devices.engines_release(service.config)
        self._loses = self._releases and not devices.engines_back_up(service.config)
        self._asleep_until = self._asleep_since = 0.0
        self._watch: asyncio.Task[None] | None = None
        replica.before_start, replica.after_start = self._wait_for_memory, self._sleep_if_late

    async def listen(self) -> None:
        """Subscribes to this replica's subjects, if it shares GPUs at all."""
        if not self._service.config.trainer.colocate:
            return
        bus, subjects, instance = self._service.bus, self._service.subjects, self._service.instance
        await bus.serve(subjects.replica_weights(instance, "sleep"), WeightsSleep, self._sleep)
        await bus.serve(subjects.replica_weights(instance, "wake"), WeightsWake, self._wake)

    async def make_room(self, deadline: float) -> None:
        """Has the engine take memory for weights that are about to be received. The caller holds the update lock."""
        client = self._replica.client
        if client is not None:
            await client.memory.take_back(WEIGHTS, deadline=deadline)

    async def _wait_for_memory(self) -> None:
        """Returns once the engine may take memory: when the trainer does not compute, or has left the registry because it died."""
        logged = False
        while self._releases and (self._replica.served.asleep or await self._trainer_computes()):
            if not logged:
                self._service.log.info("engine_start_waits", reason="the trainer computes on the GPU")
                logged = True
            await asyncio.sleep(SLEEP_POLL_INTERVAL_S)

    async def _sleep_if_late(self) -> None:
        async with self._replica.update_lock:
            if self._replica.served.asleep:
                await self._put_to_sleep(OPEN_SECONDS)
                await self._replica.publish()

    # --- requests

    async def _sleep(self, request: WeightsSleep) -> Message:
        self._asleep_until = time.monotonic() + request.lasts  # before the lock is free: a push of the trainer's may hold it
        if self._watch is None or self._watch.done():
            self._watch = self._service.spawn(self._watch_trainer())
        replica = self._replica
        async with replica.update_lock:
            if not replica.served.asleep:
                replica.served.asleep, self._asleep_since = True, time.monotonic()
                replica.show()
                replica.hand_on()
                await self._put_to_sleep(request.deadline)
                self._service.metrics.set("asleep", 1)
                await replica.publish()
                self._service.log.info("asleep", version=replica.version, seconds=round(time.monotonic() - self._asleep_since, 3))
            return WeightsAsleep(replica=self._service.instance, version=replica.version)

    async def _wake(self, request: WeightsWake) -> Message:
        async with self._replica.update_lock:
            await self._awake(request.deadline)
            return WeightsReady(replica=self._service.instance, version=self._replica.version)

    # --- what the requests do; the caller holds the update lock

    async def _put_to_sleep(self, deadline: float) -> None:
        """Puts the engine to sleep. An engine that does not go to sleep is killed, which frees its memory, too."""
        replica = self._replica
        if replica.client is None:  # an engine that is still starting is put to sleep when it is up
            return
        try:
            await replica.client.memory.sleep(EVERYTHING if self._releases else (), deadline=deadline)
            if self._loses:
                await replica.client.adopt(NO_WEIGHTS, {}, deadline=deadline)  # its digests are no longer those of its weights
        except MyxoError as error:
            await replica.kill_engine(f"it did not go to sleep: {error}")
        if self._loses:
            replica.served.lose_weights()

    async def _awake(self, deadline: float) -> None:
        """Serves the version that the replica holds. Without weights, or during a push, that is left to the push."""
        replica, service = self._replica, self._service
        if not replica.served.asleep:
            return
        replica.served.asleep = False
        if self._watch is not None and self._watch is not asyncio.current_task():
            self._watch.cancel()
        self._watch = None
        service.metrics.set("asleep", 0)
        service.metrics.set("asleep_seconds", time.monotonic() - self._asleep_since)
        if replica.client is not None and replica.served.has_weights and replica.served.target is None:
            try:
                await replica.serve(replica.version, replica.served.digest, deadline=deadline)
            except MyxoError as error:
                await replica.fence(f"the engine did not wake: {error}")
                await replica.kill_engine(str(error))
        else:
            await replica.publish()
        service.log.info("awake", version=replica.version, seconds=round(time.monotonic() - self._asleep_since, 3))

    async def _watch_trainer(self) -> None:
        """Wakes the replica when the trainer's messages have stopped: without this it would sleep for ever."""
        while (left := self._asleep_until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, SLEEP_POLL_INTERVAL_S))
        async with self._replica.update_lock:
            if self._asleep_until > time.monotonic():  # a message came while this waited for the lock
                self._watch = self._service.spawn(self._watch_trainer())
                return
            reason = "the trainer fell silent while the replica slept for it"
            self._service.log.warning("turn_expired", reason=reason)
            await self._awake(OPEN_SECONDS)
        await self._service.publish_event("turn_expired", reason)

    async def _trainer_computes(self) -> bool:
        try:
            return any(status.gauges.get("onloaded") for status in await self._service.registry.alive("trainer"))
        except (MyxoError, *TRANSIENT) as error:
            self._service.log.warning("registry_unread", error=str(error))
            return True


Repeated = TypeVar("Repeated", bound=Message)


def answered_once(handler: Callable[[Repeated], Awaitable[Message]]) -> Callable[[Repeated], Awaitable[Message]]:
    """Returns a handler that takes each request once: one that equals the one before is that request, sent again, with the same outcome.
    Requests that may be sent again must differ from all others: those of a push have its number or its remaining time in them."""
    newest: list[tuple[Repeated, asyncio.Future[Message]]] = []

    async def once(request: Repeated) -> Message:
        if not newest or newest[0][0] != request:
            newest[:] = [(request, asyncio.ensure_future(handler(request)))]
        return await asyncio.shield(newest[0][1])

    return once


PushStep = WeightsPrepare | WeightsReceive | WeightsCommit | WeightsAbort

PushRequestKind = TypeVar("PushRequestKind", WeightsPrepare, WeightsReceive, WeightsCommit, WeightsAbort)


class PushSpans:
    """Adds a span for each request that a handler answers, or fails to. A commit and an abort belong to the push that came before them."""

    def __init__(self, traces: Traces, replica: str) -> None:
        self._traces, self._replica, self._push = traces, replica, ""

    def around(
        self, name: str, handler: Callable[[PushRequestKind], Awaitable[Message]]
    ) -> Callable[[PushRequestKind], Awaitable[Message]]:
        """Returns the handler, with a span called ``name`` around it."""
        if not self._traces.on:
            return handler

        @functools.wraps(handler)
        async def noted(request: PushRequestKind) -> Message:
            started, answer, error = time.time(), None, ""
            try:
                answer = await handler(request)
                return answer
            except BaseException as raised:
                error = str(raised) or type(raised).__name__
                raise
            finally:
                self._note(name, request, answer, error, started)

        return noted

    def _note(self, name: str, request: PushStep, answer: Message | None, error: str, started: float) -> None:
        match request:
            case WeightsPrepare(version=version, channels=[first, *_]):
                self._push = push_trace(version, first.name)
            case WeightsReceive(version=version, channels=[first, *_]):
                self._push = push_trace(version, first)
        if self._push:
            attributes: Attributes = {"version": request.version, "replica": self._replica}
            attributes |= {"bytes": answer.bytes, "digest": answer.digest} if isinstance(answer, WeightsReceived) else {}
            self._traces.add(TraceSpan(trace=self._push, name=name, started=started, ended=time.time(), error=error, attributes=attributes))


EXPIRY_MARGIN = 5.0  # seconds beyond a push's deadline after which a silent trainer counts as gone
AGREED_SECONDS = 1.0  # the time within which a push's next request follows this replica's answer, if it follows at all
END_SECONDS = 10.0  # the deadline for each command to the engine after a push has failed
POLL_INTERVAL_S = 0.05

# The part of a push's deadline, and the least seconds, that an engine has for each step that is its own alone: to begin to join, to pause
# and begin to receive, to continue. All others wait for it meanwhile; one that takes longer is left out of the push.
OWN_PART, OWN_LEAST = 0.25, 10.0


class PushRefused(MyxoError):
    """A push's request does not fit what this replica is doing."""


class WeightsReceiver:
    """Answers the trainer's weight requests for one replica."""

    def __init__(self, service: Service, replica: Replica) -> None:
        self._service, self._replica, self._served = service, replica, replica.served
        self._mode = service.config.rollout.pause_on_push
        self._channels: frozenset[str] = frozenset()  # that the engine has joined, or is joining
        self._joined_by = -1  # the replica's incarnation then
        self._prepared: int | None = None  # the version whose channels the engine was last told to join
        self._pushed: int | None = None  # the number of the push that is, or was last, received
        self._receiving = False
        self._paused_at = 0.0
        self._expiry: asyncio.Task[None] | None = None
        self._agreed_until = 0.0
        self.colocation = ColocatedEngine(service, replica)

    async def listen(self) -> None:
        """Subscribes to this replica's subjects."""
        bus, subjects, instance = self._service.bus, self._service.subjects, self._service.instance
        spans = PushSpans(self._service.traces, instance)
        await bus.serve(subjects.replica_weights(instance, "offer"), WeightsOffer, self._offer)
        await bus.serve(subjects.replica_weights(instance, "prepare"), WeightsPrepare, spans.around("prepare", self._prepare))
        receive, commit = answered_once(spans.around("receive", self._receive)), answered_once(spans.around("commit", self._commit))
        await bus.serve(subjects.replica_weights(instance, "receive"), WeightsReceive, receive)
        await bus.serve(subjects.replica_weights(instance, "commit"), WeightsCommit, commit)
        await bus.serve(subjects.replica_weights(instance, "abort"), WeightsAbort, spans.around("abort", self._abort))
        await self.colocation.listen()

    def expects_push(self) -> bool:
        """Returns whether a push has been agreed upon, or is in progress."""
        return self._served.target is not None or time.monotonic() < self._agreed_until

    async def settled(self, seconds: float) -> None:
        """Returns once no push includes this replica, or after ``seconds``: if it left before, the others in its channels would wait."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._replica.update_lock.locked() or self.expects_push():
                    await asyncio.sleep(POLL_INTERVAL_S)

    # --- requests

    async def _offer(self, offer: WeightsOffer) -> Message:
        self._client()
        if self._service.stopping.is_set():
            raise PushRefused("this replica is about to stop")
        if self._replica.update_lock.locked():
            raise PushRefused("a step of an earlier push is still in progress")
        self._agree(AGREED_SECONDS)
        return self._ready()

    async def _prepare(self, request: WeightsPrepare) -> Message:
        """Has the engine begin to join the channels that will carry the version, unless it is in them already."""
        async with self._replica.update_lock:
            client = self._client()
            if self._served.target is not None:
                await self._break_off("another push was prepared before its commit: its trainer is gone")
            if request.version < self._served.version:
                raise PushRefused(f"version {request.version} is to be pushed, this replica serves {self._served.version}")
            channels = frozenset(channel.name for channel in request.channels)
            if channels != self._joined():
                self._channels = frozenset()
                own = own_seconds(request.deadline)
                await client.join_channels(request.channels, request.rank, request.machines, timeout=request.deadline, deadline=own)
                self._channels, self._joined_by = channels, self._replica.incarnation
            self._prepared = request.version
            self._agree(request.deadline)  # its receive comes when all the others have joined
            return self._ready()

    async def _receive(self, request: WeightsReceive) -> Message:
        """Pauses the engine and receives every bucket. While it waits for the first of them, an abort leaves the replica as it was. A check
        of the received weights is made in the same pause."""
        async with self._replica.update_lock:
            client, served = self._client(), self._served
            again = request.check and served.target == request.version and bool(served.received)
            if served.target is not None and not again:
                await self._break_off("another push was sent before its commit: its trainer is gone")
            if request.version < served.version:
                raise PushRefused(f"version {request.version} was sent, this replica serves {served.version}")
            if not self._joined().issuperset(request.channels):
                names = sorted(self._joined()) or "none"
                raise PushRefused(f"version {request.version} comes over channels {sorted(request.channels)}; the engine is in {names}")
            marks = {"asked": time.monotonic()}
            try:
                if not again:
                    self._begin(request)
                report = await self._received(client, request, marks, again=again)
            except MyxoError as error:
                if served.target != request.version:  # the engine died meanwhile: its replica is fenced already
                    self._end()
                    raise
                # an engine that did not answer may hold some of the failed push; one that was never asked still holds its earlier weights
                served.touched |= not isinstance(error, ReceiverError | DeadlineExceeded) or getattr(error, "touched", False)
                if isinstance(error, DeadlineExceeded):  # the others wait for this answer, and its engine may answer to nothing
                    self._service.spawn(self._break_off_now(request.version, str(error)))
                else:
                    await self._break_off(str(error))
                raise
            if request.check:
                served.compared(report.digest, bool(report.differences))
            else:
                served.loaded(report.digest)
            return report.model_copy(update={"marks": {**report.marks, **marks, "reported": time.monotonic()}})

    async def _commit(self, request: WeightsCommit) -> Message:
        marks = {"commit_asked": time.monotonic()}
        async with self._replica.update_lock:
            client, served, seconds = self._client(), self._served, own_seconds(request.deadline)
            if served.target != request.version:
                raise PushRefused(f"version {request.version} is to be served, version {served.target} is being received")
            if served.received != request.digest:
                reason = f"version {request.version} has digest {request.digest}, the engine has {served.received or 'something else'}"
                await self._break_off(reason)
                raise PushRefused(reason)
            try:
                await client.end_weight_update(deadline=seconds)
                await client.set_weight_version(request.version, deadline=seconds)
                marks["named"] = time.monotonic()
                await client.resume(deadline=seconds)
                marks["resumed"] = time.monotonic()
                self._end()
                await self._replica.serve(request.version, request.digest)
            except MyxoError as error:
                self._end()
                await self._replica.fence(str(error))
                raise
            return WeightsServed(paused=marks["resumed"] - self._paused_at, marks=marks)

    async def _abort(self, request: WeightsAbort) -> Message:
        served = self._served
        another = self._pushed is not None and request.push not in (0, self._pushed, self._pushed - 1)
        if served.target not in (None, request.version) or (served.target is not None and another):
            return Accepted()  # a late message of another push
        while self._receiving and served.target == request.version and self._replica.client is not None:
            with contextlib.suppress(MyxoError):  # then it ends with its own deadline
                await self._replica.client.receivers.abort(END_SECONDS)
            await asyncio.sleep(POLL_INTERVAL_S)  # the command may still have been in transit to the engine
        async with self._replica.update_lock:
            if served.target == request.version:
                await self._break_off(request.reason)
            elif served.target is None and self._prepared == request.version and self._replica.client is not None:
                self._agreed_until = 0.0
                await self._leave_channels(self._replica.client)
            return Accepted()

    # --- what the requests do; the caller holds the update lock

    def _agree(self, seconds: float) -> None:
        """Notes that the trainer was told that this replica takes part: its next request comes within ``seconds``, or never."""
        self._agreed_until = time.monotonic() + seconds

    def _ready(self) -> WeightsReady:
        served = self._served
        known = {"version": served.version, "digest": served.digest}
        return WeightsReady(replica=self._service.instance, **known, address=own_address(), further=self._replica.further_nodes)

    def _client(self) -> EngineClient:
        if self._replica.client is None:
            raise PushRefused("the engine is not up")
        return self._replica.client

    def _joined(self) -> frozenset[str]:
        return self._channels if self._joined_by == self._replica.incarnation else frozenset()

    def _begin(self, request: WeightsReceive) -> None:
        """Closes the gate: nothing is served until this push has been committed or broken off."""
        self._end()
        self._served.begin_update(request.version)
        self._replica.show()
        self._expiry = self._service.spawn(self._expire(request.version, request.deadline))
        self._paused_at = time.monotonic()

    async def _received(self, client: EngineClient, request: WeightsReceive, marks: dict[str, float], *, again: bool) -> WeightsReceived:
        """Receives, and pauses the engine while the transfer begins; that has to be done within `own_seconds`. ``marks``: takes when the
        engine was paused. ``again``: the engine is paused already."""
        push, seconds, own = request.push, request.deadline, own_seconds(request.deadline)
        self._pushed, self._receiving = push, True  # a check has a number of its own

        async def pause() -> None:
            await client.pause(self._mode, deadline=own)
            await client.begin_weight_update(deadline=own)
            marks["paused"] = time.monotonic()

        try:
            if not again:
                await self.colocation.make_room(own)
            return await client.receive(
                request.version,
                push,
                request.channels,
                check=request.check,
                deadline=seconds,
                begin=own,
                manifests=request.manifests,
                pause=None if again else pause,
            )
        finally:
            self._receiving = False

    async def _break_off_now(self, version: int, reason: str) -> None:
        async with self._replica.update_lock:
            if self._served.target == version:
                await self._break_off(reason)

    async def _expire(self, version: int, seconds: float) -> None:
        """Ends a push whose trainer has stopped sending: without this the engine would stay paused."""
        await asyncio.sleep(seconds + EXPIRY_MARGIN)
        await self._break_off_now(version, f"no commit came from the trainer within {seconds:g} s")

    async def _break_off(self, reason: str) -> None:
        self._end()
        version, touched, client = self._served.target, self._served.touched, self._replica.client
        if touched:
            await self._replica.fence(f"the push of version {version} failed: {reason}")
        else:
            self._service.log.warning("push_broken_off", version=version, reason=reason)
        if client is not None and await self._went_on(client, version, touched) and not touched:
            self._served.target = None
            await self._replica.publish()

    async def _went_on(self, client: EngineClient, version: int | None, touched: bool) -> bool:
        if touched:
            with contextlib.suppress(MyxoError):  # the digests of names that are no longer pushed must not be in the next digest
                await client.adopt(NO_WEIGHTS, {}, deadline=END_SECONDS)
        await self._leave_channels(client)
        # the engine must answer again: after a fence its running requests are discarded, and new ones wait at the gate
        try:
            if not touched:
                await client.end_weight_update(deadline=END_SECONDS)
            await client.resume(deadline=END_SECONDS)
        except MyxoError as error:
            reason = f"after the push of version {version} the engine did not continue: {error}"
            if not touched:
                await self._replica.fence(reason)
            await self._replica.kill_engine(reason)
            return False
        return True

    def _end(self) -> None:
        self._prepared, self._agreed_until = None, 0.0
        if self._expiry is not None and self._expiry is not asyncio.current_task():
            self._expiry.cancel()
        self._expiry = None

    async def _leave_channels(self, client: EngineClient) -> None:
        channels, self._channels = self._channels, frozenset()
        if channels:
            try:
                await client.leave_channels(deadline=END_SECONDS)
            except MyxoError as error:
                self._service.log.warning("channels_not_left", channels=sorted(channels), error=str(error))


def own_seconds(deadline: float) -> float:
    """Returns the deadline of a step that is one engine's own, in a push that has ``deadline`` seconds left."""
    return min(deadline, max(OWN_LEAST, deadline * OWN_PART))
