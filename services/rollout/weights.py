"""The replica's side of a push: prepare, pause, receive, commit, or abort.

Requests of one push come in that order and carry its version; anything out of order is refused, so that a late message of an older
push cannot touch a newer one. Between pause and commit the gate is closed. Whatever goes wrong there, a trainer that falls silent
included, fences the replica, unless no bucket had come yet: then it goes on serving what it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from services.rollout.engine.client import EngineClient
from services.rollout.replica import NO_WEIGHTS, Replica
from shared.errors import DeadlineExceeded, MyxoError
from shared.messages import (
    Accepted,
    Message,
    WeightsAbort,
    WeightsBucket,
    WeightsCommit,
    WeightsOffer,
    WeightsPause,
    WeightsPrepare,
    WeightsReady,
)
from shared.service import Service

EXPIRY_MARGIN = 5.0
"""Seconds beyond a push's deadline after which a silent trainer counts as gone."""

AGREED_SECONDS = 1.0
"""How soon a push's next request follows an answer of this replica's, where it follows at all."""

LOOK_SECONDS = 0.05


class PushRefused(MyxoError):
    """A push's request that does not fit what this replica is doing."""


class WeightsReceiver:
    """Answers the trainer's weight requests for one replica."""

    def __init__(self, service: Service, replica: Replica) -> None:
        self._service, self._replica = service, replica
        self._mode = service.config.rollout.in_flight_on_push
        self._group: str | None = None
        self._group_incarnation = -1
        self._pushing: int | None = None
        self._touched = False  # a bucket of the present push has reached the engine
        self._expiry: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._agreed_until = 0.0

    async def listen(self) -> None:
        """Subscribes to this replica's subjects."""
        bus, subjects, instance = self._service.bus, self._service.subjects, self._service.instance
        await bus.serve(subjects.replica_weights(instance, "offer"), WeightsOffer, self._offer)
        await bus.serve(subjects.replica_weights(instance, "prepare"), WeightsPrepare, self._prepare)
        await bus.serve(subjects.replica_weights(instance, "pause"), WeightsPause, self._pause)
        await bus.serve(subjects.replica_weights(instance, "receive"), WeightsBucket, self._receive)
        await bus.serve(subjects.replica_weights(instance, "commit"), WeightsCommit, self._commit)
        await bus.serve(subjects.replica_weights(instance, "abort"), WeightsAbort, self._abort)

    async def _offer(self, offer: WeightsOffer) -> Message:
        """Says at once whether a push may begin, whatever an earlier one is still waiting for."""
        self._client()
        if self._service.stopping.is_set():
            raise PushRefused("this replica is about to stop")
        if self._turn.locked():
            raise PushRefused("a step of an earlier push is still going on")
        self._agree()
        return WeightsReady(replica=self._service.instance, version=self._replica.version)

    async def _prepare(self, offer: WeightsPrepare) -> Message:
        """Joins the process group that will carry the version, unless the engine is in it already."""
        async with self._turn:
            client = self._client()
            if self._pushing is not None:
                await self._break_off("another push was offered before its commit: its trainer is gone")
            if offer.version < self._replica.version:
                raise PushRefused(f"version {offer.version} was offered, this replica serves {self._replica.version}")
            if self._group != offer.group or self._group_incarnation != self._replica.incarnation:
                await self._leave_group(client)
                await self._join(client, offer)
            self._agree()
            return WeightsReady(replica=self._service.instance, version=self._replica.version)

    async def _join(self, client: EngineClient, offer: WeightsPrepare) -> None:
        """Has the engine join the process group."""
        try:
            await client.init_weights_group(
                offer.group,
                backend=offer.backend,
                master_address=offer.master_address,
                master_port=offer.master_port,
                rank_offset=offer.rank,
                world_size=offer.world_size,
                deadline=offer.deadline,
            )
        except DeadlineExceeded as error:  # a member is missing: the engine would wait on for it, and answer nobody meanwhile
            await self._replica.kill_engine(str(error))
            raise
        self._group, self._group_incarnation = offer.group, self._replica.incarnation

    async def settled(self, seconds: float) -> None:
        """Returns once no push counts on this replica any more, or after ``seconds``: the others in its group would wait for it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._turn.locked() or self._pushing is not None or time.monotonic() < self._agreed_until:
                    await asyncio.sleep(LOOK_SECONDS)

    def _agree(self) -> None:
        """The trainer was told that this replica takes part: its next request comes soon, or never."""
        self._agreed_until = time.monotonic() + AGREED_SECONDS

    async def _pause(self, request: WeightsPause) -> Message:
        async with self._turn:
            client = self._client()
            self._replica.close_gate()
            self._end()
            self._pushing, self._touched = request.version, False
            self._expiry = asyncio.create_task(self._expire(request.version, request.deadline))
            self._service.state = "updating"
            await self._or_fence(lambda: client.pause(self._mode, deadline=request.deadline))
            await self._or_fence(lambda: client.begin_weight_update(deadline=request.deadline))
            return Accepted()

    async def _receive(self, bucket: WeightsBucket) -> Message:
        async with self._turn:
            client = self._client()
            self._expect(bucket.version)
            if bucket.group != self._group:
                raise PushRefused(f"a bucket for group {bucket.group} came; the engine is in {self._group}")
            self._touched = True
            await self._or_fence(
                lambda: client.receive_bucket(bucket.names, bucket.dtypes, bucket.shapes, bucket.group, deadline=bucket.deadline)
            )
            return Accepted()

    async def _commit(self, request: WeightsCommit) -> Message:
        async with self._turn:
            client = self._client()
            self._expect(request.version)
            await self._or_fence(lambda: client.end_weight_update(deadline=request.deadline))
            await self._or_fence(lambda: client.set_weight_version(request.version, deadline=request.deadline))
            await self._or_fence(lambda: client.resume(deadline=request.deadline))
            self._end()
            await self._replica.open_gate(request.version)
            return Accepted()

    async def _abort(self, request: WeightsAbort) -> Message:
        async with self._turn:
            self._agreed_until = 0.0
            if self._pushing == request.version:
                await self._break_off(request.reason)
            elif self._replica.client is not None:
                await self._leave_group(self._replica.client)
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
        client = self._replica.client
        if client is None:
            return
        await self._leave_group(client)
        # the engine must answer again: after a fence its running requests end for nobody, and new ones wait at the gate
        await client.resume(deadline=10)
        if not touched and self._replica.version != NO_WEIGHTS:
            await self._replica.open_gate(self._replica.version)

    def _end(self) -> None:
        self._pushing, self._agreed_until = None, 0.0
        if self._expiry is not None and self._expiry is not asyncio.current_task():
            self._expiry.cancel()
        self._expiry = None

    def _client(self) -> EngineClient:
        if self._replica.client is None:
            raise PushRefused("the engine is not up")
        return self._replica.client

    def _expect(self, version: int) -> None:
        if self._pushing != version:
            raise PushRefused(f"version {version} was sent, version {self._pushing} is being received")

    async def _or_fence(self, step: Callable[[], Awaitable[object]]) -> None:
        """One step of a push; when it fails the replica is fenced and the trainer told."""
        try:
            await step()
        except MyxoError as error:
            self._end()
            await self._replica.fence(str(error))
            raise

    async def _leave_group(self, client: EngineClient) -> None:
        if self._group is not None:  # a restarted engine's client knows nothing of it and does nothing
            try:
                await client.destroy_weights_group(self._group, deadline=10)
            except MyxoError as error:
                self._service.log.warning("group_not_left", group=self._group, error=str(error))
        self._group = None
