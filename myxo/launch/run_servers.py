"""The bus and the store of a run: servers that the environment names, or embedded ones that this launcher keeps alive.

While the disk of the run's directory is full nothing is restarted, and afterwards what gave up on it is.
"""

import asyncio
import http.client
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import structlog

from myxo.launch.supervisor import BackOff, KeptAlive, Probe
from myxo.run.run_access import GivenServers
from myxo.run.run_directory import RunDirectory
from shared.accounts.permissions import Rights
from shared.config.service_sections import ConsoleSection, StoreSection
from shared.process.child_process import ChildProcess, ProcessEnded, cause
from shared.process.embedded_servers import EmbeddedNats, EmbeddedServer, EmbeddedValkey, free_port
from shared.runtime.addresses import CONSOLE_TOKEN, HTTP_VARIABLE, LAST_PORT, HttpAddress, new_console_token
from shared.runtime.errors import MyxoError
from shared.runtime.safe_text import say
from shared.schema.service_messages import ServiceEvent
from shared.view.run_view import ServiceError, full_disk
from shared.view.stall import NATS, STORE, Away

POLL_SECONDS = 0.2


class DiskFull(MyxoError):
    """The disk stayed full for longer than a run waits for room."""


class DiskWatch:
    """The disk of ``root``.

    ``patience_s``: the seconds that the disk may be full before the run stops.

    ``text``: what to say of it, empty while it has room.
    """

    def __init__(self, root: Path, patience_s: float) -> None:
        self._root, self._patience_s = root, patience_s
        self._since: float | None = None
        self.text = ""

    def look(self, now: float, elsewhere: str = "") -> bool:
        """Looks at the disk. Returns whether it has room again that it had not. Raises DiskFull.

        ``now``: monotonic seconds. ``elsewhere``: what to say of another disk without room that the run writes to.
        """
        full, had_none = full_disk(self._root) or elsewhere, bool(self.text)
        if not full:
            self.text, self._since = "", None
            return had_none
        self._since = now if self._since is None else self._since
        waited = now - self._since
        if waited > self._patience_s:
            raise DiskFull(f"{full}, for {waited:.0f} s; the run stops, `myxo up` with the same config continues once there is room")
        until = f"for {waited:.0f} s now, given up after {self._patience_s:g} s"
        self.text = f"{full}; what fails for it starts again once there is room ({until})"
        return False


async def until_room(watch: DiskWatch, say: Callable[[str], None], stopped: Callable[[], bool]) -> bool:
    """Returns once the disk has room, or ``stopped``: whether it has. ``say`` reports a wait. Raises DiskFull."""
    reported = False
    while not stopped():
        watch.look(time.monotonic())
        if not watch.text:
            return True
        if not reported:
            say(f"Waiting for room: {watch.text}")
        reported = True
        await asyncio.sleep(POLL_SECONDS)
    return False


# What Go says of a write that found no room: ``write PATH: no space left on device``.
_NO_SPACE = re.compile(r"(?P<path>/[^:\n]*): (?:no space left on device|disk quota exceeded)", re.IGNORECASE)
READ_BYTES = 1 << 18  # most of a log that one look reads; of what was written faster the end counts
ROOM_SECONDS = 1.0  # for so long a path must have had room before a server counts as one that refuses although there is


class RefusedWrites:
    """Finds in a server's log that it had no room to write: nats-server refuses all messages of such a stream until it is restarted, though
    there be room again, and says so each time.

    ``log``: its log. What stands in it already does not count.

    ``path``: the file that could not be written; None where none was refused.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read = self._size()
        self._roomy_since: float | None = None
        self.path: Path | None = None

    def look(self) -> None:
        """Reads what is new in the log."""
        size = self._size()
        if size != self._read:
            begin = max(self._read if size > self._read else 0, size - READ_BYTES)
            self._read = size
            with self._log.open("rb") as file:
                file.seek(begin)
                found = _NO_SPACE.findall(file.read(READ_BYTES).decode(errors="replace"))
            self.path = Path(found[-1]) if found else self.path

    def forget(self) -> None:
        """Begins anew, for a server that is started again."""
        self.path, self._roomy_since, self._read = None, None, self._size()

    def full(self) -> str:
        """Returns what to say of the disk while it has no room for the file; empty: it has, or nothing was refused."""
        there = next((parent for parent in self.path.parents if parent.is_dir()), None) if self.path is not None else None
        return full_disk(there) if there is not None else ""

    def refuses_still(self, now: float) -> bool:
        """Returns whether writes were refused, and there is room since a moment. ``now``: monotonic seconds."""
        if self.path is None or self.full():
            self._roomy_since = None
            return False
        self._roomy_since = now if self._roomy_since is None else self._roomy_since
        return now - self._roomy_since >= ROOM_SECONDS

    def _size(self) -> int:
        try:
            return self._log.stat().st_size
        except OSError:
            return 0


# A restarted server has so long to answer, beside reading its files. The launcher does nothing else meanwhile: everything needs the server.
RESTART_SECONDS = 10.0
PROBE_SECONDS = 2.0  # interval at which an embedded server is asked whether it answers
LOG_SECONDS = 0.5  # interval at which the log of an embedded NATS is read for writes that found no room
SERVER = "server"  # kind of service that events name for an embedded server
SILENT_SECONDS = 6.0  # server is away that has not answered for so long
_ERROR = re.compile(r"error|fail|fatal|panic|no space|\[ERR\]|\[FTL\]", re.IGNORECASE)


class ServerLost(MyxoError):
    """An embedded server could not be restarted."""


class ManagedServer(KeptAlive):
    """An embedded server that is kept alive. ``since``: its last start, monotonic seconds. ``refused``: of NATS, the writes that found no
    room."""

    def __init__(self, server: EmbeddedServer) -> None:
        super().__init__(SERVER, server.name, BackOff(at_once=True))
        self.server, self.since = server, time.monotonic()
        self.refused: RefusedWrites | None = None
        self.probe = Probe(lambda: self.server.answers() or not self.server.alive(), PROBE_SECONDS)

    def start(self) -> None:
        """Starts it, once more where it ended before it was ready: whoever killed it may have meant its memory. Raises MyxoError."""
        try:
            self.server.start()
        except ProcessEnded as error:
            self.restarts += 1
            self.error = self._last_error()
            structlog.get_logger().warning("service_died", died=self.name, reason=str(error), restart_in=0.0)
            self.server.start()
        self.since = time.monotonic()
        if isinstance(self.server, EmbeddedNats):
            self.refused = RefusedWrites(self.server.log_path)

    def died(self, now: float, ready: bool, why: str = "") -> None:
        """Sets when it is started again. Raises ServerLost where it is given up."""
        if not self.note_death(now, now - self.since, ready, why or self._last_error()):
            raise ServerLost(f"{self.name} does not come back after {self.restarts} restarts; see {self.server.log_path}")

    def end_if_it_refuses(self, now: float) -> None:
        """Ends a server that refuses writes although its disk has room again."""
        if self.refused is not None:
            self.refused.look()
            if self.refused.refuses_still(now):
                self.end_for(now, f"no space was left on the device for {self.refused.path}, and with room again it refused writes")

    def end_for(self, now: float, why: str, kill: bool = False) -> None:
        """Ends a server that runs and does no good, and has it started again."""
        self.server.stop(*([0] if kill else []))
        self.died(now, ready=True, why=why)
        self.probe.begin()

    def restart(self) -> ServiceEvent | None:
        """Starts it again. Returns the event that reports it; None where it did not start."""
        self.since = time.monotonic()
        try:
            self.server.start(deadline=RESTART_SECONDS)
        except MyxoError as error:
            self.restarts += 1
            structlog.get_logger().warning("server_not_back", server=self.name, error=str(error))
            self.died(time.monotonic(), ready=False)
            return None
        self.probe.begin()
        if self.refused is not None:
            self.refused.forget()
        return self.note_restart()

    def away(self) -> Away | None:
        """Returns why it is not there now, as displays say it; None: it is there."""
        if self.due is not None:
            wait = max(0.0, self.due - time.monotonic())
            return Away(self.ended_at, self.error, f"starts again in {wait:.0f} s, everybody reconnects by itself")
        if self.probe.silent_s < SILENT_SECONDS:
            return None
        since, why = time.time() - self.probe.silent_s, "its process runs, and does not answer"
        return Away(since, why, "killed and started again once it is taken for frozen")

    def _last_error(self) -> str:
        """Returns its last log lines where they report an error; one that was killed has none."""
        words = self.server.last_words()
        return words if _ERROR.search(words) else "it was killed"


CONSOLE_MODULE = "services.console"
CONSOLE_INSTANCE = "console"  # name of its log
PORTS_TRIED = 20  # how many ports from the wanted one on are tried before any free one is taken
WELL_SECONDS = 10.0  # uptime after which a console counts as one that works
CONSOLE_STOP_SECONDS = 2.0
FIRST_ANSWER_SECONDS = 60.0  # uptime after which a console that has never answered counts as one that does not
CONSOLE_PROBE_SECONDS, ANSWER_SECONDS = 5.0, 5.0  # interval at which it is asked whether it answers, and the time that it has for that


class ConsoleProcess(KeptAlive):
    """The console of one run: started, kept alive, ended. Whatever becomes of it, the run continues.

    ``section``: where it listens. ``log``: the file of its output. ``environment``: what tells it of its run, see `services.console`.
    ``frozen_timeout``: the seconds without an answer after which it is killed, and started again; 0: never.

    ``url``: its address, token included; empty where it cannot listen anywhere. ``restarted``: an event of each time that it was started
    again, with why.
    """

    def __init__(self, section: ConsoleSection, log: Path, environment: Mapping[str, str], frozen_timeout: float = 0.0) -> None:
        super().__init__(CONSOLE_INSTANCE, CONSOLE_INSTANCE, due=0.0)
        self._section, self._log_path, self._environment, self._frozen_timeout = section, log, environment, frozen_timeout
        self._token, self._log = new_console_token(), structlog.get_logger()
        self._child: ChildProcess | None = None
        self._address: HttpAddress | None = None
        self._probe = Probe(self._answers, CONSOLE_PROBE_SECONDS)
        self._killed_for = self.url = ""
        self.restarted: list[ServiceEvent] = []
        self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        """Starts it where it is not running and its time has come. Raises nothing."""
        if self._child is not None and self._frozen_timeout:
            self._kill_frozen(self._child, now)
        if self._child is not None and (code := self._child.exit_code()) is not None:
            lived = now - self._child.started_s
            again = self.note_death(now, lived, lived >= WELL_SECONDS, self._killed_for or cause(code))
            self._child, self._killed_for = None, ""
            if not again:
                say(f"The console is given up after {self.backoff.most} deaths, the run continues; {self._log_path} says why.")
        if self._child is None and self.due is not None and now >= self.due:
            try:
                self._start()
            except (MyxoError, OSError) as error:
                self.due = None
                self._log.warning("console_not_started", error=str(error))
                say(f"There is no console, the run continues: {error}")

    def _start(self) -> None:
        if self._address is None or not _free(self._address):
            before, self._address = self._address, next(filter(_free, _addresses(self._section)), None)
            if self._address is None:
                wanted = HttpAddress(self._section.console_host, self._section.console_port)
                raise MyxoError(f"console.console_host, console_port = {wanted}: nothing there can be listened at")
            self.url = f"http://{self._reached(self._address)}/?token={self._token}"
            if before is not None:
                say(f"The console has moved, since {before} is taken: {self.url}")
        hosts = ",".join(self._section.console_hosts)
        own = {CONSOLE_TOKEN: self._token, "MYXO_CONSOLE": str(self._address), "MYXO_CONSOLE_HOSTS": hosts, "PYTHONUNBUFFERED": "1"}
        own[HTTP_VARIABLE] = ""  # the services' ports follow from the launcher's
        command = (sys.executable, "-m", CONSOLE_MODULE)
        self._child = ChildProcess(CONSOLE_INSTANCE, command, self._log_path, {**os.environ, **self._environment, **own})
        self.due = None
        self._probe.begin()
        if self.error:
            self.restarted.append(self.note_restart())

    def _kill_frozen(self, child: ChildProcess, now: float) -> None:
        """Kills a console that has not answered for too long, once it has had time to answer at all."""
        self._probe.tick(now)
        awaited = self._probe.answered or now - child.started_s >= FIRST_ANSWER_SECONDS
        if awaited and self._probe.silent_s >= self._frozen_timeout:
            self._killed_for = f"it was frozen, without an answer for {self._probe.silent_s:.0f} s, and was killed"
            self._probe.silent_s = 0.0
            child.kill()

    @staticmethod
    def _reached(address: HttpAddress) -> HttpAddress:
        return HttpAddress("127.0.0.1", address.port) if address.wildcard else address

    def _answers(self) -> bool:
        """Asks the console for anything; to be refused is an answer, too."""
        assert self._address is not None
        connection = http.client.HTTPConnection(*self._reached(self._address), timeout=ANSWER_SECONDS)
        try:
            connection.request("GET", "/")
            connection.getresponse()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        return True

    @property
    def given_up(self) -> bool:
        """Returns whether it neither runs nor will be started again."""
        return self._child is None and self.due is None

    def stop(self) -> None:
        """Ends it."""
        self.due = None
        if self._child is not None:
            try:
                self._child.stop(CONSOLE_STOP_SECONDS)
            except MyxoError as error:
                self._log.warning("console_not_stopped", error=str(error))


def _addresses(section: ConsoleSection) -> Iterator[HttpAddress]:
    if section.console_port:
        last = min(section.console_port + PORTS_TRIED - 1, LAST_PORT)
        yield from (HttpAddress(section.console_host, port) for port in range(section.console_port, last + 1))
    for _ in range(PORTS_TRIED):
        yield HttpAddress(section.console_host, free_port())


def _free(address: HttpAddress) -> bool:
    try:
        socket.create_server(address, family=socket.AF_INET6 if ":" in address.host else socket.AF_INET).close()
    except OSError:
        return False
    return True


class RunServers:
    """Bus and store for a launched run, and the console beside it.

    ``given``: servers from the environment; what is absent there is embedded, with its files in ``directory``. ``store``: durability and
    memory of the embedded Valkey. ``guest``: an account that embedded servers have besides their own. ``sync_interval``: seconds between
    two syncs of the embedded NATS. ``frozen_timeout``: seconds without an answer after which an embedded server is killed and started
    again; 0: never.

    ``guest_urls``: those of NATS and the store for that account; of given servers their own. URLs are final once `start` has returned.
    ``restarted``: an event of each server that was started again, with why; whoever publishes an event takes it out. ``troubled``: when an
    embedded server was last found dead, in `time.monotonic` seconds.
    """

    def __init__(
        self,
        directory: RunDirectory,
        given: GivenServers,
        store: StoreSection,
        guest: Rights | None = None,
        *,
        sync_interval: float = 1.0,
        frozen_timeout: float = 0.0,
    ) -> None:
        self.managed: list[ManagedServer] = []
        self.restarted: list[ServiceEvent] = []
        self.troubled = float("-inf")
        self._refused_at, self._frozen_timeout = 0.0, frozen_timeout
        self._directory = directory
        self._console: ConsoleProcess | None = None
        self._nats = given.nats_url or self._managed(EmbeddedNats(directory.nats, guest, sync_interval))
        self._valkey = given.redis_url or self._managed(EmbeddedValkey(directory.valkey, store.appendfsync, store.max_bytes, guest))

    def _managed(self, server: EmbeddedServer) -> EmbeddedServer:
        self.managed.append(ManagedServer(server))
        return server

    @property
    def nats_url(self) -> str:
        return self._nats if isinstance(self._nats, str) else self._nats.url

    @property
    def redis_url(self) -> str:
        return self._valkey if isinstance(self._valkey, str) else self._valkey.url

    @property
    def guest_urls(self) -> tuple[str, str]:
        nats, valkey = (server if isinstance(server, str) else server.guest_url for server in (self._nats, self._valkey))
        return nats, valkey

    def start(self) -> None:
        """Starts the embedded ones. Raises MyxoError with the reason of the first that does not start."""
        try:
            for managed in self.managed:
                managed.start()
        except MyxoError:
            self.stop()
            raise

    def start_console(self, section: ConsoleSection, run: str) -> str:
        """Starts the run's console, which is kept alive like the servers. Returns its URL, empty where it cannot listen anywhere."""
        nats_url, redis_url = self.guest_urls
        root = str(self._directory.root)
        environment = {"MYXO_RUN": run, "NATS_URL": nats_url, "REDIS_URL": redis_url, "MYXO_RUN_DIRECTORY": root}
        self._console = ConsoleProcess(section, self._directory.log(CONSOLE_INSTANCE), environment, self._frozen_timeout)
        self._console.restarted = self.restarted
        return self._console.url

    def tick(self, now: float) -> None:
        """Restarts dead servers: at once, then with growing waits. Raises ServerLost where one is given up."""
        if self._console is not None:
            self._console.tick(now)
        look, self._refused_at = now >= self._refused_at, now + LOG_SECONDS if now >= self._refused_at else self._refused_at
        for managed in self.managed:
            if managed.due is None:
                managed.probe.tick(now)
                if look:
                    managed.end_if_it_refuses(now)
            silent_s = managed.probe.silent_s
            if silent_s >= SILENT_SECONDS:
                self.troubled = now
            if self._frozen_timeout and silent_s >= self._frozen_timeout and managed.server.alive():
                managed.end_for(now, f"it was frozen, without an answer for {silent_s:.0f} s, and was killed", kill=True)
            if managed.server.alive():
                continue
            self.troubled = now
            if managed.due is None:
                managed.died(now, ready=True)
            if managed.due is not None and now >= managed.due and (event := managed.restart()) is not None:
                self.restarted.append(event)

    def write_again(self, why: str) -> None:
        """Restarts the embedded NATS server after its disk was full: a stream that could not be written refuses messages until then.

        Valkey tries again by itself, every second. ``why``: what to say of it.
        """
        for managed in self.managed:
            if isinstance(managed.server, EmbeddedNats) and managed.server.alive():
                managed.end_for(time.monotonic(), why)

    def full(self) -> str:
        """Returns what to say of a disk without room on which a server could not write; empty: there is room."""
        return next(filter(None, (managed.refused.full() for managed in self.managed if managed.refused is not None)), "")

    def away(self) -> dict[str, Away]:
        """Returns the embedded servers that are not there now, as displays name them."""
        found = {NATS if isinstance(managed.server, EmbeddedNats) else STORE: managed.away() for managed in self.managed}
        return {name: away for name, away in found.items() if away is not None}

    def restarts(self) -> list[ServiceError]:
        """Returns how often each embedded server and the console were restarted, and the newest error of each."""
        kept: list[KeptAlive] = [*self.managed, *([] if self._console is None else [self._console])]
        return [ServiceError(process.name, process.restarts, process.error) for process in kept]

    def stop(self) -> None:
        """Stops console and embedded servers; the store before the bus, since nothing needs it once the services are gone."""
        if self._console is not None:
            self._console.stop()
        for managed in reversed(self.managed):
            managed.server.stop()
