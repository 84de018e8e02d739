"""A replica: its engine, the weight version that it serves, and the gate at which generation waits.

The gate, `wait_serving`, is open while `ServedVersion` says that the replica serves. An update closes it. After a failed update or the
engine's death it stays closed (the replica is fenced) until a version has been loaded.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable

from services.rollout.client_adapters import Adapters
from services.rollout.engine.early_processes import engine_flags
from services.rollout.engine.engine_client import HUNG_PART, HUNG_SECONDS, EngineClient, until_hung
from services.rollout.engine.engine_process import EngineProcess
from services.rollout.engine.external_engine import ExternalEngine
from services.rollout.engine.transport import EngineError
from services.rollout.engine_nodes import EngineLeader
from services.rollout.engine_proxy import EngineProxy
from services.rollout.in_flight import InFlight, Stopped
from services.rollout.prefill_engines import DecodeTransport, PrefillEngines
from services.rollout.replica_command import BOOTSTRAP, engine_log, external_engine, replica_command
from services.rollout.request_slots import MOST
from services.rollout.router_registration import router_url
from services.rollout.served_version import NO_WEIGHTS, ServedVersion
from shared import hooks
from shared.bus.registry import MODEL
from shared.config import devices
from shared.config.external_server import EngineAway
from shared.data.media import MediaRule
from shared.process.child_process import ProcessEnded
from shared.runtime.addresses import LOOPBACK, own_address
from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.runtime.tasks import cancelled
from shared.runtime.telemetry import declare_metrics
from shared.service.service_base import Service
from shared.sessions.session import CONTEXT_GAUGE, KEPT_GAUGE, VOCABULARY_GAUGE
from shared.sessions.session_store import SessionStore

declare_metrics("""
    version | version | of the weights that the replica serves
    engine_start_seconds | s | that its engine took to start
    engine_context | tokens | the most of one sequence
    engine_vocabulary | tokens | of the model's vocabulary
    eval_replica | replicas | whether it takes held-out prompts alone ([`eval_replicas`](evaluation.md#replicas-of-its-own)): 1 or 0
    engine_kept_tokens | tokens | whose keys and values the engine keeps for later requests; 0: it keeps none
""")

INITIAL_VERSION = 0  # the version of the policy that an engine loads from `hf_checkpoint` when it starts

WATCH_SECONDS = 1.0
OPEN_SECONDS = 60.0  # the deadline for an engine that has released its memory to take it again
STOP_SECONDS = 3.0
SPARE_REQUESTS = 512  # the requests that others may have in the engine at once, beyond one for each slot that the replica may have
PREFILLS = 8192  # the requests that a prefill engine may have at once, those of all decode engines
RESTART_SECONDS = 2.0  # the pause before a dead engine is started again


class Replica:
    """An engine and the version that it serves.

    ``client``: usable while ``engine_up`` is set. ``served``: the one owner of the replica's version. ``update_lock``: held by whoever
    changes the engine's weights or memory. ``before_start``, ``after_start``: awaited around each start of an engine. ``hand_on``: called
    where a lent engine goes to sleep. ``proxy``: where routers, gateways and functions of the user's reach the engine; open if any do."""

    def __init__(self, service: Service) -> None:
        self._service, self._rollout, self._external = service, service.config.rollout, external_engine(service)
        spans_nodes = self._rollout.nodes_per_engine > 1
        self._kind, self._bootstrap = self._rollout.worker_type, ""
        decodes = self._kind == "decode"
        self._prefills = PrefillEngines(service, lambda: self.client.version if self.client else NO_WEIGHTS) if decodes else None
        self._leader = EngineLeader(service, lambda: self.before_start()) if spans_nodes else None
        if spans_nodes or self._rollout.stages_per_engine > 1 or devices.resolve(self._rollout.rollout_device) == "cuda":
            service.ranks = self._rollout.rollout_num_gpus_per_engine
        self.client: EngineClient | None = None
        self.served = ServedVersion()
        self.update_lock = asyncio.Lock()
        self.engine_up = asyncio.Event()
        self.before_start: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)
        self.after_start: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)
        self.hand_on: Callable[[], None] = lambda: None
        self._routed, self._for_gateways = bool(router_url()), service.config.gateways > 0
        self._exposed = self._routed or self._for_gateways or service.name == MODEL
        rollout = self._rollout
        limit = PREFILLS if self._kind == "prefill" else SPARE_REQUESTS + (rollout.rollout_concurrency or MOST)
        wait = service.config.weights.push_timeout
        self.proxy = EngineProxy(self.served, lambda: self.client, service.metrics, limit, rollout.generate_timeout, wait)
        self.proxy.most_kept = service.config.kept_top_k
        self.proxy.adapters = Adapters(service.config)
        self.proxy.rule = MediaRule.of_run(service.config)
        self.proxy.public = False  # gateways have their own way in
        self._life = service.incarnation
        self._shown = asyncio.Event()
        self._process: EngineProcess | ExternalEngine | None = None
        self._killed = ""  # why this service has killed its engine, if it has
        self._speculates, self.start_seconds = True, 0.0  # as its flags have it; what the engine's start took
        self._last: EngineProcess | None = None  # of several nodes: the part that was begun last
        self._missed: dict[tuple[str, int], float] = {}  # (class of tasks, version too old for one) → until when none is taken

    # --- the served version

    @property
    def version(self) -> int:
        return self.served.version

    @property
    def incarnation(self) -> int:
        return self.served.incarnation

    @property
    def serving(self) -> bool:
        return self.served.serving and (self._prefills is None or bool(self._prefills.known))

    @property
    def takes_tasks(self) -> bool:
        """Whether it generates; a prefill engine computes prompts for decode engines."""
        return self._kind != "prefill"

    async def wait_serving(self, min_version: int, deadline: float | None = None) -> EngineClient:
        """Waits until the replica serves ``min_version`` or newer, at most for the run's patience. Raises DeadlineExceeded; Stopped where
        its external engine is away, and where its GPUs were lent and have gone back to the trainer: others continue the work."""
        loop, deadline = asyncio.get_running_loop(), self._rollout.patience if deadline is None else deadline
        end = loop.time() + deadline
        while not self.serving or self.version < min_version or self.client is None:
            if self._external and not self.served.engine_is_up:
                raise Stopped("work on an external engine that is away", stale=False)
            if self.served.asleep and self._service.config.trainer.lent:
                raise Stopped("work on a GPU that the trainer needs", stale=False)
            if self.served.asleep:  # no deadline runs while the trainer computes on the same GPUs
                end = loop.time() + deadline
            if (remaining := end - loop.time()) <= 0:
                next_action = f"it serves version {self.version} ({self._service.state}); the work goes back to the queue"
                raise DeadlineExceeded(f"weights of version {min_version} or newer", "the trainer", deadline, next_action)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(remaining, WATCH_SECONDS)):
                    await self._shown.wait()
        return self.client

    def miss(self, task_class: str, min_version: int) -> None:
        """Notes a task of a class that was given up here, if it is for a newer version than the one that is served."""
        if self.version < min_version:
            self._missed[task_class, self.version] = time.monotonic() + self._rollout.patience

    def lags(self, task_class: str) -> bool:
        """Returns whether the tasks of a class are left to others, since those serve what they are for."""
        return time.monotonic() < self._missed.get((task_class, self.version), 0.0)

    def show(self) -> None:
        """Shows the service's status as `served` has it, and lets those look who wait for a version."""
        served, service = self.served, self._service
        service.state, service.version = served.state, served.version
        service.incarnation = f"{self._life}.{served.incarnation}"
        shown = self.proxy.url if served.engine_is_up and served.has_weights else ""  # none without verified weights
        service.engine, service.prefill = (shown, "") if self.takes_tasks else ("", f"{shown}#{self._bootstrap}" if shown else "")
        self._shown.set()
        self._shown = asyncio.Event()

    async def publish(self) -> None:
        """Publishes the served version in the registry."""
        self.show()
        await self._service.announce()

    async def serve(self, version: int, digest: str = "", *, deadline: float = OPEN_SECONDS) -> None:
        """Serves ``version``, which the engine holds; while the trainer computes on the same GPUs, the replica serves it once that is over.
        Raises as `EngineMemory.wake`."""
        if not self.served.asleep and self.client is not None and self.client.memory.asleep:
            await self.client.memory.wake(deadline=deadline)
        self.served.serve(version, digest)
        self._service.metrics.set("version", version)
        self.show()
        self._service.spawn(self._service.announce())  # the trainer, which waits for this, has its answer first

    async def fence(self, reason: str) -> None:
        """Stops taking work until a version has been loaded, because the engine's weights are not to be trusted."""
        self.served.fence()
        self._service.log.warning("fenced", reason=reason)
        await self.publish()
        await self._service.publish_event("fenced", reason)

    @property
    def further_nodes(self) -> list[str]:
        """Returns the addresses of the engine's further nodes, in order."""
        return [] if self._leader is None else self._leader.further_nodes

    # --- the engine

    async def keep_engine(self) -> None:
        """Starts the engine, watches it, and restarts it when it dies. Runs until cancelled; then it stops the engine."""
        following = self._service.spawn(self._prefills.keep()) if self._prefills is not None else None
        try:
            while True:
                try:
                    engine = await self._start_on_all_nodes(self._leader) if self._leader is not None else await self._start(None)
                except (EngineError, EngineAway, DeadlineExceeded) as error:
                    if not self._external:
                        raise
                    await self._report_away(str(error), False)  # it went away again at once
                    await self._close()
                    await asyncio.sleep(RESTART_SECONDS)
                    continue
                cause = await self._fault(engine)
                self.engine_up.clear()
                self.served.engine_died()
                self._tell_of_last(cause)
                with contextlib.suppress(MyxoError):  # what others still ask of it fails now, not at its deadlines; `_close` logs it
                    await asyncio.to_thread(engine.stop, 0)
                await self.fence(f"the engine died: {cause}")
                await self._close()
                await asyncio.sleep(RESTART_SECONDS)
        finally:
            await cancelled([following] if following is not None else [])
            await self.proxy.close()
            await self._close()

    async def keep_nodes(self) -> None:
        """Keeps an engine's nodes together, where it has several. Raises AttemptFailed, LeaseLost, DeadlineExceeded."""
        if self._leader is not None:
            await self._leader.agent.run()

    async def _fault(self, engine: EngineProcess | ExternalEngine) -> str:
        self._killed, client = "", self.client
        assert client is not None  # it has started
        on_gpu = devices.resolve(self._rollout.rollout_device) == "cuda"
        seconds = HUNG_SECONDS if on_gpu else max(HUNG_SECONDS, HUNG_PART * self._rollout.patience)
        probing = asyncio.create_task(until_hung(client, self._can_be_asked, seconds))
        try:
            while not (fault := await asyncio.to_thread(engine.fault)):
                await asyncio.wait({probing}, timeout=WATCH_SECONDS)
                if probing.done() and not self._killed:
                    await self.kill_engine(probing.result())
        finally:
            await cancelled([probing])
        ended = self._leader.ended if self._leader is not None else ""
        return self._killed or ended or f"it {fault}"

    def _can_be_asked(self) -> tuple[int, int] | None:
        served, client = self.served, self.client
        paused = client is None or client.paused is not None or self.update_lock.locked()
        return None if paused or served.asleep or served.target is not None else (served.incarnation, served.version)

    def _tell_of_last(self, cause: str) -> None:
        """Reports why another engine is started; of one over several nodes its leader tells."""
        if self._leader is None:
            self._service.detail = f"the one before: {cause}" if cause else ""

    async def _start_on_all_nodes(self, leader: EngineLeader) -> EngineProcess | ExternalEngine:
        """Starts the engine in an attempt of all nodes, or in the next where one ends before the engine is ready."""
        while True:
            begun = await leader.begun(self._last)
            self._last = begun
            try:
                return await self._start(begun)
            except MyxoError as error:
                if begun.running():
                    raise
                self._service.log.warning("engine_not_started", error=leader.ended if isinstance(error, ProcessEnded) else str(error))
                self.engine_up.clear()
                await self._close()

    async def kill_engine(self, reason: str) -> None:
        """Kills an engine that no longer answers; `keep_engine` restarts it."""
        if self._process is not None:
            self._service.log.warning("engine_killed", reason=reason)
            self._killed = reason
            await asyncio.to_thread(self._process.stop, 0)

    async def restart(self, speculates: bool, reason: str, in_flight: InFlight) -> None:
        """Has another engine take this one's place, which speculates by the run's flags or not at all. Hands groups on."""
        async with self.update_lock:
            self._speculates = speculates
            try:
                await in_flight.leave(self.client)  # while the tokens so far still count
                self.engine_up.clear()
                self.served.engine_died()
                self.show()
                await self.kill_engine(reason)
            finally:
                in_flight.leaving = False

    async def attach(self, client: EngineClient) -> None:
        """Attaches an engine that has started: its weights have not been verified, unless nothing is trained and they are the only ones."""
        self.client = client
        if self._prefills is not None:
            self._prefills.key = await self._gateway_key()
        if self._for_gateways or not self.takes_tasks:
            self.proxy.gateway_key = await self._gateway_key()
            self.proxy.renew_key = self._gateway_key
            self._service.metrics.set(CONTEXT_GAUGE, client.capabilities.max_sequence)
            self._service.metrics.set(VOCABULARY_GAUGE, client.capabilities.vocab_size)
            self._service.metrics.set(KEPT_GAUGE, client.capabilities.kept_tokens)
            await self.proxy.open(own_address())
        if self._routed or self._service.name == MODEL or hooks.paths(self._service.config, "rollout"):
            await self.open_proxy()
        self.served.engine_started()
        self._tell_of_last("")
        self.engine_up.set()
        if self._service.config.debug.debug_rollout_only or self._service.config.tinker.tinker_endpoint:
            await client.set_weight_version(INITIAL_VERSION)
            await self.serve(INITIAL_VERSION)
        else:
            await self.publish()

    async def _gateway_key(self) -> str:
        return await SessionStore(self._service.store, self._service.run).make_gateway_key(self.proxy.gateway_key)

    async def open_proxy(self) -> None:
        """Opens the way to the engine for routers or generate functions, if it is not open."""
        self.proxy.public = True
        await self.proxy.open(own_address() if self._exposed else LOOPBACK)

    async def _start(self, begun: EngineProcess | None) -> EngineProcess | ExternalEngine:
        """Starts an engine, or takes that of the nodes or of somebody else, and returns once it serves requests and takes weights."""
        service = self._service
        self.show()
        await self.before_start()
        external = ExternalEngine(service.config, self._external, self._report_away) if self._external else None
        engine = external or begun or self._begun()
        self._process = engine
        service.log.info("engine_starting", pid=engine.pid)
        seconds = await engine.ready(self._rollout.engine_start_timeout)
        client = self.client = await engine.client()
        if self._leader is not None and begun is not None:
            await self._leader.tunnels.open(begun.receiver)
        await client.freeze_gc(deadline=60)
        await client.open_receivers(deadline=60)
        service.log.info("engine_ready", seconds=round(seconds, 1), url=client.url, release=client.capabilities.release)
        self.start_seconds = seconds
        service.metrics.set("engine_start_seconds", seconds)
        if not client.capabilities.token_versions:
            service.log.warning("no_token_versions", reason="the staleness bound holds for each request, not for each of its tokens")
        await self.attach(client)
        await self.after_start()
        return engine

    def _begun(self) -> EngineProcess:
        command = replica_command(self._service, self._service.instance, speculates=self._speculates)
        self._bootstrap = engine_flags(command.argv).get(BOOTSTRAP, "")
        process = EngineProcess(command, engine_log(self._service))
        if self._prefills is not None:
            process.way = functools.partial(DecodeTransport, engines=self._prefills)
        return process

    async def _report_away(self, reason: str, late: bool) -> None:
        """Reports why an external engine cannot be used; as an event where it is awaited for longer than its deadline."""
        self._service.detail = f"waits for its engine: {reason}"
        self._service.log.warning("external_engine_awaited", reason=reason, late=late)
        await self.publish()
        if late:
            await self._service.publish_event("external_engine_away", f"{reason}; the run waits for it, and continues with others")

    async def _close(self) -> None:
        self._service.engine = ""
        if self.client is not None:
            await self.client.close()
            self.client = None
        if self._leader is not None:
            await self._leader.tunnels.close()
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.stop, STOP_SECONDS if self._service.stopping.is_set() else 0)
            except MyxoError as error:
                self._service.log.error("engine_not_stopped", error=str(error))
            self._process = None
