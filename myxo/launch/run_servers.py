"""The bus and the store of a run: servers that somebody else runs, or embedded ones that this launcher keeps alive."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from myxo.launch.backoff import BackOff
from myxo.preflight.server_checks import GivenServers
from myxo.run.run_directory import RunDirectory
from shared.runtime.embedded_servers import EmbeddedNats, EmbeddedServer, EmbeddedValkey
from shared.runtime.errors import MyxoError

RESTART_SECONDS = 10.0
"""How long a restarted server may take until it answers. The launcher does nothing else meanwhile: nothing else could go on."""

_ERROR = re.compile(r"error|fail|fatal|panic|no space|\[ERR\]|\[FTL\]", re.IGNORECASE)


class ServerLost(MyxoError):
    """An embedded server that does not come back."""


@dataclass
class _Kept:
    server: EmbeddedServer
    backoff: BackOff
    since: float
    restarts: int = 0
    due: float | None = None
    reason: str = ""


class RunServers:
    """Bus and store for a launched run.

    Args:
        given: servers from the environment; what is absent there is embedded, with its files in ``directory``.
        appendfsync: the embedded Valkey's durability.
    """

    def __init__(self, directory: RunDirectory, given: GivenServers, appendfsync: str) -> None:
        self._kept: list[_Kept] = []
        self.troubled = float("-inf")
        """When an embedded server was last found dead, `time.monotonic` seconds."""
        self.nats_url, self.redis_url = given.nats_url or "", given.redis_url or ""
        if given.nats_url is None:
            nats = EmbeddedNats(directory.nats)
            self.nats_url = nats.url
            self._keep(nats)
        if given.redis_url is None:
            valkey = EmbeddedValkey(directory.valkey, appendfsync)
            self.redis_url = valkey.url
            self._keep(valkey)

    def _keep(self, server: EmbeddedServer) -> None:
        self._kept.append(_Kept(server, BackOff(at_once=True), time.monotonic()))

    def start(self) -> None:
        """Starts the embedded ones. Raises MyxoError with the reason of the first that does not start."""
        try:
            for kept in self._kept:
                kept.server.start()
                kept.since = time.monotonic()
        except MyxoError:
            self.stop()
            raise

    def tick(self, now: float) -> None:
        """Restarts what has died: at once, then with growing waits. Raises ServerLost where that is of no use."""
        for kept in self._kept:
            if kept.server.alive():
                continue
            self.troubled = now
            if kept.due is None:
                self._died(kept, now, ready=True)
            if kept.due is not None and now >= kept.due:
                self._restart(kept)

    def _restart(self, kept: _Kept) -> None:
        kept.restarts += 1
        kept.since = time.monotonic()
        log = structlog.get_logger().bind(server=kept.server.name, restarts=kept.restarts)
        try:
            kept.server.start(deadline=RESTART_SECONDS)
        except MyxoError as error:
            log.warning("server_not_back", error=str(error))
            self._died(kept, time.monotonic(), ready=False)
            return
        kept.due = None
        log.info("server_restarted", seconds=round(time.monotonic() - kept.since, 3))

    def _died(self, kept: _Kept, now: float, ready: bool) -> None:
        wait = kept.backoff.died(now - kept.since, ready)
        if wait is None:
            raise ServerLost(f"{kept.server.name} does not come back after {kept.restarts} restarts; see {kept.server.log_path}")
        kept.due, kept.reason = now + wait, _reason(kept.server.last_words())
        structlog.get_logger().warning("server_died", server=kept.server.name, reason=kept.reason, restart_in=wait)

    def restarts(self) -> dict[str, int]:
        """How often each embedded server was restarted."""
        return {kept.server.name: kept.restarts for kept in self._kept}

    def errors(self) -> list[tuple[str, int, str]]:
        """Name, restarts and newest error of each embedded server."""
        return [(kept.server.name, kept.restarts, kept.reason) for kept in self._kept]

    def logs(self) -> list[Path]:
        """The embedded servers' own log files."""
        return [kept.server.log_path for kept in self._kept]

    def stop(self) -> None:
        """Stops the embedded ones; the store first, for nobody needs it once the services are gone."""
        for kept in reversed(self._kept):
            kept.server.stop()


def _reason(words: str) -> str:
    """A server's last words, where they speak of an error; one that was killed had none."""
    return words if _ERROR.search(words) else "it was killed"
