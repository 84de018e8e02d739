"""The bus and the store of a run: servers that the environment names, or embedded ones that this launcher keeps alive."""

import re
import threading
import time
from dataclasses import dataclass

import structlog

from myxo.launch.disk_watch import RefusedWrites
from myxo.launch.restart_policy import BackOff
from myxo.preflight.server_checks import GivenServers
from myxo.run.run_directory import RunDirectory
from shared.accounts.permissions import Rights
from shared.config.store_section import StoreSection
from shared.process.child_process import ProcessEnded
from shared.process.embedded_servers import EmbeddedNats, EmbeddedServer, EmbeddedValkey
from shared.runtime.errors import MyxoError
from shared.schema.service_messages import ServiceEvent
from shared.view.run_view import RESTARTED, ServiceError
from shared.view.stall import NATS, STORE, Away

RESTART_SECONDS = 10.0
"""The deadline for a restarted server to answer. The launcher does nothing else meanwhile, since everything needs the server."""

PROBE_SECONDS = 2.0
"""The interval at which an embedded server is asked whether it answers."""

LOG_SECONDS = 0.5
"""The interval at which the log of an embedded NATS is read for writes that found no room."""

SERVER = "server"
"""The kind of service that events name for an embedded server."""

SILENT_SECONDS = 6.0
"""A server is away that has not answered for so long."""

_ERROR = re.compile(r"error|fail|fatal|panic|no space|\[ERR\]|\[FTL\]", re.IGNORECASE)


class ServerLost(MyxoError):
    """An embedded server could not be restarted."""


@dataclass
class ManagedServer:
    """An embedded server that is kept alive. ``since``: its last start, ``due``: its next one, monotonic seconds; ``reason``: its newest
    error; ``died_at``: seconds since the epoch; ``silent_s``: for how long it has not
    answered although it runs."""

    server: EmbeddedServer
    backoff: BackOff
    since: float
    restarts: int = 0
    due: float | None = None
    reason: str = ""
    died_at: float = 0.0
    silent_s: float = 0.0

    def probe(self) -> None:
        """Asks the server whether it answers; each question that it does not answer counts for `PROBE_SECONDS`, however long it took: a
        machine that was suspended makes nobody silent."""
        if self.server.answers():
            self.silent_s = 0.0
        elif self.server.alive():
            self.silent_s += PROBE_SECONDS


class RunServers:
    """Bus and store for a launched run.

    Args:
        given: servers from the environment; what is absent there is embedded, with its files in ``directory``.
        store: durability and memory of the embedded Valkey. guest: an account that embedded servers have besides their own.
        sync_interval: seconds between two syncs of the embedded NATS. frozen_timeout: seconds without an answer after which an embedded
            server is killed and started again; 0: never.

    ``guest_urls``: those of NATS and the store for that account; of given servers their own. URLs are final once `start` has returned.
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
        """Of each server that was started again, with why; whoever publishes an event takes it out."""
        self._refused: dict[str, RefusedWrites] = {}
        self._refused_at = 0.0
        self._frozen_timeout, self._probe_at = frozen_timeout, 0.0
        self._probes: list[threading.Thread] = []
        self.troubled = float("-inf")
        """The time when an embedded server was last found dead, in `time.monotonic` seconds."""
        self._nats = given.nats_url or self._managed(EmbeddedNats(directory.nats, guest, sync_interval))
        self._valkey = given.redis_url or self._managed(EmbeddedValkey(directory.valkey, store.appendfsync, store.max_bytes, guest))

    def _managed(self, server: EmbeddedServer) -> EmbeddedServer:
        self.managed.append(ManagedServer(server, BackOff(at_once=True), time.monotonic()))
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
                self._start(managed)
                if isinstance(managed.server, EmbeddedNats):
                    self._refused[managed.server.name] = RefusedWrites(managed.server.log_path)
        except MyxoError:
            self.stop()
            raise

    @staticmethod
    def _start(managed: ManagedServer) -> None:
        """Starts a server, once more where it ended before it was ready: whoever killed it may have meant its memory."""
        try:
            managed.server.start()
        except ProcessEnded as error:
            managed.restarts += 1
            managed.reason = _reason(managed.server.last_words())
            structlog.get_logger().warning("server_died", server=managed.server.name, error=str(error), restart_in=0.0)
            managed.server.start()
        managed.since = time.monotonic()

    def tick(self, now: float) -> None:
        """Restarts dead servers: at once, then with growing waits. Raises ServerLost where one is given up."""
        self._probe(now)
        self._look_for_refusals(now)
        for managed in self.managed:
            if managed.silent_s >= SILENT_SECONDS:
                self.troubled = now
            if self._frozen_timeout and managed.silent_s >= self._frozen_timeout and managed.server.alive():
                self._kill_frozen(managed, now)
            if managed.server.alive():
                continue
            self.troubled = now
            if managed.due is None:
                self._died(managed, now, ready=True)
            if managed.due is not None and now >= managed.due:
                self._restart(managed)

    def _probe(self, now: float) -> None:
        """Asks every embedded server, on threads of their own, whether it answers: one that is frozen is alive and says nothing."""
        if now < self._probe_at or any(thread.is_alive() for thread in self._probes):
            return
        self._probe_at = now + PROBE_SECONDS
        self._probes = [threading.Thread(target=managed.probe, daemon=True) for managed in self.managed if managed.due is None]
        for thread in self._probes:
            thread.start()

    def write_again(self, why: str) -> None:
        """Restarts the embedded NATS server after its disk was full: a stream that could not be written refuses messages until then.

        Valkey tries again by itself, every second.

        Args:
            why: what to say of it.
        """
        for managed in self.managed:
            if isinstance(managed.server, EmbeddedNats) and managed.server.alive():
                self._end_for(managed, time.monotonic(), why)

    def full(self) -> str:
        """Returns what to say of a disk without room on which a server could not write; empty: there is room."""
        return next(filter(None, (refused.full() for refused in self._refused.values())), "")

    def _look_for_refusals(self, now: float) -> None:
        """Ends an embedded NATS that refuses writes for want of room although there is some; `tick` starts it again."""
        if now < self._refused_at:
            return
        self._refused_at = now + LOG_SECONDS
        for managed in self.managed:
            refused = self._refused.get(managed.server.name)
            if refused is None or managed.due is not None:
                continue
            refused.look()
            if refused.refuses_still(now):
                self._end_for(managed, now, f"no space was left on the device for {refused.path}, and with room again it refused writes")

    def _kill_frozen(self, managed: ManagedServer, now: float) -> None:
        self._end_for(managed, now, f"it was frozen, without an answer for {managed.silent_s:.0f} s, and was killed", kill=True)

    def _end_for(self, managed: ManagedServer, now: float, why: str, kill: bool = False) -> None:
        """Ends a server that runs and does no good, and has it started again."""
        structlog.get_logger().error("server_ended", server=managed.server.name, error=why)
        if kill:
            managed.server.stop(0)
        else:
            managed.server.stop()
        self._died(managed, now, ready=True)
        managed.reason, managed.silent_s = why, 0.0

    def _restart(self, managed: ManagedServer) -> None:
        managed.restarts += 1
        managed.since = time.monotonic()
        log = structlog.get_logger().bind(server=managed.server.name, restarts=managed.restarts)
        try:
            managed.server.start(deadline=RESTART_SECONDS)
        except MyxoError as error:
            log.warning("server_not_back", error=str(error))
            self._died(managed, time.monotonic(), ready=False)
            return
        managed.due, managed.silent_s = None, 0.0
        if refused := self._refused.get(managed.server.name):
            refused.forget()
        detail = f"after this: {managed.reason}"
        self.restarted.append(ServiceEvent(service=SERVER, instance=managed.server.name, what=RESTARTED, detail=detail, at=time.time()))
        log.info("server_restarted", seconds=round(time.monotonic() - managed.since, 3))

    def _died(self, managed: ManagedServer, now: float, ready: bool) -> None:
        wait = managed.backoff.died(now - managed.since, ready)
        if wait is None:
            raise ServerLost(f"{managed.server.name} does not come back after {managed.restarts} restarts; see {managed.server.log_path}")
        managed.due, managed.reason, managed.died_at = now + wait, _reason(managed.server.last_words()), time.time()
        structlog.get_logger().warning("server_died", server=managed.server.name, reason=managed.reason, restart_in=wait)

    def away(self) -> dict[str, Away]:
        """Returns the embedded servers that are not there now, as displays name them."""
        found = {_shown(managed.server): _absence(managed) for managed in self.managed}
        return {name: away for name, away in found.items() if away is not None}

    def restarts(self) -> list[ServiceError]:
        """Returns how often each embedded server was restarted, and its newest error."""
        return [ServiceError(managed.server.name, managed.restarts, managed.reason) for managed in self.managed]

    def stop(self) -> None:
        """Stops the embedded ones; the store first, since nothing needs it once the services are gone."""
        for managed in reversed(self.managed):
            managed.server.stop()


def _shown(server: EmbeddedServer) -> str:
    return NATS if isinstance(server, EmbeddedNats) else STORE


def _absence(managed: ManagedServer) -> Away | None:
    if managed.due is None:
        since, why = time.time() - managed.silent_s, "its process runs, and does not answer"
        return Away(since, why, "killed and started again once it is taken for frozen") if managed.silent_s >= SILENT_SECONDS else None
    wait = max(0.0, managed.due - time.monotonic())
    return Away(managed.died_at, managed.reason, f"starts again in {wait:.0f} s, everybody reconnects by itself")


def _reason(words: str) -> str:
    """Returns a server's last log lines where they report an error; one that was killed has none."""
    return words if _ERROR.search(words) else "it was killed"
