"""Derives why a service failed, in one short line, from its log. Pure."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shared.runtime.safe_files import parse_json
from shared.runtime.safe_text import without_credentials

ERROR_LEVELS = ("error", "critical")

LONGEST = 300  # The most characters of a reason
_ENDINGS = ("died", "failed")  # The events that a service logs at its own end; the first names the cause, later ones are consequences
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Lost|Exceeded|Failed|Missing|Refused)\b.*")
_CHANGING = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b|[0-9]+")  # Addresses, ids and numbers differ between two failures of one kind


def short(text: str) -> str:
    """Returns the text as one line of at most `LONGEST` characters, without credentials."""
    line = " ".join(without_credentials(text).split())
    return line if len(line) <= LONGEST else line[: LONGEST - 2] + " …"


def kind(reason: str) -> str:
    """Returns the reason without numbers, addresses and ids: it is equal for two failures of one kind."""
    return _CHANGING.sub("#", reason)


def of_event(event: Mapping[str, Any]) -> str:
    """Returns the reason that a log event names: its error, its exception or, where it has neither, the event itself with its fields."""
    name, error = str(event.get("event", "")), event.get("error") or _raised(event.get("exc_info")) or _last_line(event.get("exception"))
    if not error:
        error = ", ".join(f"{key}={event[key]}" for key in ("reason", "tasks") if key in event)
    what = event.get("what")
    parts = [str(what) if what else "" if name in _ENDINGS else name, str(error)]
    return short(": ".join(part for part in parts if part)) or name


def of_log(lines: Sequence[str]) -> str:
    """Returns the reason in the lines of one process: that of its own end, else that of its last error, else its last line."""
    events = [event for line in lines if (event := _event(line)) is not None and event.get("level") in ERROR_LEVELS]
    ending = next((event for event in events if event.get("event") in _ENDINGS), None)
    if ending is not None:
        return of_event(ending)
    plain = [line for line in lines if _event(line) is None]
    if raised := _uncaught(plain):
        return short(raised)
    if events:
        return of_event(events[-1])
    return short(plain[-1]) if plain else ""


def most(reasons: Mapping[str, int], count: int) -> list[tuple[str, int]]:
    """Returns the ``count`` most frequent kinds of reasons: one example of each, and how often the kind came."""
    kinds: dict[str, tuple[str, int]] = {}
    for reason, times in reasons.items():
        example, before = kinds.get(kind(reason), (reason, 0))
        kinds[kind(reason)] = (example, before + times)
    return sorted(kinds.values(), key=lambda entry: -entry[1])[:count]


def _event(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        event = parse_json(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _uncaught(lines: Iterable[str]) -> str:
    """Returns the last line of the last traceback, else the last line that reads like an exception."""
    found, inside = "", False
    for line in lines:
        if line.strip() == _TRACEBACK:
            inside = True
        elif (inside and line[:1] not in (" ", "\t", "")) or (not inside and _EXCEPTION.fullmatch(line)):
            found, inside = line, False
    return found


def _raised(info: object) -> str:
    error = sys.exc_info()[1] if info is True else info[1] if isinstance(info, tuple) else info
    return f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else ""


def _last_line(text: object) -> str:
    lines = [line for line in str(text or "").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
