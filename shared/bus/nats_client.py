"""The client of the NATS server under a `shared.bus.connection.Bus`: how it connects, when another attempt is hopeless, what is refused."""

import asyncio
import contextlib
import time
from typing import Any

import nats.errors
import structlog
from nats.aio.client import Client
from nats.js import JetStreamContext

from shared.bus.bus_errors import ATTEMPT_SECONDS, RETRY_PAUSE, BusUnreachable, NotPermitted, PermissionErrors, hopeless_reason, redacted
from shared.runtime import addresses
from shared.runtime.tasks import cancelled


class NatsClient:
    """A connection that is restored whenever it breaks.

    Attributes:
        connection: the library's. js: its JetStream. restored_s: when it was last restored, monotonic seconds; 0: never.
    """

    def __init__(self, url: str, inbox: str) -> None:
        self.url, self._inbox = url, inbox
        self.connection = Client()
        self.js: JetStreamContext = self.connection.jetstream(timeout=ATTEMPT_SECONDS)
        self.restored_s = 0.0
        self._restored = asyncio.Event()  # replaced by another each time
        self._refusals = PermissionErrors(inbox)
        self._last_error = "no answer"
        self._hopeless: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._log = structlog.get_logger()

    async def open(self, name: str, deadline: float) -> None:
        """Connects. Raises BusUnreachable after ``deadline`` seconds, or at once if another attempt cannot help."""
        encrypted = any(part.startswith("tls:") for part in self.url.split(","))
        opened = asyncio.create_task(
            self.connection.connect(
                self.url.split(","),
                name=name,
                tls=addresses.trusted(addresses.authorities()) if encrypted else None,
                inbox_prefix=self._inbox,
                connect_timeout=2,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RETRY_PAUSE,  # type: ignore[arg-type]
                ping_interval=10,
                max_outstanding_pings=3,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                allow_reconnect=True,
            )
        )
        either: set[asyncio.Future[Any]] = {opened, self._hopeless}
        try:
            await asyncio.wait(either, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
            if self._hopeless.done():
                raise BusUnreachable(f"the NATS server at {redacted(self.url)}: {self._hopeless.result()}")
            if opened.done():
                return opened.result()
        except (OSError, nats.errors.Error, ValueError) as error:  # what the library does not try again, such as a URL that is none
            self._last_error = str(error)
        finally:
            await cancelled([opened])
        raise BusUnreachable(f"no NATS server at {redacted(self.url)} within {deadline:g} s ({self._last_error})")

    async def _on_error(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
        self._refusals.note(self._last_error)
        if not self._hopeless.done() and (reason := hopeless_reason(error)):
            self._hopeless.set_result(reason)
        if not isinstance(error, OSError):  # these come from the attempts of the reconnect loop; the disconnect itself is logged once
            self._log.warning("bus_error", error=self._last_error)

    async def _on_disconnected(self) -> None:
        if not self.connection.is_closed:  # not if this side closed the connection
            self._log.warning("bus_disconnected")

    async def _on_reconnected(self) -> None:
        self.restored_s = time.monotonic()
        self._restored.set()
        self._restored = asyncio.Event()
        self._log.info("bus_reconnected")

    async def request(self, subject: str, payload: bytes, seconds: float) -> bytes:
        """Sends a request once and returns the answer. Raises one of `TRANSIENT` without it, at once when the connection was restored
        meanwhile: what was under way when it broke is lost, the request or its answer."""
        asked = asyncio.ensure_future(self.connection.request(subject, payload, timeout=seconds))
        restored = asyncio.ensure_future(self._restored.wait())
        try:
            await asyncio.wait({asked, restored}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return bytes(asked.result().data)
            raise nats.errors.StaleConnectionError
        finally:
            await cancelled([asked, restored])

    async def close(self) -> None:
        """Closes without waiting for anything in flight. A connection that breaks meanwhile counts as closed."""
        with contextlib.suppress(OSError, nats.errors.Error):
            await self.connection.close()

    def raise_if_refused(self, start: float, *subjects: str) -> None:
        """Raises NotPermitted if the server has refused this client a subject with one of these prefixes since ``start``.

        Args:
            start: `time.monotonic()` before the attempt.
        """
        if words := self._refusals.since(start, *subjects):
            raise NotPermitted(f"the NATS server at {redacted(self.url)} refuses this account: {words}")
