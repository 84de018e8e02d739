"""Text for terminals and logs: without control characters, figures and durations in few characters."""

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

_UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1, escape among them, but tab and newline
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # marks that turn the direction of writing
    r"\u2028\u2029\ufeff\ufff9-\ufffb"  # line ends of Unicode, and marks that are not seen
    r"\ud800-\udfff"  # surrogates, which no stream can encode
    r"\U000e0000-\U000e0fff]"  # tags, which are not seen either
)


def printable(text: str) -> str:
    """Returns the text with every character that is unsafe to print spelled out, as ``\\x1b``."""
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


def printable_line(text: str, most: int) -> str:
    """Returns the text as one safe line of about ``most`` characters at most."""
    line = printable(" ".join(text[: 4 * most].split()))
    return line if len(line) <= most else line[: most - 2] + " …"


def say(line: str) -> None:
    """Prints text as one safe line on the standard error."""
    print(printable(line).replace("\n", " "), file=sys.stderr, flush=True)


LINE_LIMIT = 160  # Characters of a reason in a line
LARGE = 1e15  # Numbers from here on are shown by their order


def duration(seconds: float) -> str:
    """Returns a time as people write it: 45s, 2m10s, 3h05m."""
    if not math.isfinite(seconds):
        return f"{seconds}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def number(value: float, form: str = ".0f") -> str:
    """Returns a number in a format; ``nan`` and ``inf`` as such, and one that is too large for a line by its order."""
    return f"{value:{form}}" if abs(value) < LARGE or not math.isfinite(value) else f"{value:.2g}"


def shortened_line(text: str) -> str:
    """Returns the text as one short safe line."""
    return printable_line(text, LINE_LIMIT)


def json_text(value: Any) -> str:
    """Returns plain data as strict JSON, indented and in ASCII; what is not finite becomes null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), indent=2)


def by_fault(faults: Mapping[str, int]) -> str:
    """Returns how many groups died of what, the most frequent first."""
    return ", ".join(f"{count} {fault}" for fault, count in sorted(faults.items(), key=lambda entry: -entry[1]))


def figure_table(figures: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """Returns one line a figure: its name and its value, indented under a title."""
    heading = None if title is None else Text(title)
    table = Table(title=heading, title_justify="left", show_header=False, box=None, padding=(0, 2) if title else (0, 2, 0, 0))
    for name, value in figures:
        table.add_row(Text(name, style="dim"), Text(value))
    return table
