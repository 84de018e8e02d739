"""What the judge has said, kept so that the same question is asked once."""

import sqlite3
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import structlog

from shared.runtime.errors import ConfigError

KEPT = 100_000
"""The most verdicts that a reward service keeps in memory."""

_BUSY_SECONDS = 30.0


class VerdictCache:
    """What the judge has said, in memory and, where a file is named, in that: reward services of one machine may share it.

    Raises ConfigError for a file that cannot be used. One that fails later is done without.
    """

    def __init__(self, path: Path | None) -> None:
        self._recent: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self._file: sqlite3.Connection | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, _BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("CREATE TABLE IF NOT EXISTS verdicts (asked TEXT PRIMARY KEY, said TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError("reward.judge_cache", str(path), f"expected an SQLite file that can be written: {error}") from None

    def get(self, asked: str) -> str | None:
        """Returns what was said to a question, None where it was not asked."""
        with self._lock:
            if (known := self._recent.get(asked)) is not None:
                return known
            row = next(iter(self._execute("SELECT said FROM verdicts WHERE asked = ?", asked)), None)
            return None if row is None else str(row[0])

    def put(self, asked: str, said: str) -> None:
        """Keeps what was said."""
        with self._lock:
            self._recent[asked] = said
            while len(self._recent) > KEPT:
                self._recent.popitem(last=False)
            self._execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", asked, said)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _execute(self, statement: str, *values: str) -> list[Any]:
        if self._file is None:
            return []
        try:
            return self._file.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            structlog.get_logger().warning("judge_cache_failed", error=str(error))
            return []
