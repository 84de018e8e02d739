"""What goes wrong in a run that goes on: dead groups, services that failed, a full disk. Pure, but for what reads the bus or the disk.

Shown on the panel, in plain lines and by ``myxo status``; the exit report has it from the ledger.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nats.js.errors import NotFoundError

from myxo.display.printable import printable
from shared.bus import stream_replay
from shared.bus.connection import Bus
from shared.bus.registry import STANDBY
from shared.bus.subjects import Subjects
from shared.schema.messages import ServiceEvent, ServiceStatus

if TYPE_CHECKING:
    from myxo.launch.supervisor import InstanceStatus

LATELY_SECONDS = 300.0
"""How long the error of a service that is well again is shown."""

FULL_BYTES = 32 << 20
"""A disk with less room than this counts as full."""

SHOWN = 160
"""Characters of a reason in a line."""


@dataclass(frozen=True)
class ServiceError:
    """The newest error of a service. ``restarts``: how often it was started again, 0 where that is not known."""

    instance: str
    restarts: int
    reason: str

    def __str__(self) -> str:
        restarts = f" restarts {self.restarts}" if self.restarts else ""
        return f"{self.instance}{restarts}" + (f": {shown(self.reason)}" if self.reason else "")


@dataclass(frozen=True)
class Troubles:
    """``dead``: groups since the run began; ``dead_reason``: of the newest one in this buffer's life. ``eval_failed``: held-out prompts."""

    dead: int = 0
    dead_per_minute: float = 0.0
    dead_reason: str = ""
    eval_failed: int = 0
    errors: tuple[ServiceError, ...] = ()
    disk: str = ""

    def lines(self) -> list[str]:
        """One line for each trouble."""
        found = []
        if self.dead or self.eval_failed:
            failed = f" and {self.eval_failed} held-out prompts" if self.eval_failed else ""
            reason = f": {shown(self.dead_reason)}" if self.dead_reason else ""
            found.append(f"dead {self.dead} groups{failed} ({self.dead_per_minute:.0f}/min){reason}")
        return [*found, *map(str, self.errors), *([self.disk] if self.disk else [])]


def look(cards: Sequence[ServiceStatus], statuses: Sequence[InstanceStatus], before: Troubles | None = None) -> Troubles:
    """What cards and launcher tell. ``before``: stands in for a buffer that is away."""
    before = before or Troubles()
    buffers = [card for card in cards if card.service == "buffer" and card.state not in (STANDBY, "starting")]
    buffer = max(buffers, key=lambda card: card.at, default=None)
    gauges = buffer.gauges if buffer is not None else {}
    restarted = [
        ServiceError(status.instance, status.restarts, status.last_error)
        for status in statuses
        if status.last_error and (status.due_in is not None or status.lived < LATELY_SECONDS)
    ]
    named = {error.instance for error in restarted}
    logged = [
        ServiceError(card.instance, 0, card.last_error)
        for card in cards
        if card.last_error and card.instance not in named and card.at - card.last_error_at < LATELY_SECONDS
    ]
    return Troubles(
        dead=int(gauges.get("dead", before.dead)),
        dead_per_minute=gauges.get("dead_per_minute", before.dead_per_minute),
        dead_reason=(buffer.detail if buffer is not None else "") or before.dead_reason,
        eval_failed=int(gauges.get("eval_failed", before.eval_failed)),
        errors=(*restarted, *logged),
    )


def with_servers(troubles: Troubles, servers: Iterable[tuple[str, int, str]], root: Path) -> Troubles:
    """The same with the embedded servers' restarts (name, count, reason), and with the disk of the run's directory if it is full."""
    died = (ServiceError(name, restarts, reason) for name, restarts, reason in servers if restarts)
    return replace(troubles, errors=(*troubles.errors, *died), disk=full_disk(root))


def full_disk(root: Path) -> str:
    """What to say of a disk that is full, and nothing else where ``root`` lies on one that is not."""
    free = shutil.disk_usage(root).free
    return f"No space left on device: {free >> 20} MB are free at {root}" if free < FULL_BYTES else ""


async def with_failure(bus: Bus, run: str, troubles: Troubles) -> Troubles:
    """The same with the newest failure that a service has told of lately: its card is gone with it."""
    event = await _newest_failure(bus, run)
    named = {error.instance for error in troubles.errors}
    if event is None or event.instance in named or time.time() - event.at > LATELY_SECONDS:
        return troubles
    return replace(troubles, errors=(*troubles.errors, ServiceError(event.instance, 0, event.detail)))


async def _newest_failure(bus: Bus, run: str) -> ServiceEvent | None:
    names = Subjects(run)
    try:
        last = await bus.js.get_last_msg(names.events_stream, names.event("service", "failed"))
    except NotFoundError:
        return None
    return None if last.data is None else ServiceEvent.decode(last.data)


async def known(bus: Bus, run: str, troubles: Troubles) -> Troubles:
    """The same with what services and launcher have told of failures and restarts since the run began."""
    found = {error.instance: error for error in troubles.errors}
    async for _, event in stream_replay.read(
        bus, Subjects(run).events_stream, ServiceEvent, subject=Subjects(run).event("service", "failed")
    ):
        found[event.instance] = ServiceError(event.instance, 0, event.detail)
    restarts: dict[str, int] = {}
    async for _, event in stream_replay.read(
        bus, Subjects(run).events_stream, ServiceEvent, subject=Subjects(run).event("service", "restarted")
    ):
        restarts[event.instance] = restarts.get(event.instance, 0) + 1
        found[event.instance] = ServiceError(event.instance, restarts[event.instance], event.detail)
    return replace(troubles, errors=tuple(found.values()))


def shown(reason: str) -> str:
    """The reason as a terminal gets it: short, one line, without control characters."""
    text = printable(" ".join(reason.split()))
    return text if len(text) <= SHOWN else text[: SHOWN - 2] + " …"
