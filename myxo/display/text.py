"""Formats text for people: durations, figures beside their names, and foreign text made safe for a terminal."""

import re
from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""C0 and C1 control characters but tab and newline, and those that turn the direction of writing."""

LINE_LIMIT = 160
"""Characters of a reason in a line."""


def duration(seconds: float) -> str:
    """Returns a time as people write it: 45s, 2m10s, 3h05m."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def printable(text: str) -> str:
    """Returns the text with its control characters spelled out: a model's output must not move the cursor or set the window's title."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def shortened_line(text: str) -> str:
    """Returns the text as one short line without control characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= LINE_LIMIT else line[: LINE_LIMIT - 2] + " …"


def figure_table(figures: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """Returns one line a figure: its name and its value, indented under a title."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2) if title else (0, 2, 0, 0))
    for name, value in figures:
        table.add_row(Text(name, style="dim"), Text(value))
    return table
