"""Loads weights without a push, for a replica that joins late or a run without pushes: from a replica that serves them, or from disk.

`choose` decides, `WeightCatchUp` acts. Meanwhile the replica's status is "catching up", and the trainer offers it no push. Catching up
delays no other replica: the source continues to generate, and the disk is read in the background. After a failure the replica is still
ready for a push, and another source is tried.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from services.rollout.engine.engine_client import EngineClient
from services.rollout.replica import Replica
from services.rollout.served_version import NO_WEIGHTS
from shared.bus.bus_errors import TRANSIENT, warn_unreadable
from shared.bus.registry import BROKEN_SNAPSHOT
from shared.runtime.addresses import own_address
from shared.runtime.errors import BadMessage, DeadlineExceeded, MyxoError
from shared.runtime.tasks import log_failure
from shared.runtime.telemetry import declare_metrics
from shared.schema.messages import Message
from shared.schema.weight_messages import (
    ObjectUrls,
    ObjectUrlsRequest,
    PeerTransferOffer,
    PeerTransferRequest,
    WeightChannelAddress,
    WeightsLive,
    WeightsSnapshot,
)
from shared.service.service_base import Service
from shared.store.s3 import is_loopback
from shared.transfer.object_weights import ObjectMirror
from shared.transfer.weight_checkpoint import BrokenCheckpoint, LocalCheckpoint, VersionId, WeightCheckpoint, WeightCheckpoints

declare_metrics("""
    peer_weights_differ_total | | times that another replica has sent weights that are not the trainer's
    broken_snapshot | version | that the replica could not load from disk; -1: none. The trainer then writes a whole snapshot | once a
        replica has caught up
    object_store_received_total | bytes | downloaded from the object store by this replica, for itself and its site | with
        update_weight_transport = s3
""")

# The interval at which a replica without weights looks for some, and one that takes all versions from disk for newer ones.
POLL_INTERVAL_S = 0.5

RETRY_SECONDS = 5.0  # the pause before a source that failed is tried again
ASK_SECONDS = 10.0  # the deadline for a source replica's answer to a request for its weights

# The variable that names a directory on this machine in which deltas are assembled; it takes the size of one model.
CACHE_VARIABLE = "MYXO_WEIGHTS_CACHE"
TEMPORARY = "myxo-weights-"  # how the name of a directory begins where no variable names one

# The variable that names a directory, for instance on a file system of the site, in which replicas share what they download.
SITE_VARIABLE = "MYXO_SITE_CACHE"

Value = TypeVar("Value", bound=Message)


@dataclass(frozen=True)
class Situation:
    """A replica's knowledge when it looks for weights. Versions are -1 where there is none.

    ``held``: the version that it serves. ``live``: the run's. ``snapshot``: the newest on disk. ``peers``: replicas that could send
    ``live``. ``pushes``: whether the trainer pushes at all."""

    held: int
    live: int
    snapshot: int
    peers: tuple[str, ...]
    pushes: bool


def choose(join_from: Literal["auto", "peer", "disk", "trainer"], now: Situation) -> Literal["peer", "disk"] | None:
    """Returns where to take weights from: the first peer, or the snapshot; None if a push will come or nothing is missing.

    If the trainer pushes, only a replica without weights catches up: one that serves an older version gets the next push. Without pushes,
    every replica reads every version from disk; a new one takes it from a replica that serves it already, if it may."""
    newcomer = now.held == NO_WEIGHTS
    newest = now.live if now.pushes else max(now.live, now.snapshot)
    if newest <= now.held or (now.pushes and not newcomer):
        return None
    if newcomer and join_from in ("auto", "peer") and now.peers and now.live == newest:
        return "peer"
    if now.snapshot > now.held and (not now.pushes or join_from == "disk" or (join_from == "auto" and now.snapshot == now.live)):
        return "disk"
    return None


def temporary_directory() -> Path:
    """Returns a directory for a model's copy that is this process's until it ends, and removes those of processes that have ended."""
    for left in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError), (left / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel's: a container's next life knows no process of the one before
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{TEMPORARY}"))
    fcntl.flock(os.open(made / "lock", os.O_CREAT | os.O_RDWR, 0o600), fcntl.LOCK_EX)
    return made.rename(made.with_name(made.name[1:]))  # which shows it to others


class WeightCatchUp:
    """Loads the weights that a replica lacks, and sends its own to replicas that lack them. ``busy``: returns whether a push has been
    agreed upon or is in progress."""

    def __init__(self, service: Service, replica: Replica, busy: Callable[[], bool]) -> None:
        self._service, self._replica, self._busy = service, replica, busy
        self._config = service.config.weights
        self._by_objects = self._config.update_weight_transport == "s3"
        self._pushes, self._external = not service.config.engines_read_snapshots, bool(service.config.rollout.external_engines)
        self._checkpoints = WeightCheckpoints.of_run(service.config)
        self._cache: LocalCheckpoint | None = None
        self._temporary: Path | None = None  # which goes with this process
        self._pulling: asyncio.Future[WeightCheckpoint] | None = None
        self._mirror: ObjectMirror | None = None
        self._discarded = -1  # the version of a damaged checkpoint that was removed from the mirror, to be downloaded once more
        self._avoided: dict[object, float] = {}  # a source that failed → when it may be tried again
        self._transfers = 0
        self.newest = NO_WEIGHTS  # the newest version that was announced when the replica last asked

    async def listen(self) -> None:
        """Subscribes to requests of other replicas."""
        service = self._service
        await service.bus.serve(service.subjects.replica_weights(service.instance, "transfer"), PeerTransferRequest, self._send_to_peer)

    async def keep(self) -> None:
        """Has the replica load the weights that it lacks. Runs until cancelled."""
        logged = ""
        try:
            while True:
                await self._replica.engine_up.wait()
                try:
                    await self._look()
                except (MyxoError, *TRANSIENT) as error:
                    if str(error) != logged:
                        self._service.log.warning("not_caught_up", error=str(error))
                    logged = str(error)
                await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            if self._temporary is not None:
                shutil.rmtree(self._temporary, ignore_errors=True)

    # --- looking for weights

    async def _look(self) -> None:
        held, config = self._replica.version, self._config
        if self._service.config.debug.debug_rollout_only:
            return  # the engine has come with the only weights that there are
        if 0 <= self._service.metrics.values.get(BROKEN_SNAPSHOT, -1) <= held:  # a push or a peer has brought what the snapshot could not
            self._service.metrics.set(BROKEN_SNAPSHOT, -1)
        if self._service.config.trainer.colocate or (self._pushes and (held != NO_WEIGHTS or config.join_from == "trainer")):
            return
        live, snapshot = await self._announced("live", WeightsLive), await self._announced("snapshot", WeightsSnapshot)
        if snapshot is not None and self._is_avoided(snapshot.at):
            snapshot = None
        live_version, on_disk = (NO_WEIGHTS if found is None else found.version for found in (live, snapshot))
        self.newest = max(live_version, on_disk)
        peers = await self._peers(live_version)
        choice = choose(config.join_from, Situation(held, live_version, on_disk, peers, self._pushes))
        if choice == "peer" and live is not None:
            await self._catch_up(self._from_peer(peers[0], live))
        elif choice == "disk" and snapshot is not None:
            await self._catch_up(self._from_disk(snapshot))

    async def _catch_up(self, loading: Coroutine[Any, Any, None]) -> None:
        """Runs ``loading``; the status of a replica without weights shows it meanwhile."""
        newcomer = not self._replica.served.has_weights and not self._busy()
        if newcomer:
            await self._show_catching_up(True)
        try:
            await loading
        finally:
            if newcomer:
                await self._show_catching_up(False)

    async def _announced(self, key: str, kind: type[Value]) -> Value | None:
        """Returns the value of a key in the run's bucket of weights; None where there is none, or what is there is none."""
        value = await self._service.bus.get(self._service.subjects.weights_bucket, key)
        try:
            return None if value is None else kind.decode(value)
        except BadMessage as error:
            warn_unreadable(f"{self._service.subjects.weights_bucket}/{key}", value, str(error), "the trainer's next one is awaited")
            return None

    async def _peers(self, version: int) -> tuple[str, ...]:
        """Returns the replicas that this new one may ask for ``version``: those that serve it on as many ranks. New replicas get them in
        different orders, so that not all ask the same one first."""
        own = self._service
        if own.config.trainer.lora_rank is not None or (self._by_objects and self._config.join_from == "auto"):
            return ()  # adapters cannot be told from weights that they are merged into; engines of other sites cannot be reached
        if version == NO_WEIGHTS or self._external or self._replica.served.has_weights or self._config.join_from not in ("auto", "peer"):
            return ()
        fit = [
            status.instance
            for status in await own.registry.alive("rollout")
            if status.version == version
            and status.state in ("ready", "updating")
            and status.ranks == own.ranks
            and status.instance != own.instance
            and not self._is_avoided(status.instance)
        ]
        start = sum(own.instance.encode()) % len(fit) if fit else 0
        return (*fit[start:], *fit[:start])

    def _avoid(self, source: object) -> None:
        self._avoided = {known: until for known, until in self._avoided.items() if until > time.monotonic()}
        self._avoided[source] = time.monotonic() + RETRY_SECONDS

    def _is_avoided(self, source: object) -> bool:
        return self._avoided.get(source, 0.0) > time.monotonic()

    # --- from a replica

    async def _from_peer(self, source: str, live: WeightsLive) -> None:
        seconds = self._config.push_timeout
        async with self._replica.update_lock:
            if (client := self._free_client()) is None:
                return
            try:
                offer = await self._offer_of(source, live, seconds)
                started = time.monotonic()
                await client.join_channels(offer.channels, 1, timeout=seconds, deadline=seconds)
                await client.pause("abort", deadline=seconds)
                await client.begin_weight_update(deadline=seconds)
                names = [channel.name for channel in offer.channels]
                report = await client.receive(offer.version, offer.version, names, deadline=seconds)
                if report.digest != live.digest:
                    reason = f"what came as version {offer.version} has digest {report.digest}, the trainer's is {live.digest}"
                    self._service.metrics.add("peer_weights_differ")
                    self._service.log.error("peer_weights_differ", replica=source, reason=reason)
                    await self._service.publish_event("peer_weights_differ", f"{source}: {reason}")
                    raise MyxoError(reason)
                await client.leave_channels(deadline=seconds)
                await client.end_weight_update(deadline=seconds)
                await self._serve(client, live.version, live.digest)
            except MyxoError as error:
                self._avoid(source)
                await self._resume(client)
                self._service.log.warning("peer_failed", replica=source, version=live.version, error=str(error))
                return
        figures = {"bytes": report.bytes, "seconds": round(time.monotonic() - started, 3), "backend": offer.channels[0].backend}
        self._service.log.info("caught_up", source="peer", replica=source, version=offer.version, **figures)
        await self._service.publish_event("caught_up", f"version {offer.version} from {source} in {figures['seconds']:.1f} s")

    async def _offer_of(self, source: str, live: WeightsLive, seconds: float) -> PeerTransferOffer:
        service = self._service
        if not live.digest:
            raise MyxoError(f"the trainer has told no digest of version {live.version}: what another replica sends could not be checked")
        request = PeerTransferRequest(destination=service.instance, version=live.version, ranks=service.ranks, deadline=seconds)
        subject = service.subjects.replica_weights(source, "transfer")
        offer = await service.bus.request(subject, request, PeerTransferOffer, deadline=ASK_SECONDS, awaited_from=source, patient=False)
        if offer.version != live.version or len(offer.channels) != service.ranks:
            raise MyxoError(f"{source} offers version {offer.version} to {len(offer.channels)} ranks; asked for was {live.version}")
        if offer.digest != live.digest:
            raise MyxoError(f"{source} offers version {offer.version} with digest {offer.digest}; live is {live.digest}")
        return offer

    async def _send_to_peer(self, request: PeerTransferRequest) -> Message:
        """Answers once every rank of the engine waits for the destination's rank; the ranks then send without further commands."""
        service, replica = self._service, self._replica
        client = replica.client
        reasons = {
            "it is about to stop": service.stopping.is_set(),
            "its engine is not up": client is None,
            "it shares its memory with the trainer": service.config.trainer.colocate,
            "its weights are being changed": replica.update_lock.locked() or self._busy(),
            f"it serves version {replica.version}": replica.version != request.version or not replica.served.serving,
            f"its engine has {service.ranks} ranks": service.ranks != request.ranks,
        }
        if (reason := next((text for text, holds in reasons.items() if holds), None)) is not None or client is None:
            raise MyxoError(f"version {request.version} cannot be sent to {request.destination}: {reason}")
        self._transfers += 1
        order = {
            "verb": "send_to_peer",
            "version": request.version,
            "name": f"transfer-{service.instance}-{request.destination}-{self._transfers}",
            "address": own_address(),
            "ranks": request.ranks,
            "seconds": min(request.deadline, self._config.push_timeout),
        }
        answers = await client.receivers.ask(order, ASK_SECONDS)
        service.log.info("sends_weights", destination=request.destination, version=request.version)
        channels = [WeightChannelAddress.model_validate(answer["channel"]) for answer in answers]
        return PeerTransferOffer(source=service.instance, version=request.version, digest=answers[0]["digest"], channels=channels)

    # --- from disk

    async def _from_disk(self, snapshot: WeightsSnapshot) -> None:
        """Reads and assembles the snapshot before the gate is closed, so that only loading it interrupts generation."""
        replica, started = self._replica, time.monotonic()
        try:
            checkpoint = await self._pulled(snapshot)
            pulled = time.monotonic() - started
            async with replica.update_lock:
                if (client := self._free_client()) is None or replica.version >= checkpoint.version:
                    return
                await self._load(client, checkpoint)
        except BrokenCheckpoint as error:
            await self._report_broken(snapshot, error)
            return
        except MyxoError:
            self._avoid(snapshot.at)
            raise
        self._service.metrics.set(BROKEN_SNAPSHOT, -1)
        timing = {"pull_seconds": round(pulled, 3), "load_seconds": round(time.monotonic() - started - pulled, 3)}
        about = {"version": checkpoint.version, "digest": checkpoint.digest, "bytes": checkpoint.bytes}
        source = "objects" if self._by_objects else "disk"
        self._service.log.info("caught_up", source=source, **about, **timing)
        await self._service.publish_event("caught_up", f"version {checkpoint.version} from {source} in {time.monotonic() - started:.1f} s")

    async def _pulled(self, snapshot: WeightsSnapshot) -> WeightCheckpoint:
        """Returns the version, verified, in a directory that the engine can read. Raises BrokenCheckpoint, and MyxoError to try again."""
        seconds, directory = self._config.push_timeout, self._config.object_store_url or str(self._checkpoints.directory)
        if self._pulling is not None and not self._pulling.done():
            raise DeadlineExceeded("the end of an earlier pull", directory, seconds, "a file system that does not answer")
        try:  # a download has a deadline for each object
            cache = self._local_copy()
            work = self._downloaded if self._by_objects else lambda _: cache.follow(self._checkpoints, snapshot.version)
            self._pulling = asyncio.ensure_future(asyncio.to_thread(work, snapshot))
            return await asyncio.wait_for(asyncio.shield(self._pulling), None if self._by_objects else seconds)
        except TimeoutError:
            if self._pulling is not None:
                log_failure(self._pulling, f"a pull of version {snapshot.version}")  # the caller no longer waits for it
            raise DeadlineExceeded(f"version {snapshot.version}", directory, seconds, "it is tried again") from None
        except OSError as error:
            raise MyxoError(f"version {snapshot.version} cannot be put together in {CACHE_VARIABLE} or {SITE_VARIABLE}: {error}") from error

    def _local_copy(self) -> LocalCheckpoint:
        if self._cache is None:
            given, instance, run = os.environ.get(CACHE_VARIABLE), self._service.instance, self._service.run
            if given:
                made = Path(given) / run / instance
            elif self._external and self._config.update_weight_transport == "disk":  # the engine's machine reads it, too
                made = self._temporary = self._checkpoints.directory / f".{instance}"
            else:
                self._temporary = temporary_directory()
                made = self._temporary / instance
            self._cache = LocalCheckpoint(made)
            if self._by_objects:
                site, loop = os.environ.get(SITE_VARIABLE), asyncio.get_running_loop()

                def sign(index: str, name: str) -> str:
                    return asyncio.run_coroutine_threadsafe(self._signed(index, name), loop).result()

                shared = Path(site) / run if site else made.with_name(f"{made.name}.objects")
                self._mirror = ObjectMirror(shared, sign, self._config.object_store_connections, self._config.push_timeout)
        return self._cache

    async def _signed(self, index: str, name: str) -> str:
        """Returns a URL of an object. Raises DeadlineExceeded, and the trainer's refusal."""
        service = self._service
        request = ObjectUrlsRequest(replica=service.instance, index=index, objects=[name])
        subject, source = service.subjects.object_urls, "the trainer"
        [url] = (await service.bus.request(subject, request, ObjectUrls, deadline=ASK_SECONDS, awaited_from=source)).urls
        if urlsplit(url).scheme == "http" and not (self._config.object_store_allow_http or is_loopback(urlsplit(url).hostname or "")):
            raise MyxoError("the trainer signs URLs without TLS, which the run's config does not allow")
        return url

    def _downloaded(self, snapshot: WeightsSnapshot) -> WeightCheckpoint:
        """Returns the version, put together on this machine from what the site has and the store's objects. Raises BrokenCheckpoint."""
        assert self._cache is not None and self._mirror is not None
        held, wanted, before = self._cache.held(), VersionId(snapshot.version, snapshot.digest), self._mirror.received
        if held is not None and held.id == wanted:
            return held
        chain = self._mirror.pull(snapshot.index, snapshot.index_bytes, wanted, None if held is None else held.id)
        self._service.metrics.add("object_store_received", self._mirror.received - before)
        try:
            whole = self._cache.follow_chain(chain)
            # later deltas lie on a copy of it, and the site's is removed with the store's
            if whole is chain[-1] and self._config.update_weight_mode == "delta":
                self._cache.copy_from(whole)
                whole = self._cache.held() or whole
            return whole
        except BrokenCheckpoint as error:
            self._mirror.discard(error.path)
            if self._discarded != error.version:
                self._discarded = error.version
                raise MyxoError(f"{error}; it is downloaded once more") from error
            raise

    async def _load(self, client: EngineClient, checkpoint: WeightCheckpoint) -> None:
        seconds, replica, digest = self._config.push_timeout, self._replica, ""
        await client.prepare_load(checkpoint, deadline=seconds)
        replica.served.begin_update(checkpoint.version)
        replica.show()
        try:
            await client.pause(self._service.config.rollout.pause_on_push, deadline=seconds)
            await client.update_weights_from_disk(str(checkpoint.path.absolute()), checkpoint.version, deadline=seconds)
            if self._service.config.trainer.lora_rank is None:  # else a version's digest is its adapters', which are not in the snapshot
                digest = await client.adopt(checkpoint.version, checkpoint.tensors, deadline=seconds)
                if digest != checkpoint.digest:
                    raise MyxoError(f"the engine takes version {checkpoint.version} for {digest}; on disk it is {checkpoint.digest}")
            await self._serve(client, checkpoint.version, digest)
        except MyxoError as error:
            await replica.fence(f"version {checkpoint.version} could not be loaded from {checkpoint.path}: {error}")
            await self._resume(client)
            raise

    async def _report_broken(self, snapshot: WeightsSnapshot, error: BrokenCheckpoint) -> None:
        newest = await self._announced("snapshot", WeightsSnapshot)
        if newest is not None and newest.at != snapshot.at:
            return
        self._avoid(snapshot.at)
        directory = self._checkpoints.directory
        if not self._by_objects and not directory.is_dir():  # the trainer could not repair this
            raise MyxoError(f"snapshots cannot be read here: there is no {directory}; mount the trainer's, or set update_weight_disk_dir")
        self._service.log.error("snapshot_broken", version=snapshot.version, broken=error.version, error=str(error))
        self._service.metrics.set(BROKEN_SNAPSHOT, snapshot.version)
        await self._service.announce()
        await self._service.publish_event("snapshot_broken", str(error))

    # --- from either source

    def _free_client(self) -> EngineClient | None:
        return None if self._busy() or self._service.stopping.is_set() else self._replica.client

    async def _show_catching_up(self, value: bool) -> None:
        self._replica.served.catching_up = value
        await self._replica.publish()

    async def _serve(self, client: EngineClient, version: int, digest: str) -> None:
        await client.set_weight_version(version, deadline=self._config.push_timeout)
        await client.resume(deadline=self._config.push_timeout)
        self._replica.served.catching_up = False
        await self._replica.serve(version, digest)

    async def _resume(self, client: EngineClient) -> None:
        """Resumes an engine that was paused; output that it generates without the weights of a version is discarded."""
        for step in (client.end_weight_update, client.resume):
            with contextlib.suppress(MyxoError):
                await step(deadline=ASK_SECONDS)
