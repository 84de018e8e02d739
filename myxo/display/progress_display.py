"""Shows a run's progress: a live panel on a terminal, plain lines elsewhere."""

import itertools
import re
from collections import deque
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shared.runtime.safe_text import LARGE, duration, number, printable
from shared.view.alarms import Alarm, AlarmKind
from shared.view.run_view import RunView

PLAIN_SECONDS = 5.0  # plain lines come no closer together than this
PACE_STEPS = 20  # most steps over which the pace, and the time left, are measured
_SECONDS = re.compile(r"\d+ s\b|\d+/min\b|\b(?:\d+h)?(?:\d+m)?\d+s\b")

_STATE_STYLES = {
    "ready": "green",
    "standby": "cyan",
    **dict.fromkeys(("starting", "waiting", "ending", "fenced", "late", "away"), "yellow"),
    "stopping": "dim",
    **dict.fromkeys(("refused", "down", "failed", "run failed"), "bold red"),
}


class Pace:
    """The time that the rest of a run takes, from when the last steps were finished."""

    def __init__(self) -> None:
        self._seen: int | None = None
        self._finished: deque[tuple[float, int]] = deque(maxlen=PACE_STEPS + 1)

    def note(self, now: float, steps: int) -> None:
        """Notes that ``steps`` are finished at ``now`` (seconds). Those before the first note or before fewer do not count."""
        if steps < (self._seen or 0):
            self._finished.clear()
        if self._seen is not None and steps > self._seen:
            self._finished.append((now, steps))
        self._seen = steps

    def left(self, of: int) -> float | None:
        """Returns the seconds from the last finished step until ``of`` steps are finished; None before two are known."""
        if len(self._finished) < 2:
            return None
        (began, first), (ended, last) = self._finished[0], self._finished[-1]
        return max(0.0, (of - last) * (ended - began) / (last - first))


class Display:
    """Shows one view after another: on a terminal in a panel that is drawn over again, elsewhere by a plain line where something changed.

    ``started``: monotonic seconds.
    """

    def __init__(self, console: Console, started: float) -> None:
        self._console, self._started, self._pace = console, started, Pace()
        self._last, self._shown_at = "", float("-inf")
        self._alarmed: set[AlarmKind] = set()
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()

    def show(self, view: RunView, now: float, alarms: Sequence[Alarm] = ()) -> None:
        """Shows the run as it is at ``now`` (monotonic seconds), with the alarms that stand; a plain line has those that are new."""
        self._pace.note(now, view.steps)
        elapsed, left = now - self._started, self._pace.left(view.of)
        if self._live is not None:
            self._live.update(panel(view, elapsed, left, alarms), refresh=True)
            return
        for alarm in alarms:
            if alarm.kind not in self._alarmed:
                print(*map(printable, alarm.lines()), sep="\n", file=self._console.file, flush=True)
        self._alarmed = {alarm.kind for alarm in alarms}
        said = what_happened(view)
        news = _SECONDS.sub("", said)  # seconds pass without anything happening
        if news != self._last and (now - self._shown_at >= PLAIN_SECONDS or view.steps >= view.of or view.troubles.stopped):
            self._last, self._shown_at = news, now
            line = "  ".join([said, *_speeds(view), _times(elapsed, left)])
            print(printable(line).replace("\n", " "), file=self._console.file, flush=True)

    def close(self) -> None:
        """Leaves the last view standing."""
        if self._live is not None:
            self._live.stop()


def _speeds(view: RunView) -> list[str]:
    rates = [text for text in (_rate("gen", view.generated_per_s), _rate("train", view.trained_per_s)) if text]
    queues = " ".join(f"{name} {number(waiting)}+{number(held)}" for name, (waiting, held) in view.queues.items())
    return [*rates, f"queues {queues}"] if queues else rates


def what_happened(view: RunView) -> str:
    """Returns the part of a plain line that is worth a new line when it differs: no rates, no times."""
    ready, replicas = view.replicas_ready
    staleness = "" if view.staleness_max is None else f"staleness {_mean_staleness(view)} mean {number(view.staleness_max)} max"
    parts = [
        f"step {view.steps}/{view.of}",
        f"waiting for {view.waiting_for}" if view.waiting_for and view.stalled else "",
        f"reward {number(view.reward, '.3f')}" if view.reward is not None else "",
        *(f"eval/{name} {found}" for name, found in view.evaluations.items()),
        staleness,
        f"v{view.live_version}" if view.live_version >= 0 else "",
        f"replicas {ready}/{replicas}",
        f"restarts {view.restarts}" if view.restarts else "",
        *view.troubles.lines(),
    ]
    return "  ".join(filter(None, parts))


def panel(view: RunView, elapsed: float | None = None, remaining: float | None = None, alarms: Iterable[Alarm] = ()) -> RenderableType:
    """Returns the whole view as a panel. ``elapsed``, ``remaining``: seconds, where they are known. ``alarms``: those that stand."""
    head = Table.grid(padding=(0, 1), expand=True)
    head.add_column(ratio=1)
    head.add_column(justify="right")
    head.add_row(ProgressBar(total=view.of, completed=view.steps), Text.assemble("step ", (str(view.steps), "bold"), f"/{view.of}"))
    parts: list[RenderableType] = [head, _figures(view)]
    if view.queues:
        depths = ", ".join(f"{name} {number(waiting)} waiting + {number(held)} held" for name, (waiting, held) in view.queues.items())
        parts.append(Text(f"queues  {depths}", style="dim"))
    if view.waiting_for:
        parts.append(Text(f"waiting for {view.waiting_for}", style="yellow" if view.stalled else "dim"))
    parts += [_services(view), *(Text(line, style="red") for line in view.troubles.lines()), *alarm_lines(alarms)]
    times = None if elapsed is None else Text(_times(elapsed, remaining))
    return Panel(Group(*parts), title=Text(view.run, style="bold"), subtitle=times, border_style="cyan")


def alarm_lines(alarms: Iterable[Alarm]) -> list[Text]:
    """Returns alarms with what to do, and the commands that show them."""
    return [Text(line, style="bold red" if line.startswith("▲") else "") for alarm in alarms for line in alarm.lines()]


def _figures(view: RunView) -> Table:
    staleness = "–" if view.staleness_max is None else f"{_mean_staleness(view)} mean, {number(view.staleness_max)} max of {view.bound}"
    computing = "" if view.computed_per_s is None else f", {_tokens(view.computed_per_s)} computing"
    cells = [
        ("reward", "–" if view.reward is None else number(view.reward, ".3f")),
        *((f"eval/{name}", str(found)) for name, found in view.evaluations.items()),
        ("live version", "–" if view.live_version < 0 else str(view.live_version)),
        ("staleness", staleness),
        ("generation", _rate("", view.generated_per_s) or "–"),
        ("training", (_rate("", view.trained_per_s) or "–") + computing),
        ("groups in flight", "–" if view.in_flight is None else number(view.in_flight)),
        ("restarts", str(view.restarts)),
    ]
    figures = Table.grid(padding=(0, 2))
    for _ in range(4):
        figures.add_column(no_wrap=True)
    for (left, value), (right, other) in itertools.zip_longest(cells[::2], cells[1::2], fillvalue=("", "")):
        figures.add_row(Text(left, style="dim"), Text(value), Text(right, style="dim"), Text(other))
    return figures


def _services(view: RunView) -> Table:
    table = Table.grid(padding=(0, 2))
    for line in view.services:
        restarts = f"restarted {line.restarts}×" if line.restarts else ""
        version = f"v{line.version}" if line.version >= 0 else ""
        state = Text(line.state, style=_STATE_STYLES.get(line.state, ""))
        table.add_row(Text(line.instance), state, version, Text(line.detail, style="dim"), restarts)
    return table


def _mean_staleness(view: RunView) -> str:
    return number(view.staleness_mean or 0, ".2f")


def _times(elapsed: float, left: float | None) -> str:
    return duration(elapsed) + ("" if left is None else f", about {duration(left)} left")


def _rate(name: str, tokens: float | None) -> str:
    return "" if tokens is None else f"{name} {_tokens(tokens)} tokens/s".strip()


def _tokens(count: float) -> str:
    return f"{count / 1000:.1f}k" if 10_000 <= count < LARGE else number(count)
