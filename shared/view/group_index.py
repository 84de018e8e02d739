"""A run's groups and their samples, for `myxo samples` and the console: an index in SQLite of the ledger, the kept responses, the store.

``groups`` has one narrow row a group, so that a list of any filter and order is one pass over a few megabytes; what only a group's own page
needs lies in ``details``.
"""

import asyncio
import json
import re
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints, TypeAdapter, ValidationError

from shared.data.rollout_files import TRAINED, KeptLine, RolloutRecord, files, kept_lines, read_record
from shared.runtime.errors import BadMessage, PayloadMissing
from shared.schema import sample as sample_codec
from shared.schema.ledger import (
    BatchAmended,
    BatchFormed,
    BatchTrained,
    CheckpointDurable,
    EvalStarted,
    LedgerRecord,
    eval_group_parts,
    group_id,
)
from shared.schema.message import Count
from shared.schema.sample import Sample
from shared.store.payload_store import Store
from shared.view.group_history import GroupHistory, GroupRecord, ProvenanceStep, kept_group, ledger_words

Status = Literal["outstanding", "requeued", "ready", "batched", "trained", "dropped", "dead", "evaluated", "failed"]
Order = Literal["changed", "admitted", "reward", "spread", "tokens", "longest", "truncated", "attempt", "seconds"]

MOST_ROWS = 200  # Groups of one page at most
Text = Annotated[str, StringConstraints(min_length=1, max_length=200)]

_NUMBER = re.compile(r"g?([0-9]{1,9})\Z", re.ASCII)

Condition = tuple[str, tuple[Any, ...]]  # An SQL expression, and the values of its question marks


class GroupQuery(BaseModel):
    """The selection, order and page of a list of groups; None: any.

    evaluation: held-out prompts in place of training groups. step: in the batch of that step. version: a trained token of that version, or
    between two that are; of held-out prompts the evaluated one. Rewards are the mean of a group's samples; tokens those of all its
    responses. group: its id or its number; of held-out prompts also the beginning. reason: part of the reason of its end. teaches: whether
    its rewards differ, for a group whose rewards are all alike moves no weight. truncated: whether a response ended at its length. retried:
    whether it was generated more than once. forked: whether a rollout gave several samples. since, until: of its last change, seconds since
    the epoch.
    """

    model_config = ConfigDict(extra="forbid")

    evaluation: bool = False
    status: list[Status] = Field(default=[], max_length=len(get_args(Status)))
    dataset: Text | None = None
    step: Count | None = None
    version: Count | None = None
    min_reward: FiniteFloat | None = None
    max_reward: FiniteFloat | None = None
    min_tokens: Count | None = None
    max_tokens: Count | None = None
    replica: Text | None = None
    group: Text | None = None
    reason: Text | None = None
    teaches: bool | None = None
    truncated: bool | None = None
    retried: bool | None = None
    forked: bool | None = None
    since: FiniteFloat | None = None
    until: FiniteFloat | None = None
    sort: Order = "changed"
    descending: bool = True
    limit: int = Field(default=50, ge=1, le=MOST_ROWS)
    offset: Count = 0

    def where(self, *, by_kind: bool = True) -> Condition:
        """Returns the condition on a row of ``groups``. by_kind: whether the kind's indexes, which have the orders, help to find it."""
        kind = "evaluation = ?" if by_kind else "+evaluation = ?"  # a plus keeps the database from choosing an index of the column
        conditions: list[Condition] = [(kind, (self.evaluation,)), *self._bounds(), *self._flags()]
        if self.status:
            conditions.append((f"status IN ({','.join('?' * len(self.status))})", tuple(self.status)))
        if self.group is not None:
            conditions.append(_named(self.group))
        if self.reason is not None:
            conditions.append(("instr(lower(reason), lower(?)) > 0", (self.reason,)))
        if self.version is not None:
            spans = "EXISTS (SELECT 1 FROM spans WHERE spans.name = groups.name AND ? BETWEEN oldest AND newest)"
            conditions.append(("version = ?" if self.evaluation else spans, (self.version,)))
        return " AND ".join(text for text, _ in conditions), tuple(value for _, values in conditions for value in values)

    @property
    def filtered(self) -> bool:
        """Returns whether groups of the wanted kind are left out."""
        return self.where()[0] != "evaluation = ?"

    def order(self) -> str:
        """Returns the order; what is alike stands by its last change, and what has no such figure last."""
        direction = "DESC" if self.descending else "ASC"
        return f"{self.sort} {direction} NULLS LAST, changed {direction}, name {direction}"

    def _bounds(self) -> list[Condition]:
        equal = {"dataset": self.dataset, "step": self.step, "replica": self.replica}
        least = {"reward": self.min_reward, "tokens": self.min_tokens, "at": self.since}
        most = {"reward": self.max_reward, "tokens": self.max_tokens, "at": self.until}
        bounds: dict[str, dict[str, Any]] = {"=": equal, ">=": least, "<=": most}
        return [(f"{name} {sign} ?", (value,)) for sign, given in bounds.items() for name, value in given.items() if value is not None]

    def _flags(self) -> list[Condition]:
        given = {"spread > 0": self.teaches, "truncated > 0": self.truncated, "attempt > 0": self.retried, "forks > 0": self.forked}
        return [(text if value else f"NOT ({text})", ()) for text, value in given.items() if value is not None]


def _named(text: str) -> Condition:
    """Returns the condition for a typed id: a number stands for its group, anything else for the beginning of an id."""
    if match := _NUMBER.match(text):
        return "name = ?", (group_id(int(match[1])),)
    return "substr(name, 1, ?) = ?", (len(text), text)


CACHE_KIB = 48 << 10  # Memory that the database may take for its pages

TABLES = """
CREATE TABLE groups (
    name TEXT PRIMARY KEY, evaluation INTEGER, dataset TEXT, status TEXT, reason TEXT, step INTEGER, version INTEGER, attempt INTEGER,
    samples INTEGER, reward REAL, spread REAL, tokens INTEGER, longest INTEGER, truncated INTEGER, forks INTEGER, replica TEXT,
    seconds REAL, admitted REAL, at REAL, changed INTEGER
) WITHOUT ROWID;
CREATE INDEX groups_step ON groups (step);
CREATE TABLE details (name TEXT PRIMARY KEY, record BLOB) WITHOUT ROWID;
CREATE TABLE spans (name TEXT, oldest INTEGER, newest INTEGER, PRIMARY KEY (name, oldest, newest)) WITHOUT ROWID;
CREATE TABLE events (name TEXT, sequence INTEGER, at REAL, event TEXT, what TEXT, PRIMARY KEY (name, sequence)) WITHOUT ROWID;
CREATE TABLE batches (
    step INTEGER PRIMARY KEY, version INTEGER, groups TEXT, mask_below INTEGER, formed REAL, amended INTEGER, started REAL, ended REAL
);
CREATE TABLE checkpoints (steps INTEGER PRIMARY KEY, sequence INTEGER, at REAL);
CREATE TABLE evaluations (
    dataset TEXT, version INTEGER, sequence INTEGER, at REAL, prompts INTEGER, PRIMARY KEY (dataset, version)
) WITHOUT ROWID;
CREATE TABLE kept (name TEXT, attempt INTEGER, file TEXT, start INTEGER, size INTEGER, PRIMARY KEY (name, attempt)) WITHOUT ROWID;
CREATE INDEX kept_file ON kept (file);
"""

# The columns that lists are sorted by, besides ``changed``
ORDERS = ("admitted", "reward", "spread", "tokens", "longest", "truncated", "attempt", "seconds")

INDEXES = "CREATE INDEX groups_changed ON groups (evaluation, changed, name);" + "".join(
    f"CREATE INDEX groups_{column} ON groups (evaluation, {column}, changed, name);" for column in ORDERS
)

_RECORD = TypeAdapter(GroupRecord)  # A group as ``details`` keeps it


def group_row(group: GroupRecord) -> dict[str, Any]:
    """Returns the row of a group in ``groups``."""
    return group.figures() | {"name": group.group, "evaluation": group.dataset is not None, "changed": group.changed}


FEW = 5000  # Groups up to which it is quicker to find all that are wanted and sort them than to look for them along an order
_PUT_GROUP = """INSERT OR REPLACE INTO groups VALUES (:name, :evaluation, :dataset, :status, :reason, :step, :version, :attempt, :samples,
    :reward, :spread, :tokens, :longest, :truncated, :forks, :replica, :seconds, :admitted, :at, :changed)"""


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


class KeptPlace(NamedTuple):
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
    """The tables and what has been folded into them. What memory does not hold lies in a nameless file in ``TMPDIR``, else in /var/tmp.

    ``sequence``: of the newest ledger record that was taken; ``revision`` grows with every change.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._database = sqlite3.connect("", check_same_thread=False, isolation_level=None)
        self._database.executescript(f"PRAGMA journal_mode = OFF; PRAGMA cache_size = -{CACHE_KIB};{TABLES}{INDEXES}")
        self.history = GroupHistory()
        self.sequence = self.revision = 0

    def close(self) -> None:
        with self._lock:
            self._database.close()

    # --- what is put in

    def apply(self, records: Iterable[tuple[int, LedgerRecord]]) -> None:
        """Takes further records, in the ledger's order."""
        dirty: dict[str, GroupRecord] = {}
        reported: list[tuple[str, int, float, str, str | None]] = []
        with self._lock, self._database:
            self._database.execute("BEGIN")
            for sequence, record in records:
                changed = self.history.apply(sequence, record)
                dirty |= {group.group: group for group in changed}
                reported += [(group.group, sequence, record.at, record.event(), ledger_words(record, group)) for group in changed]
                self._mark(sequence, record)
                self.sequence = sequence
            self._put(dirty.values())
            self._database.executemany("INSERT OR REPLACE INTO events VALUES (?,?,?,?,?)", [row for row in reported if row[-1] is not None])
            self.revision += 1

    def add(self, groups: Sequence[GroupRecord]) -> None:
        """Takes groups as their kept responses tell them, of a run without a ledger."""
        with self._lock:
            self._database.execute("BEGIN")
            self._put(groups)
            self._database.execute("COMMIT")
            self.revision += 1

    def keep(self, places: Sequence[KeptPlace]) -> None:
        """Takes the places of kept responses. Of two of the same attempt the last counts: `myxo repair` may have cut the first."""
        with self._lock:
            self._database.execute("BEGIN")
            self._database.executemany("INSERT OR REPLACE INTO kept VALUES (?,?,?,?,?)", places)
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
        details = [(group.group, _RECORD.dump_json(group)) for group in found]
        self._database.executemany("INSERT OR REPLACE INTO details VALUES (?,?)", details)
        self._database.executemany("DELETE FROM spans WHERE name = ?", [(group.group,) for group in found])
        spans = {(group.group, *versions) for group in found for versions in zip(group.oldest, group.newest, strict=True)}
        self._database.executemany("INSERT INTO spans VALUES (?,?,?)", spans)

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
        return [_RECORD.validate_json(record) for [[record]] in records], total

    def group(self, name: str) -> GroupRecord | None:
        """Returns a group; None where there is none of that id."""
        found = self._rows("SELECT record FROM details WHERE name = ?", (name,))
        return _RECORD.validate_json(found[0][0]) if found else None

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
        reported = self._rows("SELECT sequence, at, event, what FROM events WHERE name = ?", (group.group,))
        steps = [ProvenanceStep(*row) for row in (*reported, *self._sent_out(group), *self._freed(group))]
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
        what = "a checkpoint of {} steps is durable, its samples are freed"
        return [(sequence, at, "checkpoint_durable", what.format(steps)) for steps, sequence, at in self._rows(asked, (group.step,))]

    def _rows(self, statement: str, values: Sequence[Any]) -> list[Any]:
        with self._lock:
            try:
                return self._database.execute(statement, values).fetchall()
            except sqlite3.ProgrammingError as error:
                raise RuntimeError(f"the index of groups is closed: {error}") from error


LINES = 512  # Lines that are put into the index together


@dataclass
class _ReadFile:
    """How far a file has been read. inode: tells it from a later file of the same name. cut: its last line is cut off, or still grows."""

    inode: int
    end: int = 0
    cut: bool = False


@dataclass
class KeptResponses:
    """Follows the files of ``rollouts/``, which need not exist; used by one thread at a time.

    directory_only: nothing else is left of the run, so that these lines are its list of groups, too. torn: lines that are no record, but
    for ``cut`` ones, which may still grow.
    """

    directory: Path
    index: GroupIndex
    directory_only: bool = False
    torn: int = 0
    _read: dict[str, _ReadFile] = field(default_factory=dict)
    _groups: int = 0

    def update(self) -> None:
        """Takes what was written since, and lets go of files that were removed. Raises OSError where the directory cannot be read."""
        there = files(self.directory)
        for name in self._read.keys() - {path.name for path in there}:
            self._forget(name)
        for path in there:
            self._update(path)

    @property
    def cut(self) -> int:
        """Returns how many files end in a line that is cut off."""
        return sum(read.cut for read in self._read.values())

    def record(self, group: GroupRecord) -> RolloutRecord | None:
        """Returns a group's kept responses; None where none are kept (any more)."""
        place = self.index.kept(group.group, group.attempt)
        if place is None:
            return None
        found = read_record(self.directory / place.file, place.start, place.size)
        return found if found is not None and found.group == group.group else None

    def _update(self, path: Path) -> None:
        try:
            state = path.stat()
        except FileNotFoundError:  # removed since, to make room
            return
        read = self._read.get(path.name)
        if read is not None and (read.inode != state.st_ino or state.st_size < read.end):
            self._forget(path.name)
        read = self._read.setdefault(path.name, _ReadFile(state.st_ino))
        if state.st_size > read.end:
            lines: list[KeptLine] = []
            for entry in kept_lines(path, read.end):
                read.cut = not entry.line.endswith(b"\n")
                if read.cut:
                    break
                read.end = entry.start + len(entry.line)
                lines.append(entry)
                if len(lines) == LINES:
                    self._put(path, lines)
                    lines = []
            self._put(path, lines)

    def _put(self, path: Path, lines: list[KeptLine]) -> None:
        self.torn += sum(entry.head is None for entry in lines)
        whole = [(entry, entry.head) for entry in lines if entry.head is not None]
        if whole:
            self.index.keep([KeptPlace(head.group, head.attempt, path.name, entry.start, len(entry.line)) for entry, head in whole])
        if self.directory_only:
            self.index.add([group for entry, _ in whole if (group := self._group(entry.line)) is not None])

    def _group(self, line: bytes) -> GroupRecord | None:
        try:
            record = RolloutRecord.model_validate_json(line)
        except ValidationError:
            self.torn += 1
            return None
        self._groups += 1
        return kept_group(self._groups, record)

    def _forget(self, file: str) -> None:
        del self._read[file]
        self.index.forget_file(file)


async def stored_samples(store: Store, group: GroupRecord, deadline: float) -> list[Sample] | str:
    """Returns the samples that the store has of a group, or why there are none. Raises what the store raises where it is away."""
    if group.payload is None or not group.payload.keys:
        return "the ledger names no payload"
    try:
        found = await asyncio.to_thread(sample_codec.decode, await store.read(group.payload, deadline=deadline))
    except (PayloadMissing, BadMessage) as error:  # freed since the ledger was read, or lost; overwritten
        return str(error)
    there = [entry.index for entry in found]
    of = list(range(len(group.rewards)))
    return found if there == of else f"the store holds samples {there}, which are not those that the ledger names"
