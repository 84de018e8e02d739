"""The index of a run's groups: folds the ledger into tables as it grows, and answers what the Samples page asks.

`GroupHistory` decides what each record makes of a group; this writes what it says. It may be used by several threads.
"""

import json
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.console.run_index.group_query import GroupQuery
from services.console.run_index.group_tables import decoded, empty, encoded, group_row, new_database, span_rows
from shared.data.rollout_files import TRAINED
from shared.history.group_history import GroupHistory, GroupRecord, ProvenanceStep, ledger_words
from shared.schema.ledger import BatchAmended, BatchFormed, BatchTrained, CheckpointDurable, EvalStarted, LedgerRecord, eval_group_parts

FEW = 5000
"""Groups up to which it is quicker to find all that are wanted and sort them than to look for them along an order."""

_MARKS = ",".join("?" * 20)
_PUT_GROUP = f"INSERT OR REPLACE INTO groups VALUES ({_MARKS})"


@dataclass(frozen=True)
class IndexedBatch:
    """The batch of a step. ``formed``, ``started``, ``ended``: seconds since the epoch, the latter two None until it is trained."""

    step: int
    version: int
    groups: tuple[str, ...]
    mask_below: int
    formed: float
    amended: int
    started: float | None
    ended: float | None


@dataclass(frozen=True)
class KeptPlace:
    """Where the kept responses of a group lie: bytes [start, start + size) of a file in ``rollouts/``."""

    group: str
    attempt: int
    file: str
    start: int
    size: int


@dataclass(frozen=True)
class Facet:
    """How many groups are of one kind, status, data set and replica."""

    evaluation: bool
    status: str
    dataset: str | None
    replica: str
    groups: int


class GroupIndex:
    """The tables and what has been folded into them.

    Args:
        path: of the scratch database, which must not exist.

    ``sequence``: of the newest ledger record that was taken; ``revision`` grows with every change.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._database = new_database(path)
        self.history = GroupHistory()
        self.sequence = self.revision = 0

    def close(self) -> None:
        with self._lock:
            self._database.close()

    # --- what is put in

    def clear(self) -> None:
        """Forgets everything: the ledger was made anew."""
        with self._lock:
            empty(self._database)
            self.history, self.sequence = GroupHistory(), 0
            self.revision += 1

    def apply(self, records: Iterable[tuple[int, LedgerRecord]]) -> None:
        """Takes further records, in the ledger's order."""
        dirty: dict[str, GroupRecord] = {}
        told: list[tuple[str, int, float, str, str | None]] = []
        with self._lock, self._database:
            self._database.execute("BEGIN")
            for sequence, record in records:
                changed = self.history.apply(sequence, record)
                dirty |= {group.group: group for group in changed}
                told += [(group.group, sequence, record.at, record.event(), ledger_words(record, group)) for group in changed]
                self._mark(sequence, record)
                self.sequence = sequence
            self._put(dirty.values())
            self._database.executemany("INSERT OR REPLACE INTO told VALUES (?,?,?,?,?)", [row for row in told if row[-1] is not None])
            self._database.execute("COMMIT")
            self.revision += 1

    def add(self, groups: Sequence[GroupRecord]) -> None:
        """Takes groups as their kept responses tell them, of a run without a ledger."""
        with self._lock:
            self._database.execute("BEGIN")
            self._put(groups)
            self._database.execute("COMMIT")
            self.revision += 1

    def keep(self, places: Sequence[KeptPlace]) -> None:
        """Takes the places of kept responses. Of two of the same attempt the first counts."""
        rows = [(place.group, place.attempt, place.file, place.start, place.size) for place in places]
        with self._lock:
            self._database.execute("BEGIN")
            self._database.executemany("INSERT OR IGNORE INTO kept VALUES (?,?,?,?,?)", rows)
            self._database.execute("COMMIT")
            self.revision += 1

    def forget_file(self, file: str) -> None:
        """Lets go of the places in a file that was removed."""
        with self._lock:
            self._database.execute("DELETE FROM kept WHERE file = ?", (file,))
            self.revision += 1

    def _put(self, groups: Iterable[GroupRecord]) -> None:
        found = list(groups)
        self._database.executemany(_PUT_GROUP, map(group_row, found))
        self._database.executemany("INSERT OR REPLACE INTO details VALUES (?,?)", [(group.group, encoded(group)) for group in found])
        self._database.executemany("DELETE FROM spans WHERE name = ?", [(group.group,) for group in found])
        self._database.executemany("INSERT INTO spans VALUES (?,?,?)", [row for group in found for row in span_rows(group)])

    def _mark(self, sequence: int, record: LedgerRecord) -> None:
        """Notes what concerns many groups at once."""
        match record:
            case BatchFormed():
                row = (record.step, record.version, json.dumps(record.groups), record.mask_below, record.at)
                self._database.execute("INSERT OR REPLACE INTO batches VALUES (?,?,?,?,?,0,NULL,NULL)", row)
            case BatchAmended(step=step) if step in self.history.batches:
                groups = json.dumps(self.history.batches[step].groups)
                self._database.execute("UPDATE batches SET groups = ?, amended = amended + 1 WHERE step = ?", (groups, step))
            case BatchTrained():
                times = (record.started, record.ended, record.step)
                self._database.execute("UPDATE batches SET started = ?, ended = ? WHERE step = ?", times)
            case CheckpointDurable():
                self._database.execute("INSERT OR IGNORE INTO checkpoints VALUES (?,?,?)", (record.steps, sequence, record.at))
            case EvalStarted():
                started = (record.dataset, record.version, sequence, record.at, record.prompts)
                self._database.execute("INSERT OR IGNORE INTO evaluations VALUES (?,?,?,?,?)", started)

    # --- what is asked

    def page(self, query: GroupQuery) -> tuple[list[GroupRecord], int]:
        """Returns the groups of a page, in order, and how many there are on all pages."""
        counted, values = query.where(by_kind=not query.filtered)
        with self._lock:
            [[total]] = self._rows(f"SELECT count(*) FROM groups WHERE {counted}", values)
            where, _ = query.where(by_kind=total > FEW)
            chosen = f"SELECT name FROM groups WHERE {where} ORDER BY {query.order()} LIMIT ? OFFSET ?"
            names = self._rows(chosen, (*values, query.limit, query.offset))
            records = [self._rows("SELECT record FROM details WHERE name = ?", name) for name in names]
        return [decoded(record) for [[record]] in records], total

    def group(self, name: str) -> GroupRecord | None:
        """Returns a group; None where there is none of that id."""
        found = self._rows("SELECT record FROM details WHERE name = ?", (name,))
        return decoded(found[0][0]) if found else None

    def batch(self, step: int) -> IndexedBatch | None:
        """Returns the batch of a step; None where none was formed."""
        found = self._rows("SELECT * FROM batches WHERE step = ?", (step,))
        if not found:
            return None
        of, version, groups, *rest = found[0]
        return IndexedBatch(of, version, tuple(json.loads(groups)), *rest)

    def kept(self, group: str, attempt: int) -> KeptPlace | None:
        """Returns where the kept responses of a group lie: those of this attempt, else of its newest one."""
        found = self._rows("SELECT * FROM kept WHERE name = ? ORDER BY attempt = ? DESC, attempt DESC LIMIT 1", (group, attempt))
        return KeptPlace(*found[0]) if found else None

    def facets(self) -> list[Facet]:
        """Returns how many groups there are of each kind."""
        columns = "evaluation, status, dataset, replica"
        rows = self._rows(f"SELECT {columns}, count(*) FROM groups GROUP BY {columns} ORDER BY {columns}", ())
        return [Facet(bool(evaluation), *rest) for evaluation, *rest in rows]

    def provenance(self, group: GroupRecord) -> list[ProvenanceStep]:
        """Returns what the ledger tells of a group, in order."""
        told = self._rows("SELECT sequence, at, event, what FROM told WHERE name = ?", (group.group,))
        steps = [ProvenanceStep(*row) for row in (*told, *self._sent_out(group), *self._freed(group))]
        return sorted(steps, key=lambda step: step.sequence)

    def _sent_out(self, group: GroupRecord) -> list[tuple[Any, ...]]:
        if (parts := eval_group_parts(group.group)) is None:
            return []
        dataset, version, row = parts
        asked = "SELECT sequence, at FROM evaluations WHERE dataset = ? AND version = ? AND prompts > ?"
        what = f"sent out for the evaluation of version {version}"
        return [(sequence, at, "eval_started", what) for sequence, at in self._rows(asked, (dataset, version, row))]

    def _freed(self, group: GroupRecord) -> list[tuple[Any, ...]]:
        if group.status != TRAINED or group.step is None:
            return []
        asked = "SELECT steps, sequence, at FROM checkpoints WHERE steps > ? ORDER BY steps LIMIT 1"
        found = self._rows(asked, (group.step,))
        what = "a checkpoint of {} steps is durable, its samples are freed"
        return [(sequence, at, "checkpoint_durable", what.format(steps)) for steps, sequence, at in found]

    def _rows(self, statement: str, values: Sequence[Any]) -> list[Any]:
        with self._lock:
            try:
                return self._database.execute(statement, values).fetchall()
            except sqlite3.ProgrammingError as error:
                raise RuntimeError(f"the index of groups is closed: {error}") from error
