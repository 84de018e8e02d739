"""One launch of a run on this machine: servers, services, progress, and the orderly end of them all."""

import asyncio
import os
import signal
import time
from collections.abc import Callable

import structlog
from redis.exceptions import RedisError
from rich.console import Console

from myxo.display.progress_display import Display
from myxo.launch import erase, exit_report
from myxo.launch.console_process import INSTANCE as CONSOLE_INSTANCE
from myxo.launch.console_process import ConsoleProcess
from myxo.launch.disk_watch import DiskWatch, until_room
from myxo.launch.final_weights import FinalWeights
from myxo.launch.frozen_services import FrozenServices
from myxo.launch.run_servers import RunServers
from myxo.launch.service_plan import TRAINERS, ServiceSpec, plan
from myxo.launch.supervisor import StopReason, Supervisor
from myxo.launch.wait_report import WaitReport
from myxo.preflight.server_checks import GivenServers
from myxo.run.run_access import told_when_lost
from myxo.run.run_directory import RunDirectory, ServerUrls
from myxo.run.vocabulary import vocabulary
from shared.accounts.permissions import CONSOLE, rights_of
from shared.bus import runs, streams
from shared.bus.bus_errors import BUS_ERRORS
from shared.bus.connection import Bus
from shared.bus.registry import ENVIRONMENT, Registry
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.runtime import exit_codes
from shared.runtime.addresses import HTTP_VARIABLE
from shared.runtime.errors import BadInput, ConfigError, MyxoError, no_room
from shared.runtime.safe_text import say
from shared.runtime.tasks import cancelled
from shared.schema.ledger import RunFinished
from shared.schema.service_messages import ServiceEvent, ServiceStatus
from shared.service.service_base import HEARTBEATS
from shared.store.payload_store import Store
from shared.view.live_services import InstanceStatus
from shared.view.run_view import RunView, ServiceError, full_disk, look
from shared.view.stall import NATS, STORE, Away, RunSituation

STALE_SHARE = 0.5
"""A service is silent that has not renewed its status for this share of its TTL: it does so five times within."""

TICK_SECONDS = 0.1
POLL_SECONDS = 0.5
"""The interval at which the registry and the run's phase are read."""

POLL_DEADLINE = 2.0
"""The time that bus and store have to take what is published, and to answer."""

SHOW_SECONDS = 0.5

TRAINER_STOP_SECONDS = 8.0
"""The time that the trainer has to stop after SIGTERM, while the others still serve it: it writes a checkpoint and tells the buffer."""

STOP_SECONDS = 6.0
"""The time that the other services then have before everything is killed; they cancel their own work after 4 s."""

LEAVE_SECONDS = 60.0
"""The time that the trainer of a finished run may take to end by itself: it may still be writing the final weights."""

TROUBLES_SECONDS = 20.0
"""The deadline for the summary of failures where the run ends unfinished."""


class RunsElsewhere(MyxoError):
    """Services of this run that another launch started are at work on the given bus."""


class Launch:
    """One launch.

    Args:
        directory: held by this process. given: servers from the environment. fresh: forget what the run has done so far.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, given: GivenServers, console: Console, *, fresh: bool) -> None:
        self._config, self._directory, self._given, self._console = config, directory, given, console
        self._fresh, self._run = fresh, config.run.name
        self._started = time.monotonic()
        self._signals: list[signal.Signals] = []
        self._disk = DiskWatch(directory.root, config.bus.full_timeout)
        self._supervised = False  # services were started
        self._began = 0  # steps trained when this launch began
        self._statuses: list[ServiceStatus] = []
        self._finished = self._ended = False  # by the run's phase
        self._failure = ""  # the reason of a phase that says that the run has failed
        self._away = float("-inf")  # when bus or store last did not answer, or had no room, monotonic
        self._gone: dict[str, Away] = {}  # the servers that did not answer when they were last asked
        self._waits, self._frozen = WaitReport(), FrozenServices(config.bus.frozen_timeout)
        self._final = FinalWeights(config)
        self._cut_off = 0.0  # since when the launcher's own connection is broken, seconds since the epoch
        self._browser: ConsoleProcess | None = None
        self._log = structlog.get_logger()

    async def run(self) -> int:
        """Runs the whole launch. Returns the command's exit code; raises MyxoError for what keeps the run from starting."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._signals.append, signum)
        self._log.info("launch_begun")
        while await until_room(self._disk, self._say, lambda: bool(self._signals)):
            try:
                return await self._with_servers()
            except (OSError, MyxoError, *BUS_ERRORS) as error:
                if self._supervised or isinstance(error, BadInput) or not (no_room(error) or full_disk(self._directory.root)):
                    raise
                self._log.warning("start_failed", error=str(error))
        return self._interrupted()

    async def _with_servers(self) -> int:
        guest, given = rights_of(CONSOLE, self._run), self._config.bus
        self._servers = RunServers(
            self._directory, self._given, self._config.store, guest, sync_interval=given.sync_interval, frozen_timeout=given.frozen_timeout
        )
        self._servers.start()
        self._log.info("servers_started")
        try:
            inbox = Subjects(self._run).inbox("operator")
            bus = await Bus.connect(self._servers.nats_url, name=f"{self._run}/launcher", inbox=inbox)
            try:
                with told_when_lost():
                    return await self._with_bus(bus)
            finally:
                await bus.close()
        finally:
            self._directory.remove_servers()
            self._servers.stop()

    async def _with_bus(self, bus: Bus) -> int:
        run, config = self._run, self._config
        specs = plan(config, self._servers.nats_url, os.environ.get(HTTP_VARIABLE, ""))
        if self._given.nats_url is not None and await streams.exists(bus, run):
            await self._refuse_others(bus, None if self._fresh else {spec.instance for spec in specs})
        if self._signals:
            return self._interrupted()
        if not self._fresh and not await streams.exists(bus, run) and (lost := self._directory.without_streams(run, config)):
            raise ConfigError("run.name", run, lost)
        if self._fresh:
            await erase.erase_from_bus(bus, run)
            await erase.erase_from_store(self._servers.redis_url, run)
        finished = await runs.last_record(bus, run, RunFinished)
        if finished is not None and finished.steps >= config.rollout.num_rollout:
            await runs.refuse_differences(bus, config)
            if not (lacking := self._final.announced()):
                self._say(f"Run {run} is finished: {finished.steps} steps. --fresh starts it anew, a larger --num-rollout goes on.")
                return await self._report(bus)
            self._say(lacking)
            specs = self._final.makers(specs)
        await runs.create(bus, config, self._servers.redis_url, await asyncio.to_thread(vocabulary, config))
        self._directory.freeze(config)
        self._start_console()
        url = "" if self._browser is None else self._browser.url
        self._directory.write_servers(ServerUrls(self._servers.nats_url, self._servers.redis_url, os.getpid(), url))
        try:
            self._began = await runs.trained_steps(bus, run)
            self._supervised = True
            return await self._supervise(bus, specs)
        finally:
            if self._browser is not None:
                self._browser.stop()

    def _start_console(self) -> None:
        """Starts the console, and says where it is."""
        if not self._config.console.console:
            return
        nats_url, redis_url = self._servers.guest_urls
        environment = {"MYXO_RUN": self._run, "NATS_URL": nats_url, "REDIS_URL": redis_url, "MYXO_RUN_DIRECTORY": str(self._directory.root)}
        log, frozen_timeout = self._directory.log(CONSOLE_INSTANCE), self._config.bus.frozen_timeout
        self._browser = ConsoleProcess(self._config.console, log, environment, frozen_timeout)
        if self._browser.url:
            self._say(f"Console: {self._browser.url}")

    # --- while it runs

    async def _supervise(self, bus: Bus, specs: list[ServiceSpec]) -> int:
        """Supervises until the run is finished, cannot go on, or is to stop."""
        supervisor = Supervisor(
            specs,
            self._directory.log,
            excused=lambda since: max(self._away, self._servers.troubled) >= since,
        )
        polling = asyncio.create_task(self._poll(bus, supervisor))
        shown = Display(self._console, self._started)
        stopped: StopReason | None = None
        try:
            stopped = await self._until_end(bus, supervisor, polling, shown)
            if stopped is not None and not (stopped.bad_input or self._finished):
                await self._fail(bus, stopped.reason)
            if self._finished and not self._signals:
                await self._wait(lambda: not any(map(supervisor.running, TRAINERS)), LEAVE_SECONDS)
        finally:
            shown.close()
            await self._stop(supervisor)
            await cancelled([polling])
            for signum in (signal.SIGINT, signal.SIGTERM):  # nothing is left that a signal could interrupt
                asyncio.get_running_loop().remove_signal_handler(signum)
        if self._finished and stopped is None:
            return self._final.verdict(await self._report(bus))
        await self._show_troubles(bus)
        if stopped is not None:
            return self._give_up(stopped)
        return self._interrupted() if self._signals else self._failed()

    async def _until_end(self, bus: Bus, supervisor: Supervisor, polling: asyncio.Task[None], shown: Display) -> StopReason | None:
        view, show_at, disk = RunView.at_start(self._config, self._began), 0.0, self._disk
        while not self._signals:
            now = time.monotonic()
            self._tick_servers(now, disk)
            held_back = any(status.held_back for status in self._statuses)
            if disk.text or held_back or not bus.connection.is_connected:
                self._away = now
            supervisor.note_ready(self._statuses)
            owed = self._finished and self._final.owed(supervisor, now)
            done = self._ended and not owed
            if not done and (reason := supervisor.tick(now, view.steps, hold=bool(disk.text), finished=owed)) is not None:
                shown.show(view.stopped(reason.reason), now)
                return reason
            if polling.done():
                polling.result()
            if now >= show_at or done:
                show_at = now + SHOW_SECONDS
                view = self._seen(bus, supervisor.statuses(now), view, disk.text)
                shown.show(view.finished(owed) if self._finished else view.stopped(self._failure), now)
            if done:
                return None
            await asyncio.sleep(TICK_SECONDS)
        return None

    def _tick_servers(self, now: float, disk: DiskWatch) -> None:
        """Keeps embedded servers and the console alive; servers that found no room write again once there is some."""
        if disk.look(now, self._servers.full()):
            self._servers.write_again(f"no space was left on the device at {self._directory.root}")
        self._servers.tick(now)
        if self._browser is not None:
            self._browser.tick(now)

    def _seen(self, bus: Bus, instances: list[InstanceStatus], view: RunView, disk: str) -> RunView:
        """Returns the view of the run now, behind ``view``."""
        wait = self._waits.see(self._situation(bus, instances, disk), time.time())
        return look(self._config, self._statuses, instances, self._restarts(), view, self._began, disk, wait)

    def _restarts(self) -> list[ServiceError]:
        """Returns the restarts of embedded servers and of the console."""
        console = [] if self._browser is None else [self._browser.restarts()]
        return [*self._servers.restarts(), *console]

    def _situation(self, bus: Bus, instances: list[InstanceStatus], disk: str) -> RunSituation:
        """Returns what is known of the run now."""
        gone = {**self._gone, **self._servers.away()}
        if bus.connection.is_connected or NATS in gone:
            self._cut_off = 0.0
        else:
            self._cut_off = self._cut_off or time.time()
            gone[NATS] = Away(self._cut_off, "the connection broke, and is being restored")
        silent = self._frozen.silent(self._config.bus.registry_ttl * STALE_SHARE, [item.instance for item in instances])
        statuses = [status for status in self._statuses if status.instance not in silent]
        known = {"away": gone, "silent": silent, "disk": disk, "failure": self._failure, "owed": self._final.wait}
        return RunSituation.of(self._config, statuses, instances, **known)

    async def _poll(self, bus: Bus, supervisor: Supervisor) -> None:
        """Reads the registry and the run's phase, tells of restarts and waits, and notes when bus or store do not answer. Runs until
        cancelled."""
        registry, store, renewed = Registry(bus, self._run), Store(self._servers.redis_url), float("-inf")
        try:
            while True:
                try:
                    if time.monotonic() - renewed >= self._config.bus.registry_ttl / HEARTBEATS:
                        await registry.renew(self._waits.status())  # it also proves that the bus takes heartbeats
                        renewed = time.monotonic()
                    self._statuses = await registry.alive()
                    self._frozen.listen(supervisor, self._statuses)
                    phase, self._failure = await runs.phase_and_reason(bus, self._run)
                    self._finished, self._ended = phase == runs.FINISHED, phase in runs.ENDS
                    await self._publish(bus, supervisor.restarted)
                    await self._publish(bus, self._servers.restarted)
                    if self._browser is not None:
                        await self._publish(bus, self._browser.restarted)
                    await self._publish(bus, self._waits.events)
                    self._gone.pop(NATS, None)
                except BUS_ERRORS as error:
                    self._frozen.look_away()
                    self._note_gone(NATS, error)
                try:
                    await store.ping(deadline=POLL_DEADLINE)
                    self._gone.pop(STORE, None)
                except (RedisError, *BUS_ERRORS) as error:
                    self._note_gone(STORE, error)
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await store.close()

    def _note_gone(self, server: str, error: BaseException) -> None:
        """Notes that a server did not answer."""
        self._away, why = time.monotonic(), str(error) or type(error).__name__
        self._gone[server] = Away(self._gone[server].since if server in self._gone else time.time(), why)
        self._log.warning("servers_away", server=server, error=why)

    async def _publish(self, bus: Bus, events: list[ServiceEvent]) -> None:
        """Publishes events, which the summary counts: of services that were started again, and of waits."""
        while events:
            event = events[0]
            subject, message_id = Subjects(self._run).event("service", event.what), f"{event.instance}.{event.at}"
            await bus.publish(subject, event, msg_id=message_id, deadline=POLL_DEADLINE)
            events.remove(event)

    # --- before and after

    async def _refuse_others(self, bus: Bus, instances: set[str] | None) -> None:
        """Raises RunsElsewhere where services that this launch would start (None: any at all) are at work already.

        Those of a launch that was killed stay in the registry for a while; they are waited for. A buffer elsewhere is welcome: of all
        buffers one is active.
        """
        registry = Registry(bus, self._run)

        async def others() -> list[ServiceStatus]:
            statuses = [status for status in await registry.alive() if status.service != ENVIRONMENT]
            return [status for status in statuses if instances is None or status.instance in instances or status.service in TRAINERS]

        end = time.monotonic() + self._config.bus.registry_ttl * 1.5 + 2  # by then the statuses of services that were killed are gone
        while found := await others():
            if self._signals:
                return
            if time.monotonic() > end:
                who = ", ".join(f"{status.instance} on {status.host} (process {status.pid})" for status in found)
                raise RunsElsewhere(f"run {self._run} has services at work already: {who}; stop them first")
            await asyncio.sleep(POLL_SECONDS)

    async def _stop(self, supervisor: Supervisor) -> None:
        """Stops every service: asked first, the trainer before those it needs, killed when time is up or at another signal."""
        signals = len(self._signals)
        for service in TRAINERS:
            supervisor.terminate(service)
        await self._wait(lambda: not any(map(supervisor.running, TRAINERS)), TRAINER_STOP_SECONDS)
        if len(self._signals) == signals:
            supervisor.terminate()
            await self._wait(lambda: not supervisor.running(), STOP_SECONDS)
        killed = supervisor.kill()
        if killed:
            self._log.warning("services_killed", killed=killed)

    async def _wait(self, condition: Callable[[], bool], deadline: float) -> None:
        """Waits until ``condition`` holds, for ``deadline`` seconds at most, or until there is one more signal."""
        signals, end = len(self._signals), time.monotonic() + deadline
        while not condition() and time.monotonic() < end and len(self._signals) == signals:
            await asyncio.sleep(TICK_SECONDS)

    async def _report(self, bus: Bus) -> int:
        """Prints audit and summary while the servers are still supervised: one that dies meanwhile is restarted for the next try."""
        work = asyncio.create_task(exit_report.report_in_time(bus, self._config, self._directory, self._console))
        try:
            while not (await asyncio.wait({work}, timeout=TICK_SECONDS))[0]:
                self._servers.tick(time.monotonic())
            return work.result()
        finally:
            await cancelled([work])

    async def _fail(self, bus: Bus, reason: str) -> None:
        """Records that the run has failed, for `myxo status` and for services that were started elsewhere."""
        try:
            await runs.set_phase(bus, self._run, runs.FAILED, reason)
        except BUS_ERRORS as error:
            self._log.warning("failure_not_written_down", error=str(error) or type(error).__name__)

    async def _show_troubles(self, bus: Bus) -> None:
        """Prints the part of the summary that lists failures, for a run that ends before it is finished."""
        if full := full_disk(self._directory.root):
            self._say(full)
        if self._waits.newest is not None:
            self._say(f"At its end the run waited for {self._waits.newest.words(time.time())}.")
        try:
            async with asyncio.timeout(TROUBLES_SECONDS):
                await exit_report.report_troubles(bus, self._config, self._console)
        except BUS_ERRORS as error:
            self._say(f"What went wrong cannot be summed up: {str(error) or type(error).__name__}; `myxo summary {self._run}` tries again.")

    def _failed(self) -> int:
        say(f"myxo: run {self._run} failed: {self._failure}")
        return exit_codes.RUN_FAILED

    def _give_up(self, stopped: StopReason) -> int:
        if stopped.bad_input:
            line = stopped.lines[-1] if stopped.lines else f"{stopped.instance} refused its input; see {stopped.log_path}"
            say(f"myxo: {line}")
            return exit_codes.BAD_INPUT
        for line in stopped.lines:
            say(f"  {line}")
        say(f"myxo: {stopped.reason}; its last lines are above, all of them in {stopped.log_path}")
        return exit_codes.RUN_FAILED

    def _interrupted(self) -> int:
        first = self._signals[0]
        self._say(f"Stopped by {first.name}. `myxo up` with the same config goes on from the last checkpoint.")
        return 128 + first

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)
