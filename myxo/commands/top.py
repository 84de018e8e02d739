"""``myxo top RUN``: a run's pipeline and alarms live in the terminal: which stage waits for which, where groups are, what services do."""

import argparse
import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from myxo.commands.command_arguments import add_json, add_run, positive
from myxo.run.run_access import Access, RunWatch, reach
from shared.bus import runs
from shared.bus.bus_errors import BUS_ERRORS
from shared.bus.registry import Registry
from shared.runtime import exit_codes
from shared.runtime.host import cores_awaited
from shared.runtime.safe_text import duration, json_text, number, shortened_line
from shared.schema.service_messages import ServiceStatus
from shared.view.alarms import Alarm
from shared.view.bottleneck import Bottleneck
from shared.view.flow_history import ActivitySpan
from shared.view.flow_view import BUSY, WINDOWS, FlowView, ServiceTimeline, Stage, flow_view

LANE = 48  # cells of a service's timeline
_STOPPED = {"saving", "pushing weights", "paused for a push", "updating", "held back"}
HEIGHTS = "▁▂▃▄▅▆▇█"
KEY = "▁▄█ busy  ▒ stopped for weights or a checkpoint  · waits"


def flow_panel(run: str, view: FlowView, alarms: Iterable[Alarm]) -> RenderableType:
    """Returns the pipeline and the alarms as a panel."""
    when = "now" if view.live else "at its last record"
    parts: list[RenderableType] = [_verdict(view.bottleneck)]
    if view.waiting_for and view.waiting_for not in view.bottleneck.sentence:
        parts.append(Text(f"now waiting for {view.waiting_for}", style="yellow" if view.stalled else "dim"))
    waits = (f"{activity} {100 * share:.0f} %" for activity, share in view.waits.items() if share >= 0.005)
    parts.append(Text("trainer  " + ("  ".join(waits) or "no step was trained in this time")))
    parts += [_stages(view.stages), _services(view)]
    parts.append(Text(f"{KEY}   {duration(view.end - view.begin)} back from {when}", style="dim"))
    whole = sum(view.ages.tokens.values())
    ages = "  ".join(f"{age}: {100 * tokens / whole:.0f} %" for age, tokens in view.ages.tokens.items()) if whole else "nothing trained yet"
    dropped = "".join(f"  {count} groups dropped ({shortened_line(reason)})" for reason, count in view.dropped.items())
    parts.append(Text(f"staleness of tokens, in versions  {ages}  (bound {view.ages.bound}){dropped}", style="dim"))
    parts += [Text.assemble((f"▲ {alarm.title}\n", "bold red"), f"  {alarm.meaning}\n" + "\n".join(alarm.lines()[1:])) for alarm in alarms]
    return Panel(Group(*(Padding(part, (0, 0, 1, 0)) for part in parts)), title=f"[bold]{escape(run)}", border_style="cyan")


def _verdict(found: Bottleneck) -> RenderableType:
    lines: list[RenderableType] = [Text(shortened_line(found.sentence), style="bold")]
    for advice in found.advice:
        withheld = f" (withheld: {advice.withheld})" if advice.withheld else ""
        lines.append(Text(f"→ {advice.text}{withheld}", style="dim" if advice.withheld else ""))
    return Group(*lines)


def _stages(stages: Iterable[Stage]) -> Table:
    table = Table.grid(padding=(0, 3))
    for stage in stages:
        depth = Text("–" if stage.groups is None else number(stage.groups), justify="right")
        oldest = Text("" if stage.oldest_s is None else f"oldest {duration(stage.oldest_s)}", style="dim")
        table.add_row(Text(stage.name, style="dim"), depth, f"{number(stage.per_minute, '.1f')}/min", oldest)
    return table


def _services(view: FlowView) -> Table:
    table = Table.grid(padding=(0, 2))
    for service in view.services:
        busy = Text("" if service.busy is None else f"{100 * service.busy:.0f} %", justify="right")
        table.add_row(Text(service.instance), lane(service, view.begin, view.end), busy, Text(service.doing, style="dim"))
    return table


def lane(service: ServiceTimeline, begin: float, end: float) -> Text:
    """Returns a service's time in `LANE` cells: how much of each it was busy, or else whether it was stopped, waited, or was not seen."""
    cell, text = (end - begin) / LANE, Text()
    for index in range(LANE):
        text.append(*_sign(service.spans, begin + index * cell, begin + (index + 1) * cell))
    return text


def _sign(spans: Iterable[ActivitySpan], begin: float, end: float) -> tuple[str, str]:
    """Returns the sign of what was done from ``begin`` to ``end``, and its style."""
    seconds = {"busy": 0.0, "stopped": 0.0, "waiting": 0.0}
    for span in spans:
        if (inside := min(span.end, end) - max(span.begin, begin)) > 0:
            seconds["busy" if span.activity in BUSY else "stopped" if span.activity in _STOPPED else "waiting"] += inside
    height = round(len(HEIGHTS) * seconds["busy"] / (end - begin))
    if height:
        return HEIGHTS[min(height, len(HEIGHTS)) - 1], "blue"
    if seconds["stopped"] > seconds["waiting"]:
        return "▒", "yellow"
    return ("·", "dim") if seconds["waiting"] else (" ", "")


POLL_INTERVAL_S = 1.0


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_run(command)
    add_json(command, "once, as one JSON object")
    command.add_argument("--once", action="store_true", help="show it once, as is done where the output is no terminal")
    command.add_argument("--window", type=positive, default=float(WINDOWS[0]), help=f"seconds to look back (default {WINDOWS[0]})")
    command.set_defaults(run_command=lambda parsed, console: asyncio.run(top(parsed, console)))


async def top(parsed: argparse.Namespace, console: Console) -> int:
    """Shows the run until it ends, or once. Raises ConfigError where there is no such run."""
    async with reach(parsed.run, parsed.dir) as access:
        found = RunWatch(access.bus, access.config, access.directory.root)
        view, raised = await _look(access, found, parsed.window)
        if parsed.json:
            plain = {**asdict(view), "alarms": [alarm.plain() for alarm in raised]}
            console.file.write(json_text(plain) + "\n")
        elif parsed.once or not access.live or not console.is_terminal:
            console.print(flow_panel(access.run, view, raised))
        else:
            with Live(flow_panel(access.run, view, raised), console=console, screen=True, auto_refresh=False) as shown:
                view, raised = await _until_end(access, found, parsed.window, shown)
            console.print(flow_panel(access.run, view, raised))
    return exit_codes.DONE


async def _look(access: Access, found: RunWatch, window_s: float, away: str = "") -> tuple[FlowView, list[Alarm]]:
    statuses: Sequence[ServiceStatus] = await Registry(access.bus, access.run).alive() if access.live and not away else ()
    raised = await found.standing(statuses, access.live, away)
    now = time.time()
    wait = found.wait_without_bus(away, now) if away else await found.wait(statuses, now) if statuses else None
    kinds = {alarm.kind for alarm in raised}
    return flow_view(found.history, found.config, statuses, now, window_s, kinds, wait, cores_awaited()), raised


async def _until_end(access: Access, watched: RunWatch, window_s: float, shown: Live) -> tuple[FlowView, list[Alarm]]:
    """Shows the run until it has ended; a bus that is away is waited for."""
    while True:
        try:
            found, phase = await _look(access, watched, window_s), await runs.phase(access.bus, access.run)
        except BUS_ERRORS as error:
            found, phase = await _look(access, watched, window_s, str(error) or type(error).__name__), None
        shown.update(flow_panel(access.run, *found), refresh=True)
        if phase in runs.ENDS:
            return found
        await asyncio.sleep(POLL_INTERVAL_S)
