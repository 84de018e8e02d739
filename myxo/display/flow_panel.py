"""Shows a run's pipeline and its alarms in a terminal: who waits for whom, where groups are, what services did."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shared.runtime.safe_text import duration, number, shortened_line
from shared.view.alarms import Alarm
from shared.view.bottleneck import Bottleneck
from shared.view.flow_history import ActivitySpan
from shared.view.flow_view import BUSY, FlowView, ServiceTimeline, Stage

LANE = 48
"""Cells of a service's timeline."""

_STOPPED = {"saving", "pushing weights", "paused for a push", "updating", "held back"}
HEIGHTS = "▁▂▃▄▅▆▇█"

KEY = "▁▄█ busy  ▒ stopped for weights or a checkpoint  · waits"


def flow_panel(run: str, view: FlowView, alarms: Iterable[Alarm]) -> RenderableType:
    """Returns the pipeline and the alarms as a panel."""
    when = "now" if view.live else "at its last record"
    parts: list[RenderableType] = [*_verdict(view.bottleneck), *_next_step(view), _waits(view), _stages(view.stages), _services(view)]
    parts.append(Text(f"{KEY}   {duration(view.end - view.begin)} back from {when}", style="dim"))
    parts += [_staleness(view), *(_alarm(alarm) for alarm in alarms)]
    return Panel(Group(*(Padding(part, (0, 0, 1, 0)) for part in parts)), title=f"[bold]{escape(run)}", border_style="cyan")


def _verdict(found: Bottleneck) -> list[RenderableType]:
    lines: list[RenderableType] = [Text(shortened_line(found.sentence), style="bold")]
    for advice in found.advice:
        withheld = f" (withheld: {advice.withheld})" if advice.withheld else ""
        lines.append(Text(f"→ {advice.text}{withheld}", style="dim" if advice.withheld else ""))
    return [Group(*lines)]


def _next_step(view: FlowView) -> list[RenderableType]:
    if not view.waiting_for or view.waiting_for in view.bottleneck.sentence:
        return []
    return [Text(f"now waiting for {view.waiting_for}", style="yellow" if view.stalled else "dim")]


def _waits(view: FlowView) -> Text:
    parts = (f"{activity} {100 * share:.0f} %" for activity, share in view.waits.items() if share >= 0.005)
    return Text("trainer  " + ("  ".join(parts) or "no step was trained in this time"))


def _stages(stages: Iterable[Stage]) -> Table:
    table = Table.grid(padding=(0, 3))
    for stage in stages:
        depth = "–" if stage.groups is None else number(stage.groups)
        oldest = "" if stage.oldest_s is None else f"oldest {duration(stage.oldest_s)}"
        table.add_row(
            Text(stage.name, style="dim"), Text(depth, justify="right"), f"{number(stage.per_minute, '.1f')}/min", Text(oldest, style="dim")
        )
    return table


def _services(view: FlowView) -> Table:
    table = Table.grid(padding=(0, 2))
    for service in view.services:
        busy = "" if service.busy is None else f"{100 * service.busy:.0f} %"
        table.add_row(
            Text(service.instance), lane(service, view.begin, view.end), Text(busy, justify="right"), Text(service.doing, style="dim")
        )
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


def _staleness(view: FlowView) -> Text:
    whole = sum(view.ages.tokens.values())
    ages = "  ".join(f"{age}: {100 * tokens / whole:.0f} %" for age, tokens in view.ages.tokens.items()) if whole else "nothing trained yet"
    dropped = "".join(f"  {count} groups dropped ({shortened_line(reason)})" for reason, count in view.dropped.items())
    return Text(f"staleness of tokens, in versions  {ages}  (bound {view.ages.bound}){dropped}", style="dim")


def _alarm(alarm: Alarm) -> Text:
    return Text.assemble((f"▲ {alarm.title}\n", "bold red"), f"  {alarm.meaning}\n  {alarm.remedy}")
