"""``myxo logs RUN``: the services' JSON lines, merged by time and made readable.

Lines without a time (a library's output, a traceback) belong to the line before them in their file.
"""

import argparse
import contextlib
import json
import mmap
import re
import time
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from myxo.commands.command_arguments import add_run, count
from myxo.run.run_directory import OLDER, find, no_such_run
from shared.runtime.errors import ConfigError, nearest

LEVELS = ("debug", "info", "warning", "error", "critical")
_STYLES = {"debug": "dim", "info": "", "warning": "yellow", "error": "bold red", "critical": "bold red"}
_IDS = ("run", "service", "instance", "level", "timestamp", "event", "exception")
_LOCAL_TIME = re.compile(r"\[?(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)")
FOLLOW_SECONDS = 0.3


@dataclass(frozen=True)
class Line:
    """One line of a log. ``at``: ISO time in UTC, that of the line before where it has none; ``fields``: None where it is not JSON."""

    instance: str
    text: str
    at: str
    fields: dict[str, Any] | None = None

    @property
    def level(self) -> str:
        """Returns the level that the line was logged with; info where it has none."""
        level = self.fields.get("level") if self.fields else None
        return level if level in LEVELS else "info"


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_run(command)
    command.add_argument("-f", "--follow", action="store_true", help="continue with new lines as they come")
    command.add_argument("-s", "--service", metavar="S", help="only this service (rollout) or instance (rollout-0)")
    command.add_argument("-n", "--lines", type=count, default=50, metavar="N", help="lines to begin with (default 50)")
    command.add_argument("--level", choices=LEVELS, default="debug", help="only lines of at least this level (default debug: all)")
    command.set_defaults(run_command=logs)


def logs(parsed: argparse.Namespace, console: Console) -> int:
    """Prints the last lines, then continues as more come if asked to.

    Raises ConfigError where there is no such run, or no such service in it.
    """
    service, count, level = parsed.service, parsed.lines, parsed.level
    name, files = find(parsed.run, parsed.dir)
    if files is None:
        raise no_such_run(name, parsed.dir)
    tails = {path: Tail(path) for path in chosen(files.logs, service)}
    last = [line for tail in tails.values() for line in tail.last(count, level)]
    for line in deque(sorted(last, key=lambda line: line.at), count):
        show(console, line)
    tails = dict(filter(lambda item: item[0].parent == files.logs, tails.items()))  # the older ones grow by rotation alone
    while parsed.follow:
        time.sleep(FOLLOW_SECONDS)
        for path in files.logs.glob("*.log"):
            if path not in tails and belongs(path.stem, service):
                tails[path] = Tail(path)
        fresh = [line for tail in tails.values() for line in tail.more() if reaches(line, level)]
        for line in sorted(fresh, key=lambda line: line.at):
            show(console, line)
    return 0


def chosen(directory: Path, service: str | None) -> list[Path]:
    """Returns the log files of a service, an instance, or all. Raises ConfigError for a name that has none."""
    every = sorted(directory.rglob("*.log"))
    paths = [path for path in every if belongs(path.stem, service)]
    if service is not None and not paths:
        known = sorted({path.stem for path in every} | {path.stem.split("-")[0] for path in every})
        expected = f"has no log; {nearest(service, known)}" if known else f"there are no logs in {directory} yet"
        raise ConfigError("--service", service, expected)
    return paths


def belongs(instance: str, service: str | None) -> bool:
    """Returns whether the typed text means an instance: it is the instance's own name, or its kind's."""
    return service is None or instance == service or instance.startswith(f"{service}-")


def reaches(line: Line, level: str) -> bool:
    """Returns whether a line is at least of this level."""
    return LEVELS.index(line.level) >= LEVELS.index(level)


class Tail:
    """A growing log file."""

    def __init__(self, path: Path) -> None:
        self._path, self._older, self._at, self._stamp = path, path.parent / OLDER / path.name, 0, ""
        with contextlib.suppress(FileNotFoundError):  # lines without a time of their own at the beginning follow the older file's last
            self._stamp = datetime.fromtimestamp(self._older.stat().st_mtime, UTC).isoformat()

    def last(self, count: int, level: str) -> list[Line]:
        """Returns the last ``count`` lines of at least ``level``; `more` continues behind the file's present last line."""
        self._at = self._begin_of(count, level)
        return list(deque((line for line in self.more() if reaches(line, level)), count))

    def _begin_of(self, count: int, level: str) -> int:
        """Returns where the last lines begin, the first with a time of its own, for those after it. No more of the file is read."""
        if not self._path.stat().st_size:
            return 0
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            begin, found = content.rfind(b"\n") + 1, 0
            while begin:
                end, begin = begin, content.rfind(b"\n", 0, begin - 1) + 1
                text = content[begin:end].decode(errors="replace").strip()
                line = parse(self._path.stem, text, "")
                found += bool(text) and reaches(line, level)
                if found >= count and line.at:
                    break
            return begin

    def more(self) -> list[Line]:
        """Returns the lines that were completed since the last call."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return []
        content = b""
        if size < self._at:  # begun anew by a fresh run, or rotated, with what came in between
            with contextlib.suppress(FileNotFoundError):
                content = self._older.read_bytes()[self._at :]
            self._at = 0
        with self._path.open("rb") as file:
            file.seek(self._at)
            content += (fresh := file.read())
        self._at += fresh.rfind(b"\n") + 1
        lines = []
        for text in content[: content.rfind(b"\n") + 1].decode(errors="replace").split("\n"):
            if text.strip():
                line = parse(self._path.stem, text, self._stamp)
                self._stamp = line.at
                lines.append(line)
        return lines


def parse(instance: str, text: str, at: str) -> Line:
    """Reads one line of an instance's log. ``at``: the time of the line before."""
    if text.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            fields = json.loads(text)
            if isinstance(fields.get("timestamp"), str):
                return Line(instance, text, fields["timestamp"], fields)
    if (stamp := _LOCAL_TIME.match(text)) is not None:  # as an engine's lines carry it
        with contextlib.suppress(ValueError, OverflowError):
            at = datetime.fromisoformat(f"{stamp[1]}T{stamp[2]}").astimezone(UTC).isoformat()
    return Line(instance, text, at)


def show(console: Console, line: Line) -> None:
    """Prints a line: local time, instance, level, event and values."""
    text = Text(f"{_clock(line.at)} {line.instance:10} ", style="dim")
    style = _STYLES[line.level]
    if line.fields is None:
        text.append(line.text, style="none")
    else:
        text.append(f"{line.level:8}", style=style or "cyan")
        text.append(_one_line(line.fields.get("event", "")), style=f"not dim {style}")
        for key, value in line.fields.items():
            if key not in _IDS:
                text.append(f" {_one_line(key)}=", style="dim")
                text.append(_one_line(value if isinstance(value, str) else json.dumps(value)), style="not dim")
        if "exception" in line.fields:
            text.append("\n" + str(line.fields["exception"]).rstrip(), style=style)
    console.print(text, soft_wrap=True, highlight=False)


def _one_line(value: object) -> str:
    """Returns a value with its line ends spelled out: it must not look like a line of its own."""
    return str(value).replace("\n", "\\n")


def _clock(at: str) -> str:
    try:
        return datetime.fromisoformat(at).astimezone().strftime("%H:%M:%S")
    except (ValueError, OverflowError):
        return "--:--:--"
