"""One launch of a run on this machine: servers, services, progress, and the orderly end of them all."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog
from nats.js.errors import NotFoundError
from redis.exceptions import RedisError
from rich.console import Console

from myxo.display.progress_display import Display
from myxo.launch import exit_report
from myxo.launch.run_servers import DiskWatch, RunServers, until_room
from myxo.launch.service_plan import TRAINERS, ServiceSpec, plan
from myxo.launch.supervisor import FrozenServices, RunProgress, StopReason, Supervisor
from myxo.run.run_access import ALARM_SECONDS, GivenServers, RunWatch, make_run, told_when_lost
from myxo.run.run_directory import RunDirectory, ServerUrls, checkpoints
from shared.accounts.permissions import CONSOLE, rights_of
from shared.bus import runs, streams
from shared.bus.bus_errors import BUS_ERRORS
from shared.bus.connection import TRANSIENT, Bus
from shared.bus.registry import ENVIRONMENT, LAUNCHER, Registry
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.model.final_exports import missing_exports
from shared.runtime import exit_codes
from shared.runtime.addresses import own_address
from shared.runtime.errors import BadInput, ConfigError, MyxoError, no_room
from shared.runtime.safe_text import duration, say
from shared.runtime.tasks import cancelled
from shared.schema.service_messages import ServiceEvent, ServiceStatus
from shared.service.service_base import HEARTBEATS
from shared.store.payload_store import Store
from shared.view.alarms import Alarm
from shared.view.live_services import SILENCE_SHARE, InstanceStatus, newest_gauges
from shared.view.run_view import WAITED, WENT_ON, RunView, full_disk, run_view
from shared.view.stall import NATS, STORE, TROUBLES, Away, Cause, PendingWork, RunSituation, Stall, StallWatch, as_doing, watched_stall


async def erase_from_bus(bus: Bus, run: str) -> None:
    """Deletes the run's streams and buckets; absent ones are fine. The ledger goes last, since the run exists as long as its ledger.

    Raises NotPermitted.
    """
    names, start = Subjects(run), time.monotonic()
    buckets = (names.services_bucket, names.leases_bucket, names.secrets_bucket, names.weights_bucket, names.config_bucket)
    streams = (names.task_stream, names.generated_stream, names.scored_stream, names.events_stream, names.commands_stream)
    for stream in (*streams, *(f"KV_{bucket}" for bucket in buckets), names.ledger_stream):
        try:
            await bus.js.delete_stream(stream)
        except NotFoundError:
            continue
        except TRANSIENT:
            bus.raise_if_refused(start, "$JS.API.STREAM.DELETE.")
            raise


async def erase_from_store(url: str, run: str) -> None:
    """Deletes all that the run has there: payloads, its trainers' exchange, clients' commands, producers' ids of groups, sessions."""
    names = Subjects(run)
    async with contextlib.aclosing(Store(url, run)) as store:
        for pattern in (names.payload_keys, names.exchange_keys, names.command_keys, names.ingest_keys, names.session_keys):
            async for key in store.keys(pattern):
                await store.free([key])


TOLD_AFTER_S = 15.0  # Seconds after which a wait is logged that is no trouble by itself
LONG_STEP_S = 300.0  # Seconds after which this holds for a step that the trainer trains


class WaitReport:
    """The waits of one launch.

    Attributes:
        events: of waits that have ended; whoever publishes one takes it out. newest: the wait of the moment; None before the first look.
    """

    def __init__(self) -> None:
        self.events: list[ServiceEvent] = []
        self.newest: Stall | None = None
        self._watch = StallWatch()
        self._logged: Stall | None = None
        self._told_still = 0.0  # since when there was no step when a wait was last reported
        self._log: Any = structlog.get_logger()

    def see(self, situation: RunSituation, now: float) -> Stall:
        """Takes the situation at ``now`` (seconds since the epoch), and returns what the run waits for."""
        found = watched_stall(self._watch, situation, now)
        if (wait := self._logged) is not None and wait.key != found.key:
            self._log.info("run_goes_on", waited_for=wait.awaited, seconds=round(wait.lasted(now), 1))
            words = f"{duration(wait.lasted(now))} for {wait.awaited}"
            what = WENT_ON if wait.cause in TROUBLES - {Cause.DOWN} else WAITED  # what was down stands among the restarts
            self.events.append(ServiceEvent(service=LAUNCHER, instance=LAUNCHER, what=what, detail=words, at=now))
            self._logged = None
        # one that lasts, or the first late one of several without a step between them
        limit = {Cause.TRAINING: LONG_STEP_S, Cause.CLIENTS: float("inf")}.get(found.cause, TOLD_AFTER_S)
        still = found.still(now) if found.still_since > self._told_still else 0.0
        if self._logged is None and (found.cause in TROUBLES or max(found.lasted(now), still) >= limit):
            self._logged, self._told_still = found, found.still_since
            level = self._log.warning if found.cause in TROUBLES else self._log.info
            level("run_waits", waiting_for=found.words(now), cause=found.cause.value)
        self.newest = found
        return found

    def status(self) -> ServiceStatus:
        """Returns what the registry holds of the launcher."""
        newest, own = self.newest or Stall(Cause.STARTING, "services to start"), {"service": LAUNCHER, "instance": LAUNCHER, "http": ""}
        process = {"host": own_address(), "pid": os.getpid(), "at": time.time()}
        return ServiceStatus(**own, **process, state=newest.cause.name, doing=[as_doing(newest)])


LOOK_SECONDS = 0.5  # interval at which the disk is looked at
MARGIN_SECONDS = 60.0  # time that a trainer has, beyond that of a collective, to load what it writes


class FinalWeights:
    """Watches for one run's final weights."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._seconds = config, config.trainer.collective_timeout + MARGIN_SECONDS
        self._missing: list[Path] = []
        self._since: float | None = None  # since when they are waited for, monotonic seconds
        self._look_at = self._since_epoch = 0.0

    def missing(self) -> list[Path]:
        """Returns what is not there and can be written: the last checkpoint lies on this machine."""
        missing = missing_exports(self._config)
        return missing if missing and max(checkpoints(self._config), default=-1) >= self._config.rollout.num_rollout else []

    def owed(self, supervisor: Supervisor, now: float) -> bool:
        """Returns whether the finished run has to wait for them. ``now``: monotonic seconds.

        It does not where they are there, where the trainer has left in order without them (its log says why), and where they took too long
        since its newest life began.
        """
        if self._since is None:
            self._since, self._since_epoch = now, time.time()
        if now >= self._look_at:
            self._look_at, self._missing = now + LOOK_SECONDS, self.missing()
        if not self._missing or supervisor.trainers_left():
            return False
        lives = [now - item.lived for item in supervisor.statuses(now) if item.service in TRAINERS]
        return now - max(self._since, *lives) < self._seconds

    @property
    def wait(self) -> PendingWork | None:
        """Returns what is waited for; None: nothing."""
        if self._since is None or not self._missing:
            return None
        follows = f"given up {self._seconds:g} s after the trainer's start (trainer.collective_timeout and {MARGIN_SECONDS:g} s)"
        return PendingWork(f"the final weights in {self._named()}", self._since_epoch, follows)

    def announced(self) -> str:
        """Returns what to say of a finished run that lacks them; empty: it does not."""
        self._missing = self.missing()
        words = f"Run {self._config.run.name} is finished without its final weights in {self._named()}: its trainer writes them now."
        return words if self._missing else ""

    def makers(self, specs: Sequence[ServiceSpec]) -> list[ServiceSpec]:
        """Returns the services that are needed to write them: no engine, unless the trainer waits for those that share its GPUs."""
        return [spec for spec in specs if self._config.trainer.colocate or spec.service in ("buffer", *TRAINERS)]

    def verdict(self, code: int) -> int:
        """Returns the exit code of a finished run, ``code`` where it has them, and says so where it has not."""
        self._missing = self.missing()
        if not self._missing:
            return code
        run, logs = self._config.run.name, self._config.run.root / "logs"
        lacking = f"myxo: run {run} is finished, but its final weights in {self._named()} are not there"
        say(f"{lacking}; the trainer's log in {logs} tells why; `myxo up` with the same config writes them")
        return exit_codes.RUN_FAILED

    def _named(self) -> str:
        return " and ".join(map(str, self._missing))


TICK_SECONDS = 0.1
POLL_SECONDS = 0.5  # interval at which the registry and the run's phase are read
POLL_DEADLINE = 2.0  # time that bus and store have to take what is published, and to answer
SHOW_SECONDS = 0.5

# The time that the trainer has to stop after SIGTERM, while the others still serve it: it writes a checkpoint and tells the buffer.
TRAINER_STOP_SECONDS = 8.0
SAVE_SECONDS = 180.0  # the time beyond it to end a step, where somebody stops a run: another signal ends it at once
STOP_SECONDS = 6.0  # time that the other services then have before everything is killed; they cancel their own work after 4 s
LEAVE_SECONDS = 60.0  # time that the trainer of a finished run may take to end by itself: it may still be writing the final weights
TROUBLES_SECONDS = 20.0  # deadline for the summary of failures where the run ends unfinished


async def publish_events(bus: Bus, run: str, events: list[ServiceEvent]) -> None:
    """Publishes events, which the summary counts: of services that were started again, and of waits. They are taken out."""
    while events:
        event = events[0]
        subject, message_id = Subjects(run).event("service", event.what), f"{event.instance}.{event.at}"
        await bus.publish(subject, event, msg_id=message_id, deadline=POLL_DEADLINE)
        events.remove(event)


async def refuse_others(bus: Bus, config: RunConfig, instances: set[str] | None, stopped: Callable[[], bool] = lambda: False) -> None:
    """Raises ConfigError where services that a launch would start (None: any at all) are at work already.

    Those of a launch that was killed stay in the registry for a while; they are waited for, unless it is ``stopped``. A buffer elsewhere is
    welcome: of all buffers one is active.
    """
    if not await streams.exists(bus, config.run.name):
        return
    registry = Registry(bus, config.run.name)

    async def others() -> list[ServiceStatus]:
        statuses = [status for status in await registry.alive() if status.service != ENVIRONMENT]
        return [status for status in statuses if instances is None or status.instance in instances or status.service in TRAINERS]

    end = time.monotonic() + config.bus.registry_ttl * 1.5 + 2  # by then the statuses of services that were killed are gone
    while (found := await others()) and not stopped():
        if time.monotonic() > end:
            who = ", ".join(f"{status.instance} on {status.host} (process {status.pid})" for status in found)
            raise ConfigError("run.name", config.run.name, f"it has services at work already: {who}; stop them first, or give another name")
        await asyncio.sleep(POLL_SECONDS)


class Launch:
    """One launch.

    ``files``: held by this process. ``given``: servers from the environment. ``fresh``: forget what was done. ``again``: continues it.
    """

    def __init__(self, config: RunConfig, files: RunDirectory, given: GivenServers, console: Console, *, fresh: bool, again: str) -> None:
        self._config, self._directory, self._given, self._console = config, files, given, console
        self._fresh, self._run, self._again = fresh, config.run.name, again
        self._started = time.monotonic()
        self._signals: list[signal.Signals] = []
        self._disk = DiskWatch(files.root, config.bus.full_timeout)
        self._supervised = False  # services were started
        self._began = 0  # steps trained when this launch began
        self._statuses: list[ServiceStatus] = []
        self._progress = RunProgress()
        self._finished = self._ended = False  # by the run's phase
        self._failure = ""  # the reason of a phase that says that the run has failed
        self._away = self._full = float("-inf")  # when bus or store last did not answer, and when they had no room, monotonic
        self._alarms: list[Alarm] = []
        self._gone: dict[str, Away] = {}  # the servers that did not answer when they were last asked
        self._waits, self._frozen = WaitReport(), FrozenServices(config.bus)
        self._final = FinalWeights(config)
        self._cut_off = 0.0  # since when the launcher's own connection is broken, seconds since the epoch
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
        timing = {"sync_interval": self._config.bus.sync_interval, "frozen_timeout": self._config.bus.frozen_timeout}
        self._servers = RunServers(self._directory, self._given, self._config.store, rights_of(CONSOLE, self._run), **timing)
        self._servers.start()
        self._log.info("servers_started")
        try:
            inbox = Subjects(self._run).inbox("operator")
            bus = await Bus.connect(self._servers.nats_url, name=f"{self._run}/launcher", inbox=inbox)
            async with contextlib.aclosing(bus):
                with told_when_lost():
                    return await self._with_bus(bus)
        finally:
            self._directory.remove_servers()
            self._servers.stop()

    async def _with_bus(self, bus: Bus) -> int:
        run, config = self._run, self._config
        specs = plan(config, self._servers.nats_url)
        if self._given.nats_url is not None:
            await refuse_others(bus, config, None if self._fresh else {spec.instance for spec in specs}, lambda: bool(self._signals))
        if self._signals:
            return self._interrupted()
        if self._fresh:
            await erase_from_bus(bus, run)
            await erase_from_store(self._servers.redis_url, run)
        if await runs.is_finished(bus, config):
            await runs.refuse_differences(bus, config)
            if not (lacking := self._final.announced()):
                done = f"Run {run} is finished: {await runs.trained_steps(bus, run)} steps."
                self._say(f"{done} --fresh starts it anew, a larger --num-rollout continues.")
                return await self._report(bus)
            self._say(lacking)
            specs = self._final.makers(specs)
        if (changed := await make_run(bus, config, self._servers.redis_url)) is not None:
            self._log.info("values_changed", step=changed.step, changed=changed.changed)
            self._say(f"Run {run} {changed.words()}.")
        runs.freeze(self._directory.root, config)
        url = self._servers.start_console(config.console, run) if config.console.console else ""
        if url:
            self._say(f"Console: {url}")
        self._directory.write_servers(ServerUrls(self._servers.nats_url, self._servers.redis_url, os.getpid(), url))
        self._began = await runs.trained_steps(bus, run)
        self._supervised = True
        return await self._supervise(bus, specs)

    # --- while it runs

    async def _supervise(self, bus: Bus, specs: list[ServiceSpec]) -> int:
        away = lambda since: max(self._away, self._servers.troubled) >= since  # noqa: E731
        supervisor = Supervisor(specs, self._directory.log, excused=lambda since: away(since) or self._full >= since, away=away)
        polling, watching = asyncio.create_task(self._poll(bus, supervisor)), asyncio.create_task(self._watch_alarms(bus))
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
            await cancelled([polling, watching])
            for signum in (signal.SIGINT, signal.SIGTERM):  # nothing is left that a signal could interrupt
                asyncio.get_running_loop().remove_signal_handler(signum)
        if self._finished and stopped is None:
            return self._final.verdict(await self._report(bus))
        await self._show_troubles(bus)
        if stopped is not None:
            return self._give_up(stopped)
        if self._signals:
            return self._interrupted()
        self._say(f"Run {self._run}: {exit_report.next_commands(self._config, self._again)}")
        say(f"myxo: run {self._run} failed: {self._failure}")
        return exit_codes.RUN_FAILED

    async def _until_end(self, bus: Bus, supervisor: Supervisor, polling: asyncio.Task[None], shown: Display) -> StopReason | None:
        view, show_at, disk = RunView.at_start(self._config, self._began), 0.0, self._disk
        while not self._signals:
            now = time.monotonic()
            self._tick_servers(bus, now)
            supervisor.note_ready(self._statuses)
            owed = self._finished and self._final.owed(supervisor, now)
            done = self._ended and not owed
            steps = self._progress.seen(view.steps, newest_gauges(self._statuses, "trainer"))
            if not done and (reason := supervisor.tick(now, steps, hold=bool(disk.text), finished=owed)) is not None:
                shown.show(view.stopped(reason.reason), now)
                return reason
            if polling.done():
                polling.result()
            if now >= show_at or done:
                show_at = now + SHOW_SECONDS
                instances = supervisor.statuses(now)
                wait = self._waits.see(self._situation(bus, instances, disk.text), time.time())
                view = run_view(self._config, self._statuses, instances, self._servers.restarts(), view, self._began, disk.text, wait)
                shown.show(view.finished(owed) if self._finished else view.stopped(self._failure), now, self._alarms)
            if done:
                return None
            await asyncio.sleep(TICK_SECONDS)
        return None

    def _tick_servers(self, bus: Bus, now: float) -> None:
        if self._disk.look(now, self._servers.full()):
            self._servers.write_again(f"no space was left on the device at {self._directory.root}")
        self._servers.tick(now)
        if self._disk.text or any(status.held_back for status in self._statuses if status.service != "buffer"):  # which ends nobody
            self._full = now
        if not bus.connection.is_connected:
            self._away = now

    def _situation(self, bus: Bus, instances: list[InstanceStatus], disk: str) -> RunSituation:
        gone = {**self._gone, **self._servers.away()}
        if bus.connection.is_connected or NATS in gone:
            self._cut_off = 0.0
        else:
            self._cut_off = self._cut_off or time.time()
            gone[NATS] = Away(self._cut_off, "the connection broke, and is being restored")
        silent = self._frozen.heartbeats.silent(self._config.bus.registry_ttl * SILENCE_SHARE, [item.instance for item in instances])
        statuses = [status for status in self._statuses if status.instance not in silent]
        known = {"away": gone, "silent": silent, "disk": disk, "failure": self._failure, "owed": self._final.wait}
        return RunSituation.of(self._config, statuses, instances, **known)

    async def _poll(self, bus: Bus, supervisor: Supervisor) -> None:
        """Reads the registry and the run's phase, publishes restarts and waits, notes when bus or store do not answer, until cancelled."""
        registry, renewed = Registry(bus, self._run), float("-inf")
        async with contextlib.aclosing(Store(self._servers.redis_url)) as store:
            while True:
                try:
                    if time.monotonic() - renewed >= self._config.bus.registry_ttl / HEARTBEATS:
                        await registry.renew(self._waits.status())  # it also proves that the bus takes heartbeats
                        renewed = time.monotonic()
                    self._statuses = await registry.alive()
                    self._frozen.listen(supervisor, self._statuses)
                    phase, self._failure = await runs.phase_and_reason(bus, self._run)
                    self._finished, self._ended = phase == runs.FINISHED, phase in runs.ENDS
                    for events in (supervisor.restarted, self._servers.restarted, self._waits.events):
                        await publish_events(bus, self._run, events)
                    self._gone.pop(NATS, None)
                except BUS_ERRORS as error:
                    self._frozen.heartbeats.pause()
                    self._note_gone(NATS, error)
                try:
                    await store.ping(deadline=POLL_DEADLINE)
                    self._gone.pop(STORE, None)
                except (RedisError, *BUS_ERRORS) as error:
                    self._note_gone(STORE, error)
                await asyncio.sleep(POLL_SECONDS)

    async def _watch_alarms(self, bus: Bus) -> None:
        """Keeps the alarms that stand, and the size of the logs, until cancelled. A bus that is away is a wait, which others report."""
        watched = RunWatch(bus, self._config, self._directory.root)
        while True:
            await asyncio.sleep(ALARM_SECONDS)
            await asyncio.to_thread(self._directory.rotate_logs)
            with contextlib.suppress(*BUS_ERRORS):
                self._alarms = await watched.standing(self._statuses, live=True)

    def _note_gone(self, server: str, error: BaseException) -> None:
        self._away, why = time.monotonic(), str(error) or type(error).__name__
        self._gone[server] = Away(self._gone[server].since if server in self._gone else time.time(), why)
        self._log.warning("servers_away", server=server, error=why)

    # --- before and after

    async def _stop(self, supervisor: Supervisor) -> None:
        """Stops every service: asked first, the trainer before those it needs, killed when time is up or at another signal."""
        signals = len(self._signals)
        for service in TRAINERS:
            supervisor.terminate(service)
        await self._wait(gone := lambda: not any(map(supervisor.running, TRAINERS)), TRAINER_STOP_SECONDS)
        if signals and len(self._signals) == signals and not gone():
            self._say("The trainer ends its step and saves; another Ctrl-C ends it at once.")
            await self._wait(gone, SAVE_SECONDS)
        if len(self._signals) == signals:
            supervisor.terminate()
            await self._wait(lambda: not supervisor.running(), STOP_SECONDS)
        if killed := supervisor.kill():
            self._log.warning("services_killed", killed=killed)

    async def _wait(self, condition: Callable[[], bool], deadline: float) -> None:
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
        try:
            await runs.set_phase(bus, self._run, runs.FAILED, reason)
        except BUS_ERRORS as error:
            self._log.warning("failure_not_written_down", error=str(error) or type(error).__name__)

    async def _show_troubles(self, bus: Bus) -> None:
        if full := full_disk(self._directory.root):
            self._say(full)
        if self._waits.newest is not None and (self._waits.newest.cause in TROUBLES or not self._signals):
            self._say(f"At its end the run waited for {self._waits.newest.words(time.time())}.")
        try:
            async with asyncio.timeout(TROUBLES_SECONDS):
                await exit_report.report_troubles(bus, self._config, self._console)
        except BUS_ERRORS as error:
            self._say(f"What went wrong cannot be summed up: {str(error) or type(error).__name__}; `myxo summary {self._run}` tries again.")

    def _give_up(self, stopped: StopReason) -> int:
        if stopped.bad_input:
            line = stopped.lines[-1] if stopped.lines else f"{stopped.instance} refused its input; see {stopped.log_path}"
            say(f"myxo: {line}")
            return exit_codes.BAD_INPUT
        self._say(f"Run {self._run}: {exit_report.next_commands(self._config, self._again)}")
        for line in stopped.lines:
            say(f"  {line}")
        say(f"myxo: {stopped.reason}; its last lines are above, all of them in {stopped.log_path}")
        return exit_codes.RUN_FAILED

    def _interrupted(self) -> int:
        first = self._signals[0]
        self._say(f"Stopped by {first.name}: {exit_report.next_commands(self._config, self._again)}")
        return 128 + first

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)
