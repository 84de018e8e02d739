"""``myxo top RUN``: who waits for whom in a run, what its services do, and what is alarming, live in the terminal."""

import argparse
import asyncio
import functools
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.live import Live

from myxo.commands.command_arguments import add_json, add_run, seconds
from myxo.display.flow_panel import flow_panel
from myxo.run.live_situation import live_situation
from myxo.run.run_access import Access, reach
from shared.bus import runs, streams
from shared.bus.bus_errors import BUS_ERRORS
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.live.alarms import Alarm, alarms
from shared.live.flow_reader import FlowReader
from shared.live.flow_view import WINDOWS, FlowView, flow_view
from shared.live.health_view import symptoms
from shared.live.room import disk_room, memory_room
from shared.live.stall import NATS, Away, RunSituation, Stall, StallWatch
from shared.live.stall_causes import watched_stall
from shared.live.text import json_text
from shared.runtime import exit_codes
from shared.schema.service_messages import ServiceStatus

POLL_INTERVAL_S = 1.0

READ_SECONDS = 15.0
"""The time without progress after which reading a stream is given up."""


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_run(command)
    add_json(command, "once, as one JSON object")
    command.add_argument("--once", action="store_true", help="show it once, as is done where the output is no terminal")
    command.add_argument("--window", type=seconds, default=float(WINDOWS[0]), help=f"seconds to look back (default {WINDOWS[0]})")
    command.set_defaults(run_command=lambda parsed, console: asyncio.run(top(parsed, console)))


async def top(parsed: argparse.Namespace, console: Console) -> int:
    """Shows the run until it ends, or once. Raises ConfigError where there is no such run."""
    async with reach(parsed.run, parsed.dir) as access:
        last = await streams.last_sequence(access.bus, Subjects(access.run).ledger_stream, deadline=READ_SECONDS)
        reader = FlowReader(access.run, functools.partial(streams.read, access.bus, deadline=READ_SECONDS), last)
        waits = RunWaits(access)
        view, raised = await _look(access, reader, parsed.window, waits)
        if parsed.json:
            console.file.write(json_text(_plain(view, raised)) + "\n")
        elif parsed.once or not access.live or not console.is_terminal:
            console.print(flow_panel(access.run, view, raised))
        else:
            with Live(flow_panel(access.run, view, raised), console=console, screen=True, auto_refresh=False) as shown:
                view, raised = await _until_end(access, reader, parsed.window, shown, waits)
            console.print(flow_panel(access.run, view, raised))
    return exit_codes.DONE


class RunWaits:
    """What a run waits for, from one look to the next."""

    def __init__(self, access: Access) -> None:
        self._access, self._watch = access, StallWatch()
        self._bus_since: float | None = None

    async def look(self, statuses: Sequence[ServiceStatus], away: str, now: float) -> Stall | None:
        """Returns the wait; None of a run at rest. ``away``: why the bus is not there. Raises `BUS_ERRORS`."""
        access = self._access
        self._bus_since = (self._bus_since or now) if away else None
        if away:
            situation = RunSituation.of(access.config, (), away={NATS: Away(self._bus_since or now, away)})
        elif not statuses:
            return None
        else:
            situation = await live_situation(access, statuses)
        return watched_stall(self._watch, situation, now)


async def _look(access: Access, reader: FlowReader, window_s: float, waits: RunWaits, away: str = "") -> tuple[FlowView, list[Alarm]]:
    """Returns the pipeline and the alarms now. ``away``: why the bus is not there, which leaves what is known. Raises `BUS_ERRORS`."""
    statuses: Sequence[ServiceStatus] = ()
    if not away:
        statuses = await Registry(access.bus, access.run).alive() if access.live else ()
        await reader.catch_up()
    now, history = time.time(), reader.history
    wait = await waits.look(statuses, away, now)
    reader.look(statuses, now)
    machine = (disk_room(access.directory.root), memory_room()) if access.live else (None, None)
    raised = alarms(symptoms(history, statuses, now, {NATS: away} if away else {}, *machine), access.config)
    return flow_view(history, access.config, statuses, now, window_s, {alarm.kind for alarm in raised}, wait), raised


async def _until_end(access: Access, reader: FlowReader, window_s: float, shown: Live, waits: RunWaits) -> tuple[FlowView, list[Alarm]]:
    """Shows the run until it has ended; a bus that is away is waited for."""
    while True:
        try:
            found, phase = await _look(access, reader, window_s, waits), await runs.phase(access.bus, access.run)
        except BUS_ERRORS as error:
            found, phase = await _look(access, reader, window_s, waits, str(error) or type(error).__name__), None
        shown.update(flow_panel(access.run, *found), refresh=True)
        if phase in runs.ENDS:
            return found
        await asyncio.sleep(POLL_INTERVAL_S)


def _plain(view: FlowView, raised: Sequence[Alarm]) -> dict[str, Any]:
    return {**asdict(view), "alarms": [{**asdict(alarm), "kind": alarm.kind.name.lower()} for alarm in raised]}
