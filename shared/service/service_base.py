"""The frame of every service process around its own work: it connects, reads the run's config, answers health checks, renews its status
in the registry, and stops in order.

Environment: ``NATS_URL`` and ``MYXO_RUN`` (required), ``REDIS_URL`` (else the run's), both also in files (`shared.runtime.addresses`);
``MYXO_INSTANCE`` (else host and pid), ``MYXO_HTTP`` (`shared.runtime.addresses`), ``MYXO_LOG_LEVEL``.
Exit codes: 0 done or asked to stop, 2 bad input (one line on standard error), 1 anything else.
"""

import asyncio
import contextlib
import gc
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn

import structlog

from shared import __version__
from shared.bus import runs, streams
from shared.bus.bus_errors import TRANSIENT
from shared.bus.connection import Bus
from shared.bus.registry import MODEL, Registry
from shared.bus.subjects import REWARD, ROLLOUT, RUN_ID, Subjects
from shared.config import devices
from shared.config.run_config import RunConfig
from shared.hub import hub_resolve
from shared.runtime import addresses, exit_codes, failure_summary, http_endpoints, tasks
from shared.runtime.addresses import http_address, own_address
from shared.runtime.errors import BadInput, ConfigError, MyxoError, ServerUnreachable
from shared.runtime.safe_files import private_directory
from shared.runtime.safe_text import say
from shared.runtime.telemetry import Metrics, configure_logs, declare_metrics, last_error
from shared.runtime.traces import Traces, trace_settings
from shared.schema.messages import Generated, Message, Outcome
from shared.schema.service_messages import Doing, ServiceEvent, ServiceStatus
from shared.store.payload_store import HOLDING_SECONDS, SECONDS, Store

declare_metrics("misplaced_statuses_total | | statuses in the registry that named another service than their key, and were ignored")

STOP_SECONDS = 4.0  # The seconds that a service's body has to return after SIGTERM before it is cancelled
REFUSED_SECONDS = 10.0  # For as long no server lets a service in before it ends: one of several may be behind, a certificate in rotation
FAREWELL_SECONDS = 1.0  # The seconds for which a failing service tries to report its failure on the bus
HEARTBEATS = 5  # The number of times that a service renews its status within the registry's TTL


# Returns what a part does at the moment; None: nothing worth telling. It is called from the heartbeat, and must not wait.
Look = Callable[[], Doing | None]


class Activities:
    """What the parts of one service do now, or wait for: each reports it, and the service's status carries it to whoever asks.

    Any thread may report; the heartbeat reads. What a display says of a wait comes from here, so that the words are the service's own.
    """

    def __init__(self) -> None:
        self._told: dict[str, Doing] = {}
        self._looks: list[Look] = []

    def watch(self, look: Look) -> None:
        """Asks ``look`` at every heartbeat from now on."""
        self._looks.append(look)

    def begin(self, part: str, what: str, awaited_from: Sequence[str] = (), next_action: str = "") -> None:
        """Reports that ``part`` begins to do something, or continues with it: the same words keep their beginning."""
        known = self._told.get(part)
        since = known.since if known is not None and known.what == what else time.time()
        self._told[part] = Doing(part=part, what=what, since=since, awaited_from=list(awaited_from), next_action=next_action)

    def end(self, part: str) -> None:
        """Reports that ``part`` does nothing of note any more."""
        self._told.pop(part, None)

    def now(self) -> list[Doing]:
        """Returns what all parts do now."""
        return [*list(self._told.values()), *(found for look in list(self._looks) if (found := look()) is not None)]


class Service:
    """One running service with its connections, config, ids and state. The body of a service gets it and works until `stopping`."""

    def __init__(self, name: str, instance: str, run: str, bus: Bus, config: RunConfig, redis_url: str) -> None:
        self.name, self.instance, self.run, self.bus, self.config = name, instance, run, bus, config
        self.redis_url = redis_url
        self.store = Store(redis_url, run, HOLDING_SECONDS if name in (ROLLOUT, REWARD) else SECONDS)
        bus.full.patience_s = self.store.full.patience_s = config.bus.full_timeout
        self.subjects = Subjects(run)
        self.metrics = Metrics(run, instance)
        self.traces = Traces()
        self.registry = Registry(bus, run, lambda: self.metrics.add("misplaced_statuses"))
        self.stopping = asyncio.Event()
        self.log: Any = structlog.get_logger()
        self.heartbeat = config.bus.registry_ttl / HEARTBEATS  # seconds between two renewals of the status
        self.state = "starting"
        self.activities = Activities()
        self._stated, self._state_since = "", 0.0
        self.version = -1
        self.incarnation = secrets.token_hex(4)  # not the pid: in a container every life has the same one
        self.ranks = 1
        self.host = own_address()
        self.http = self.engine = self.prefill = self.detail = self.holding = self.model = ""
        self._spawned: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        """Closes its connections."""
        await self.store.close()
        await self.bus.close()

    def status(self) -> ServiceStatus:
        """Returns what the registry shows of this service now."""
        if self.state != self._stated:
            self._stated, self._state_since = self.state, time.time()
        return ServiceStatus(
            service=self.name,
            instance=self.instance,
            host=self.host,
            pid=os.getpid(),
            http=self.http,
            engine=self.engine,
            prefill=self.prefill,
            model=self.model,
            state=self.state,
            version=self.version,
            incarnation=self.incarnation,
            ranks=self.ranks,
            gauges=dict(self.metrics.values),
            detail=self.detail,
            held_back=self.held_back,
            last_error=last_error.text,
            last_error_at=last_error.at,
            state_since=self._state_since,
            doing=self.activities.now(),
            at=time.time(),
        )

    @property
    def held_back(self) -> str:
        """Returns why work is held back, while a stream or the store is full; such a service takes no more work. Else nothing."""
        return str(self.bus.full) or str(self.store.full) or self.holding

    async def announce(self) -> None:
        """Renews the status now rather than at the next heartbeat."""
        with contextlib.suppress(MyxoError, *TRANSIENT):
            await self.registry.renew(self.status())

    async def report(self, message: Generated | Outcome, deadline: float = 600, msg_id: str = "") -> None:
        """Publishes what became of a group: samples to be scored, or an outcome, from this service's role, for the buffer. ``msg_id``: by
        which the bus drops what it has already."""
        subject = self.subjects.generated(message.environment) if isinstance(message, Generated) else self.subjects.scored(self.name)
        await self.bus.publish(subject, message, msg_id=msg_id or secrets.token_hex(16), deadline=deadline)

    async def event(self, plane: str, what: str, message: Message, deadline: float = 10) -> None:
        """Publishes an event. No decision depends on events: one that cannot be published is logged and dropped."""
        try:
            await self.bus.publish(self.subjects.event(plane, what), message, deadline=deadline, hold=False)
        except (MyxoError, *TRANSIENT) as error:
            self.log.warning("event_lost", what=what, error=str(error))

    async def publish_event(self, what: str, detail: str = "", deadline: float = 10) -> None:
        """Publishes a `ServiceEvent` about this service."""
        event = ServiceEvent(service=self.name, instance=self.instance, what=what, detail=detail, at=time.time())
        await self.event("service", what, event, deadline)

    def health(self) -> dict[str, object]:
        connected = self.bus.connection.is_connected
        return {
            "ok": connected and self.state not in ("failed", "stopping"),
            "service": self.name,
            "instance": self.instance,
            "run": self.run,
            "state": self.state,
            "version": self.version,
            "bus": connected,
        }

    async def pause(self, seconds: float) -> bool:
        """Waits ``seconds``, or less when asked to stop. Returns whether to continue."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()
        return not self.stopping.is_set()

    background = staticmethod(tasks.background)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine by itself. If it fails, the service ends with its error; whoever has the task may cancel it."""

        def on_done(task: asyncio.Task[None]) -> None:
            self._spawned.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                tasks.fatal(f"task {task.get_name()}", error)

        task = asyncio.create_task(work, name=getattr(work, "__qualname__", None))
        self._spawned.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(on_done)
        return task


def environment() -> tuple[str, str]:
    """Returns the URL of NATS and the run's id. Raises ConfigError for what is missing or malformed."""
    url, run = addresses.nats_url(), os.environ.get("MYXO_RUN")
    if not url:
        raise ConfigError("NATS_URL", url, "required in the environment: nats://[user:password@]host:port, or NATS_URL_FILE")
    if not run or not RUN_ID.match(run):
        raise ConfigError("MYXO_RUN", run, "required in the environment: the run's id, lower-case letters, digits, '-' and '_'")
    return url, run


def default_instance(service: str) -> str:
    """Returns an instance id that is unique among hosts and legal in a subject."""
    given = os.environ.get("MYXO_INSTANCE") or f"{service}-{socket.gethostname()}-{os.getpid()}"
    return re.sub(r"[^A-Za-z0-9_-]", "-", given)


async def connect(name: str, role: str | None = None) -> Service:
    """Connects to bus and store and reads the run's config, in which models and data on the hub become paths on this machine.

    Args:
        name: the service. role: the role of its account, where that is not its name.
    """
    url, run = environment()
    bus = await Bus.connect(url, name=f"{run}/{name}", inbox=Subjects(run).inbox(role or name))
    config, instance, model = await runs.load(bus, run), default_instance(name), ""
    if name == "rollout":
        model, config = devices.engine_of(config, instance)
    if (directory := {"buffer": config.run.root, "trainer": config.trained}.get(role or name)) is not None:
        private_directory(directory, int(config.run.dir_mode, 8))
        if directory == config.run.root and runs.frozen(directory) != config:
            with contextlib.suppress(OSError):
                runs.freeze(directory, config)
    config = await asyncio.to_thread(hub_resolve.for_service, config, name)
    redis_url = addresses.redis_url() or await runs.store_url(bus, run)
    if not redis_url:
        raise ConfigError("REDIS_URL", None, "required (or REDIS_URL_FILE): the run does not say where its payloads lie")
    service = Service(MODEL if model else name, instance, run, bus, config, redis_url)
    service.model = model
    await service.store.ping()
    return service


@contextlib.asynccontextmanager
async def attended(service: Service) -> AsyncIterator[None]:
    """Answers health checks, renews the status and publishes the joined and left events around a service's work."""

    async def heartbeat() -> None:
        while True:
            try:
                await service.registry.renew(service.status())
            except (MyxoError, *TRANSIENT) as error:
                service.log.warning("heartbeat_missed", error=str(error))
            await asyncio.sleep(service.heartbeat)

    loop, errors = asyncio.get_running_loop(), asyncio.Queue[BaseException]()

    async def failure() -> None:
        """Fails as soon as a thread, or a task that was spawned, does."""
        raise await errors.get()

    app = http_endpoints.health_app(service.health, service.metrics.registry)
    async with _traced(service), http_endpoints.serving(app, http_address(service.config.monitoring.http_host)) as service.http:
        try:
            async with service.background(heartbeat(), failure(), service.bus.until_refused(REFUSED_SECONDS)):
                await service.publish_event("joined")
                with tasks.failures_reported(lambda error: loop.call_soon_threadsafe(errors.put_nowait, error)):
                    yield
        except Exception as error:
            await service.publish_event("failed", failure_summary.short(tasks.describe(error)), deadline=FAREWELL_SECONDS)
            raise
        finally:
            service.state = "stopping"
            with contextlib.suppress(MyxoError, *TRANSIENT):
                await service.registry.leave(service.status())
                await service.publish_event("left")


@contextlib.asynccontextmanager
async def _traced(service: Service) -> AsyncIterator[None]:
    """Exports the service's spans while the body runs, where the environment names an endpoint. Raises ConfigError."""
    if (settings := trace_settings(os.environ)) is None:
        yield
        return
    from shared.runtime.span_export import SpanExport  # it imports the exporter, which is needed here alone

    identity = {"name": service.name, "namespace": "myxo", "instance.id": service.instance, "version": __version__}
    resource = {**{f"service.{name}": value for name, value in identity.items()}, "host.name": service.host, "myxo.run": service.run}
    life = f"{service.run} {await streams.created(service.bus, service.run)}"
    service.traces = SpanExport(settings, resource, life, service.metrics)
    try:
        yield
    finally:
        await asyncio.to_thread(service.traces.close)


def settle() -> None:
    """Excludes a service's loaded objects from garbage collection, and makes the collector look for cycles less often.

    Messages and groups come and go without cycles. Looking for some every 700 objects, over all that a buffer holds, was a seventh of
    its work.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


async def _serve(name: str, body: Callable[[Service], Awaitable[None]], settled: Callable[[Service], None]) -> None:
    service = await connect(name)
    settled(service)
    settle()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, service.stopping.set)
    async with contextlib.aclosing(service), attended(service):
        work = asyncio.ensure_future(body(service))
        stop = asyncio.ensure_future(service.stopping.wait())
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({work}, timeout=STOP_SECONDS)
        work.cancel()
        stop.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


def run(name: str, body: Callable[[Service], Awaitable[None]], settled: Callable[[Service], None] = lambda _: None) -> NoReturn:
    """Runs a service process from its start to its exit, with one of the exit codes above. ``settled`` may change name and instance, by
    the run's config, before anybody sees them."""
    sys.exit(exit_code(name, lambda: asyncio.run(_serve(name, body, settled))))


def exit_code(name: str, work: Callable[[], None]) -> int:
    """Runs a service's work with its logs set up and its errors reported; returns the exit code."""
    configure_logs(os.environ.get("MYXO_RUN", ""), name, default_instance(name), level=os.environ.get("MYXO_LOG_LEVEL", "INFO"))
    tasks.arm()
    tasks.log_foreign_threads()
    log = structlog.get_logger()
    try:
        work()
    except MyxoError as error:
        if isinstance(error, (BadInput, runs.NoSuchRun)) or (isinstance(error, ServerUnreachable) and error.refused):
            say(f"{name}: {error}")
            return exit_codes.BAD_INPUT
        log.error("failed", error=str(error), kind=type(error).__name__)
        return exit_codes.FAILED
    except Exception:
        log.exception("failed")
        return exit_codes.FAILED
    return exit_codes.DONE
