"""The console beside a run: started, kept alive, ended. Whatever becomes of it, the run goes on."""

import http.client
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import structlog

from myxo.launch.restart_policy import BackOff
from shared.config.console_section import ConsoleSection
from shared.process.child_process import ChildProcess, cause
from shared.process.embedded_servers import free_port
from shared.runtime.addresses import CONSOLE_TOKEN, LAST_PORT, HttpAddress, new_console_token
from shared.runtime.errors import MyxoError
from shared.runtime.safe_text import say
from shared.schema.service_messages import ServiceEvent
from shared.view.run_view import RESTARTED, ServiceError

MODULE = "services.console"

INSTANCE = "console"
"""The name of its log."""

PORTS_TRIED = 20
"""How many ports from the wanted one on are tried before any free one is taken."""

WELL_SECONDS = 10.0
"""The uptime after which a console counts as one that works."""

STOP_SECONDS = 2.0

FIRST_ANSWER_SECONDS = 60.0
"""The uptime after which a console that has never answered counts as one that does not."""

PROBE_SECONDS, ANSWER_SECONDS = 5.0, 5.0
"""The interval at which it is asked whether it answers, and the time that it has for that."""


class ConsoleProcess:
    """The console of one run.

    Args:
        section: where it listens. log: the file of its output. environment: what tells it of its run, see `services.console`.
        frozen_timeout: the seconds without an answer after which it is killed, and started again; 0: never.

    ``url``: its address, token included; empty where it cannot listen anywhere. ``restarted``: of each time that it was started again, with
    why; whoever publishes an event takes it out.
    """

    def __init__(self, section: ConsoleSection, log: Path, environment: Mapping[str, str], frozen_timeout: float = 0.0) -> None:
        self._section, self._log_path, self._environment = section, log, environment
        self._token = new_console_token()
        self._backoff = BackOff()
        self._child: ChildProcess | None = None
        self._due: float | None = 0.0
        self._log = structlog.get_logger()
        self._address: HttpAddress | None = None
        self._frozen_timeout = frozen_timeout
        self._probe, self._probe_at = threading.Thread(), 0.0
        self._answered, self._silent_s = False, 0.0
        self._restarts, self._reason, self._last_reason = 0, "", ""
        self.restarted: list[ServiceEvent] = []
        self.url = ""
        self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        """Starts it where it is not running and its time has come. Raises nothing."""
        self._kill_frozen(now)
        if self._child is not None and (code := self._child.exit_code()) is not None:
            lived = now - self._child.started_s
            self._reason = self._reason or cause(code)
            self._child, wait = None, self._backoff.died(lived, ready=lived >= WELL_SECONDS)
            self._due = None if wait is None else now + wait
            self._log.warning("console_died", reason=cause(code), lived=round(lived, 1), restart_in=wait)
            if wait is None:
                say(f"The console is given up after {self._backoff.most} deaths, the run goes on; {self._log_path} says why.")
        if self._child is None and self._due is not None and now >= self._due:
            try:
                self._start()
            except (MyxoError, OSError) as error:
                self._due = None
                self._log.warning("console_not_started", error=str(error))
                say(f"There is no console, the run goes on: {error}")

    def _start(self) -> None:
        if self._address is None or not _free(self._address):
            before, self._address = self._address, next(filter(_free, _addresses(self._section)), None)
            if self._address is None:
                host, port = self._section.console_host, self._section.console_port
                raise MyxoError(f"console.console_host, console_port = {HttpAddress(host, port)}: nothing there can be listened at")
            shown = HttpAddress("127.0.0.1", self._address.port) if self._address.wildcard else self._address
            self.url = f"http://{shown}/?token={self._token}"
            if before is not None:
                say(f"The console has moved, since {before} is taken: {self.url}")
        given = {
            CONSOLE_TOKEN: self._token,
            "MYXO_CONSOLE": str(self._address),
            "MYXO_CONSOLE_HOSTS": ",".join(self._section.console_hosts),
        }
        environment = {**os.environ, **self._environment, **given, "PYTHONUNBUFFERED": "1"}
        self._child, self._due = ChildProcess(INSTANCE, (sys.executable, "-m", MODULE), self._log_path, environment), None
        self._answered, self._silent_s = False, 0.0
        if self._reason:
            self._restarts += 1
            detail, self._last_reason, self._reason = f"after {self._reason}", self._reason, ""
            self.restarted.append(ServiceEvent(service=INSTANCE, instance=INSTANCE, what=RESTARTED, detail=detail, at=time.time()))

    def restarts(self) -> ServiceError:
        """Returns how often it was started again, and why the last time."""
        return ServiceError(INSTANCE, self._restarts, self._last_reason)

    def _kill_frozen(self, now: float) -> None:
        """Kills a console that has not answered for too long, once it has had time to answer at all."""
        if self._child is None or not self._frozen_timeout:
            return
        if now >= self._probe_at and not self._probe.is_alive():
            self._probe_at = now + PROBE_SECONDS
            self._probe = threading.Thread(target=self._ask, daemon=True)
            self._probe.start()
        awaited = self._answered or now - self._child.started_s >= FIRST_ANSWER_SECONDS
        if awaited and self._silent_s >= self._frozen_timeout:
            self._reason = f"it was frozen, without an answer for {self._silent_s:.0f} s, and was killed"
            self._log.error("console_frozen", error=self._reason)
            self._silent_s = 0.0
            self._child.kill()

    def _ask(self) -> None:
        """Asks the console for anything; to be refused is an answer, too. A question counts for `PROBE_SECONDS`, however long it took."""
        assert self._address is not None
        host = "127.0.0.1" if self._address.wildcard else self._address.host
        connection = http.client.HTTPConnection(host, self._address.port, timeout=ANSWER_SECONDS)
        try:
            connection.request("GET", "/")
            connection.getresponse()
            self._answered, self._silent_s = True, 0.0
        except (OSError, http.client.HTTPException):
            self._silent_s += PROBE_SECONDS
        finally:
            connection.close()

    @property
    def given_up(self) -> bool:
        """Returns whether it neither runs nor will be started again."""
        return self._child is None and self._due is None

    def stop(self) -> None:
        """Ends it."""
        self._due = None
        if self._child is not None:
            try:
                self._child.stop(STOP_SECONDS)
            except MyxoError as error:
                self._log.warning("console_not_stopped", error=str(error))


def _addresses(section: ConsoleSection) -> Iterator[HttpAddress]:
    """Yields where a console may listen, the wanted address first."""
    if section.console_port:
        last = min(section.console_port + PORTS_TRIED - 1, LAST_PORT)
        yield from (HttpAddress(section.console_host, port) for port in range(section.console_port, last + 1))
    for _ in range(PORTS_TRIED):
        yield HttpAddress(section.console_host, free_port())


def _free(address: HttpAddress) -> bool:
    """Returns whether the address can be listened at now."""
    try:
        socket.create_server(address, family=socket.AF_INET6 if ":" in address.host else socket.AF_INET).close()
    except OSError:
        return False
    return True
