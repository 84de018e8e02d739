"""The replica's side of a push: prepare, receive, commit, or abort.

Requests of one push come in that order and carry its version; anything out of order is refused, so that a late message of an older
push cannot touch a newer one. Preparing, the engine goes on generating; from receive to commit the gate is closed. Whatever goes wrong
there, a trainer that falls silent included, fences the replica, unless nothing had been loaded yet: then it goes on serving what it has.
No version is served whose digest is not the one that the commit names.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from services.rollout.colocated_engine import ColocatedEngine
from services.rollout.engine.engine_client import EngineClient, ReceiveReport
from services.rollout.engine.receiver_client import ReceiverError
from services.rollout.replica import NO_WEIGHTS, Replica
from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.runtime.service_base import Service
from shared.schema.messages import (
    Accepted,
    Message,
    WeightsAbort,
    WeightsCommit,
    WeightsOffer,
    WeightsPrepare,
    WeightsReady,
    WeightsReceive,
    WeightsReceived,
)

EXPIRY_MARGIN = 5.0
"""Seconds beyond a push's deadline after which a silent trainer counts as gone."""

AGREED_SECONDS = 1.0
"""How soon a push's next request follows an answer of this replica's, where it follows at all."""

STATE_SECONDS = 2.0
"""For the engine's word on what it holds: without it, it counts as not known."""

END_SECONDS = 10.0
"""For each thing that an engine is told after a push has failed."""

POLL_INTERVAL_S = 0.05


class PushRefused(MyxoError):
    """A push's request that does not fit what this replica is doing."""


class WeightsReceiver:
    """Answers the trainer's weight requests for one replica."""

    def __init__(self, service: Service, replica: Replica) -> None:
        self._service, self._replica = service, replica
        self._mode = service.config.rollout.in_flight_on_push
        self._lanes: frozenset[str] = frozenset()  # that the engine has joined, or is joining
        self._joined_by = -1  # the replica's incarnation then
        self._prepared: int | None = None  # version whose lanes the engine was last told to join
        self._pushing: int | None = None  # version, from receive to commit or abort
        self._receiving = False
        self._digest: str | None = None  # of what was received in the present push
        self._touched = False  # the engine does not hold what it served before
        self._expiry: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._turns = replica.start_gate = ColocatedEngine(service, replica, self._turn)
        self._agreed_until = 0.0

    async def listen(self) -> None:
        """Subscribes to this replica's subjects."""
        bus, subjects, instance = self._service.bus, self._service.subjects, self._service.instance
        await bus.serve(subjects.replica_weights(instance, "offer"), WeightsOffer, self._offer)
        await bus.serve(subjects.replica_weights(instance, "prepare"), WeightsPrepare, self._prepare)
        await bus.serve(subjects.replica_weights(instance, "receive"), WeightsReceive, self._receive)
        await bus.serve(subjects.replica_weights(instance, "commit"), WeightsCommit, self._commit)
        await bus.serve(subjects.replica_weights(instance, "abort"), WeightsAbort, self._abort)
        await self._turns.listen()

    async def _offer(self, offer: WeightsOffer) -> Message:
        """Says at once whether a push may begin, whatever an earlier one is still waiting for."""
        client = self._client()
        if self._service.stopping.is_set():
            raise PushRefused("this replica is about to stop")
        if self._turn.locked():
            raise PushRefused("a step of an earlier push is still going on")
        self._agree(AGREED_SECONDS)
        return await self._ready(client)

    async def _prepare(self, request: WeightsPrepare) -> Message:
        """Has the engine begin to join the lanes that will carry the version, unless it is in them already."""
        async with self._turn:
            client = self._client()
            if self._pushing is not None:
                await self._break_off("another push was prepared before its commit: its trainer is gone")
            if request.version < self._replica.version:
                raise PushRefused(f"version {request.version} is to be pushed, this replica serves {self._replica.version}")
            lanes = frozenset(lane.name for lane in request.channels)
            if self._lanes != lanes or self._joined_by != self._replica.incarnation:
                self._lanes = frozenset()
                await client.join_channels(request.channels, request.rank, timeout=request.deadline, deadline=request.deadline)
                self._lanes, self._joined_by = lanes, self._replica.incarnation
            self._prepared = request.version
            self._agree(request.deadline)  # its receive comes when all the others have joined
            return await self._ready(client)

    async def settled(self, seconds: float) -> None:
        """Returns once no push counts on this replica any more, or after ``seconds``: the others in its lanes would wait for it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._turn.locked() or self.expects_push():
                    await asyncio.sleep(POLL_INTERVAL_S)

    @property
    def step(self) -> asyncio.Lock:
        """Held by whoever changes the engine's weights."""
        return self._turn

    def expects_push(self) -> bool:
        """Whether a push has been agreed upon, or is going on."""
        return self._pushing is not None or time.monotonic() < self._agreed_until

    def _agree(self, seconds: float) -> None:
        """The trainer was told that this replica takes part: its next request comes within ``seconds``, or never."""
        self._agreed_until = time.monotonic() + seconds

    async def _ready(self, client: EngineClient) -> WeightsReady:
        digest = ""
        if self._replica.version != NO_WEIGHTS:
            with contextlib.suppress(MyxoError):
                digest = (await client.weights_state(deadline=STATE_SECONDS)).digest
        return WeightsReady(replica=self._service.instance, version=self._replica.version, digest=digest)

    async def _receive(self, request: WeightsReceive) -> Message:
        """Pauses, and takes every bucket. While it waits for the first of them, an abort leaves the replica as it was.

        A check of what was just received goes on in the same pause.
        """
        async with self._turn:
            client = self._client()
            again = request.check and self._pushing == request.version and self._digest is not None
            if self._pushing is not None and not again:
                await self._break_off("another push was sent before its commit: its trainer is gone")
            if request.version < self._replica.version:
                raise PushRefused(f"version {request.version} was sent, this replica serves {self._replica.version}")
            if self._joined_by != self._replica.incarnation or not self._lanes.issuperset(request.channels):
                raise PushRefused(
                    f"version {request.version} comes over lanes {sorted(request.channels)}; the engine is in {self._names()}"
                )
            try:
                if not again:
                    self._begin(request)
                    await self._turns.make_room(request.deadline)
                    await client.pause(self._mode, deadline=request.deadline)
                    await client.begin_weight_update(deadline=request.deadline)
                got = await self._taken(client, request)
            except MyxoError as error:
                # of what has failed, an engine that did not answer may hold some; one that was never asked holds what it had
                self._touched = self._touched or not isinstance(error, ReceiverError | DeadlineExceeded) or getattr(error, "touched", False)
                await self._break_off(str(error))
                raise
            if request.check:
                self._touched = self._touched or bool(got.differences)
                self._digest = None if got.differences else self._digest or got.digest
            else:
                self._touched, self._digest = True, got.digest
            return WeightsReceived(
                replica=self._service.instance, digest=got.digest, bytes=got.bytes, seconds=got.seconds, differences=got.differences
            )

    async def _taken(self, client: EngineClient, request: WeightsReceive) -> ReceiveReport:
        self._receiving = True
        try:
            return await client.receive(request.version, request.push, request.channels, check=request.check, deadline=request.deadline)
        finally:
            self._receiving = False

    def _begin(self, request: WeightsReceive) -> None:
        self._replica.close_gate()
        self._end()
        self._pushing, self._digest, self._touched = request.version, None, False
        self._expiry = self._service.spawn(self._expire(request.version, request.deadline))
        self._service.state = "updating"

    async def _commit(self, request: WeightsCommit) -> Message:
        async with self._turn:
            client = self._client()
            if self._pushing != request.version:
                raise PushRefused(f"version {request.version} is to be served, version {self._pushing} is being received")
            if self._digest != request.digest:
                reason = f"version {request.version} has digest {request.digest}, the engine has {self._digest or 'something else'}"
                await self._break_off(reason)
                raise PushRefused(reason)
            await self._or_fence(lambda: client.end_weight_update(deadline=request.deadline))
            await self._or_fence(lambda: client.set_weight_version(request.version, deadline=request.deadline))
            await self._or_fence(lambda: client.resume(deadline=request.deadline))
            self._end()
            await self._or_fence(lambda: self._replica.open_gate(request.version))
            return Accepted()

    async def _abort(self, request: WeightsAbort) -> Message:
        if self._pushing not in (None, request.version):
            return Accepted()  # late: of another push
        while self._receiving and self._pushing == request.version and self._replica.client is not None:
            with contextlib.suppress(MyxoError):  # then it ends with its own deadline
                await self._replica.client.abort_receive(deadline=END_SECONDS)
            await asyncio.sleep(POLL_INTERVAL_S)  # the order may have been on its way to the engine
        async with self._turn:
            if self._pushing == request.version:
                await self._break_off(request.reason)
            elif self._pushing is None and self._prepared == request.version and self._replica.client is not None:
                self._agreed_until = 0.0
                await self._leave_lanes(self._replica.client)
            return Accepted()

    async def _expire(self, version: int, seconds: float) -> None:
        """Ends a push whose trainer has fallen silent: without this the engine would stay paused."""
        await asyncio.sleep(seconds + EXPIRY_MARGIN)
        async with self._turn:
            if self._pushing == version:
                await self._break_off(f"no commit came from the trainer within {seconds:g} s")

    async def _break_off(self, reason: str) -> None:
        """Ends the present push without its version. Called with the turn held."""
        version, touched = self._pushing, self._touched
        self._end()
        if touched:
            await self._replica.fence(f"the push of version {version} failed: {reason}")
        else:
            self._service.log.warning("push_broken_off", version=version, reason=reason)
        client = self._replica.client
        if client is None:
            return
        if touched:
            with contextlib.suppress(MyxoError):  # what it knows of names that are pushed no more must not be in the next digest
                await client.adopt(NO_WEIGHTS, {}, deadline=END_SECONDS)
        await self._leave_lanes(client)
        # the engine must answer again: after a fence its running requests end for nobody, and new ones wait at the gate
        try:
            if not touched:
                await client.end_weight_update(deadline=END_SECONDS)
            await client.resume(deadline=END_SECONDS)
        except MyxoError as error:
            if not touched:
                await self._replica.fence(f"after the push of version {version} the engine did not go on: {error}")
            return
        if not touched and self._replica.version != NO_WEIGHTS:
            await self._replica.open_gate(self._replica.version)

    def _end(self) -> None:
        self._pushing, self._prepared, self._agreed_until = None, None, 0.0
        if self._expiry is not None and self._expiry is not asyncio.current_task():
            self._expiry.cancel()
        self._expiry = None

    def _client(self) -> EngineClient:
        if self._replica.client is None:
            raise PushRefused("the engine is not up")
        return self._replica.client

    def _names(self) -> str:
        return str(sorted(self._lanes)) if self._lanes and self._joined_by == self._replica.incarnation else "none"

    async def _or_fence(self, step: Callable[[], Awaitable[object]]) -> None:
        """One step of a push; when it fails the replica is fenced and the trainer told."""
        try:
            await step()
        except MyxoError as error:
            self._end()
            await self._replica.fence(str(error))
            raise

    async def _leave_lanes(self, client: EngineClient) -> None:
        lanes, self._lanes = self._lanes, frozenset()
        if lanes:
            try:
                await client.leave_channels(deadline=END_SECONDS)
            except MyxoError as error:
                self._service.log.warning("lanes_not_left", lanes=sorted(lanes), error=str(error))
