"""A replica's own ways to weights: from a replica that serves them, from disk. For whoever comes late, and where nobody pushes.

`choose` decides, `WeightCatchUp` acts. While it does, the replica's card says "catching up", and the trainer offers nothing; pushes, loads
and loans of one replica never overlap (``step``). A joiner disturbs nobody: a lender goes on generating, the disk is read beside
everything. Whatever fails leaves the replica as a push would find it, to be tried again elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.receiver_client import ReceiverError
from services.rollout.replica import NO_WEIGHTS, Replica
from shared.bus.connection import TRANSIENT
from shared.bus.registry import BROKEN_SNAPSHOT, CATCHING_UP
from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.runtime.failures import log_failure
from shared.runtime.own_address import own_address
from shared.runtime.service_base import Service
from shared.schema.messages import Message, WeightChannelAddress, WeightsLend, WeightsLent, WeightsLive, WeightsSnapshot
from shared.transfer.snapshot import BrokenLink, SnapshotLink
from shared.transfer.snapshot_chain import Snapshots
from shared.transfer.snapshot_copy import LocalCopy

POLL_INTERVAL_S = 0.5
"""How often a replica that lacks weights looks for them, and one that takes all from disk for newer ones."""

RETRY_SECONDS = 5.0
"""Pause before a source that failed is tried again."""

ASK_SECONDS = 10.0
"""For a replica's answer whether it lends."""

CACHE_VARIABLE = "MYXO_WEIGHTS_CACHE"
"""Where deltas are put together: a directory on this machine, of the size of one model."""


Value = TypeVar("Value", bound=Message)


@dataclass(frozen=True)
class Situation:
    """What a replica knows when it looks for weights.

    Args:
        held: the version that it serves, -1: none. live: the run's, -1: none yet. snapshot: the newest on disk, -1: none.
        peers: replicas that serve ``live`` and could lend it. pushes: whether the trainer pushes at all.
    """

    held: int
    live: int
    snapshot: int
    peers: tuple[str, ...]
    pushes: bool


@dataclass(frozen=True)
class FromPeer:
    replica: str
    version: int


@dataclass(frozen=True)
class FromDisk:
    version: int


def choose(join_from: Literal["auto", "peer", "disk", "trainer"], now: Situation) -> FromPeer | FromDisk | None:
    """Where to take weights from; None: from nowhere now, a push will come or nothing is missing.

    Where the trainer pushes, only a replica without weights helps itself: one that serves an older version gets the next push. Where
    nobody pushes, everyone reads every version from disk; a newcomer takes it from a replica that serves it already, if it may.
    """
    newcomer = now.held == NO_WEIGHTS
    newest = now.live if now.pushes else max(now.live, now.snapshot)
    if newest <= now.held or (now.pushes and not newcomer):
        return None
    if newcomer and join_from in ("auto", "peer") and now.peers and now.live == newest:
        return FromPeer(now.peers[0], now.live)
    if now.snapshot > now.held and (not now.pushes or join_from == "disk" or (join_from == "auto" and now.snapshot == now.live)):
        return FromDisk(now.snapshot)
    return None


class WeightCatchUp:
    """See the module's docstring.

    Args:
        step: held by whoever changes the engine's weights. busy: whether a push has been agreed upon or is going on.
    """

    def __init__(self, service: Service, replica: Replica, step: asyncio.Lock, busy: Callable[[], bool]) -> None:
        self._service, self._replica, self._step, self._busy = service, replica, step, busy
        self._config = service.config.weights
        self._pushes = self._config.update_weight_transport != "disk"
        self._mode = service.config.rollout.in_flight_on_push
        self._cache: LocalCopy | None = None
        self._pulling: asyncio.Future[SnapshotLink] | None = None
        self._avoided: dict[object, float] = {}  # a source that failed → not before
        self._numbers = 0

    async def listen(self) -> None:
        """Subscribes to requests of other replicas."""
        service = self._service
        await service.bus.serve(service.subjects.replica_weights(service.instance, "lend"), WeightsLend, self._lend)

    async def keep(self) -> None:
        """Has the replica take what it lacks. Runs until cancelled."""
        told = ""
        try:
            while True:
                await self._replica.engine_up.wait()
                try:
                    await self._look()
                except (MyxoError, *TRANSIENT) as error:
                    if str(error) != told:
                        self._service.log.warning("not_caught_up", error=str(error))
                    told = str(error)
                await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            if self._cache is not None and CACHE_VARIABLE not in os.environ:
                shutil.rmtree(self._cache.directory, ignore_errors=True)

    # --- looking

    async def _look(self) -> None:
        replica = self._replica
        if (self._pushes and replica.version != NO_WEIGHTS) or self._service.config.trainer.colocate:
            return
        if self._pushes and self._config.join_from == "trainer":
            return
        live, snapshot = await self._kept("live", WeightsLive), await self._kept("snapshot", WeightsSnapshot)
        peers: tuple[str, ...] = ()
        if live is not None and replica.version == NO_WEIGHTS and self._config.join_from in ("auto", "peer"):
            peers = await self._peers(live.version)
        if snapshot is not None and self._is_avoided(snapshot.at):
            snapshot = None
        found = choose(
            self._config.join_from,
            Situation(
                held=replica.version,
                live=-1 if live is None else live.version,
                snapshot=-1 if snapshot is None else snapshot.version,
                peers=peers,
                pushes=self._pushes,
            ),
        )
        if isinstance(found, FromPeer) and live is not None:
            await self._from_peer(found, live)
        elif isinstance(found, FromDisk) and snapshot is not None:
            await self._from_disk(snapshot)

    async def _kept(self, key: str, kind: type[Value]) -> Value | None:
        """What the run's bucket of weights has under a key."""
        value = await self._service.bus.get(self._service.subjects.weights_bucket, key)
        return None if value is None else kind.decode(value)

    async def _peers(self, version: int) -> tuple[str, ...]:
        """Replicas that serve ``version`` on as many ranks; another first for each newcomer, so that they do not all ask the same."""
        own = self._service
        cards = await own.registry.alive("rollout")
        fit = [
            card.instance
            for card in cards
            if card.version == version
            and card.state in ("ready", "updating")
            and card.ranks == own.ranks
            and card.instance != own.instance
            and not self._is_avoided(card.instance)
        ]
        start = sum(own.instance.encode()) % len(fit) if fit else 0
        return (*fit[start:], *fit[:start])

    def _avoid(self, source: object) -> None:
        self._avoided = {known: until for known, until in self._avoided.items() if until > time.monotonic()}
        self._avoided[source] = time.monotonic() + RETRY_SECONDS

    def _is_avoided(self, source: object) -> bool:
        return self._avoided.get(source, 0.0) > time.monotonic()

    # --- from a replica

    async def _from_peer(self, source: FromPeer, live: WeightsLive) -> None:
        seconds = self._config.push_timeout
        async with self._catching_up() as client:
            if client is None:
                return
            try:
                lent = await self._ask(source, seconds)
                if live.digest and lent.digest != live.digest:
                    raise MyxoError(f"{source.replica} lends version {lent.version} with digest {lent.digest}; live is {live.digest}")
                started = time.monotonic()
                await client.pause("abort", deadline=seconds)
                await client.begin_weight_update(deadline=seconds)
                lanes = [lane.model_dump(mode="json") for lane in lent.channels]
                order = {"verb": "borrow", "version": lent.version, "channels": lanes}
                answers = await client.load_by(order, deadline=seconds)
                if {answer["digest"] for answer in answers} != {lent.digest}:
                    raise ReceiverError(client.url, f"what came as version {lent.version} has another digest than was promised", True)
                await client.end_weight_update(deadline=seconds)
                await self._serve(client, lent.version)
            except MyxoError as error:
                self._avoid(source.replica)
                await self._resume(client)
                self._service.log.warning("peer_failed", replica=source.replica, version=source.version, error=str(error))
                return
        size, took = sum(answer["bytes"] for answer in answers), time.monotonic() - started
        self._service.log.info("caught_up", source="peer", replica=source.replica, version=lent.version, bytes=size, seconds=round(took, 3))

    async def _ask(self, source: FromPeer, seconds: float) -> WeightsLent:
        service = self._service
        request = WeightsLend(borrower=service.instance, version=source.version, ranks=service.ranks, deadline=seconds)
        subject = service.subjects.replica_weights(source.replica, "lend")
        lent = await service.bus.request(subject, request, WeightsLent, deadline=ASK_SECONDS, whom=source.replica, patient=False)
        if lent.version != source.version or len(lent.channels) != service.ranks:
            raise MyxoError(f"{source.replica} lends version {lent.version} to {len(lent.channels)} ranks; asked for was {source.version}")
        return lent

    async def _lend(self, request: WeightsLend) -> Message:
        """Answers once every rank of the engine waits for the borrower's; they lend on their own from there."""
        service, replica = self._service, self._replica
        client = replica.client
        reasons = {
            "it is about to stop": service.stopping.is_set(),
            "its engine is not up": client is None,
            "it shares its memory with the trainer": service.config.trainer.colocate,
            "its weights are being changed": self._step.locked() or self._busy(),
            f"it serves version {replica.version}": replica.version != request.version or not replica.serving,
            f"its engine has {service.ranks} ranks": service.ranks != request.ranks,
        }
        if (reason := next((text for text, holds in reasons.items() if holds), None)) is not None or client is None:
            raise MyxoError(f"version {request.version} cannot be lent to {request.borrower}: {reason}")
        self._numbers += 1
        seconds = min(request.deadline, self._config.push_timeout)
        order = {
            "verb": "lend",
            "version": request.version,
            "name": f"lend-{service.instance}-{request.borrower}-{self._numbers}",
            "address": own_address(),
            "seconds": seconds,
        }
        answers = await client.receivers.ask(order, ASK_SECONDS)
        service.log.info("lends", borrower=request.borrower, version=request.version)
        lanes = [WeightChannelAddress.model_validate(answer["channel"]) for answer in answers]
        return WeightsLent(replica=service.instance, version=request.version, digest=answers[0]["digest"], channels=lanes)

    # --- from disk

    async def _from_disk(self, snapshot: WeightsSnapshot) -> None:
        """What lies there is read and put together before anything is closed: only the loading itself interrupts."""
        replica, started = self._replica, time.monotonic()
        if replica.version == NO_WEIGHTS and not self._busy():
            self._service.state = CATCHING_UP
            await self._service.announce()
        try:
            link = await self._pulled(snapshot)
            pulled = time.monotonic() - started
            async with self._catching_up() as client:
                if client is None or replica.version >= link.version:
                    return
                await self._load(client, link)
        except BrokenLink as error:
            await self._broken(snapshot, error)
            return
        except MyxoError:
            self._avoid(snapshot.at)
            raise
        finally:
            if self._service.state == CATCHING_UP:
                self._service.state = "fenced"
                await self._service.announce()
        self._service.metrics.set(BROKEN_SNAPSHOT, -1)
        self._service.log.info(
            "caught_up",
            source="disk",
            version=link.version,
            pull_seconds=round(pulled, 3),
            load_seconds=round(time.monotonic() - started - pulled, 3),
        )

    async def _pulled(self, snapshot: WeightsSnapshot) -> SnapshotLink:
        """The version, verified, in a directory that the engine can read. Raises BrokenLink, DeadlineExceeded."""
        seconds = self._config.push_timeout
        if self._cache is None:
            self._cache = LocalCopy(self._cache_directory())
        cache, source = self._cache, Snapshots.of(self._service.config)
        if self._pulling is not None and not self._pulling.done():
            raise DeadlineExceeded("the end of an earlier pull", str(source.directory), seconds, "a file system that does not answer")
        self._pulling = asyncio.ensure_future(asyncio.to_thread(cache.follow, source, snapshot.version))
        try:
            return await asyncio.wait_for(asyncio.shield(self._pulling), seconds)
        except TimeoutError:
            log_failure(self._pulling, f"a pull of version {snapshot.version}")  # nobody waits for it any more
            raise DeadlineExceeded(f"version {snapshot.version}", str(source.directory), seconds, "it is tried again") from None

    async def _load(self, client: EngineClient, link: SnapshotLink) -> None:
        """Loads a directory while nothing is generated; an engine that fails at it is fenced."""
        seconds, replica = self._config.push_timeout, self._replica
        replica.close_gate()
        self._service.state = "updating"
        try:
            await client.pause(self._mode, deadline=seconds)
            await client.update_weights_from_disk(str(link.path.absolute()), link.version, flush=False, deadline=seconds)
            if self._service.config.trainer.lora_rank is None:  # else versions are known by their adapters, which are not in the snapshot
                digest = await client.adopt(link.version, link.tensors, deadline=seconds)
                if digest != link.digest:
                    raise MyxoError(f"the engine takes version {link.version} for {digest}; on disk it is {link.digest}")
            await self._serve(client, link.version)
        except MyxoError as error:
            await replica.fence(f"version {link.version} could not be loaded from {link.path}: {error}")
            await self._resume(client)
            raise

    async def _broken(self, snapshot: WeightsSnapshot, error: BrokenLink) -> None:
        """A chain that is broken, unless it has only been overtaken: then the trainer is asked for a whole snapshot."""
        newest = await self._kept("snapshot", WeightsSnapshot)
        if newest is not None and newest.at != snapshot.at:
            return
        self._avoid(snapshot.at)
        directory = Snapshots.of(self._service.config).directory
        if not directory.is_dir():  # nothing that the trainer could mend
            raise MyxoError(f"snapshots cannot be read here: there is no {directory}; mount the trainer's, or set update_weight_disk_dir")
        self._service.log.error("snapshot_broken", version=snapshot.version, link=error.version, error=str(error))
        self._service.metrics.set(BROKEN_SNAPSHOT, snapshot.version)
        await self._service.announce()
        await self._service.tell("snapshot_broken", str(error))

    def _cache_directory(self) -> Path:
        given = os.environ.get(CACHE_VARIABLE)
        if given:
            return Path(given) / self._service.run / self._service.instance
        return Path(tempfile.mkdtemp(prefix=f"myxo-{self._service.instance}-weights-"))

    # --- both

    @contextlib.asynccontextmanager
    async def _catching_up(self) -> AsyncIterator[EngineClient | None]:
        """Nobody else changes the engine's weights meanwhile; the client is None where somebody has been quicker."""
        service, replica = self._service, self._replica
        async with self._step:
            client = replica.client
            if client is None or self._busy() or service.stopping.is_set():
                yield None
                return
            if replica.version == NO_WEIGHTS:
                service.state = CATCHING_UP
                await service.announce()
            try:
                yield client
            finally:
                if service.state == CATCHING_UP:
                    service.state = "fenced"
                    await service.announce()

    async def _serve(self, client: EngineClient, version: int) -> None:
        await client.set_weight_version(version, deadline=self._config.push_timeout)
        await client.resume(deadline=self._config.push_timeout)
        await self._replica.open_gate(version)

    async def _resume(self, client: EngineClient) -> None:
        """An engine that was paused answers again; what it says without weights of a version goes to nobody."""
        await quietly(lambda: client.end_weight_update(deadline=ASK_SECONDS))
        await quietly(lambda: client.resume(deadline=ASK_SECONDS))


async def quietly(work: Callable[[], Awaitable[object]]) -> None:
    with contextlib.suppress(MyxoError):
        await work()
