"""The tables of a run's groups, and the rows of a group in them. Pure but for the database that it makes.

``groups`` has one narrow row a group, so that a list of any filter and order is one pass over a few megabytes; what only a group's own page
needs lies in ``details``.
"""

import sqlite3
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from shared.history.group_history import GroupRecord

CACHE_KIB = 48 << 10
"""Memory that the database may take for its pages."""

TABLES = """
CREATE TABLE groups (
    name TEXT PRIMARY KEY, evaluation INTEGER, dataset TEXT, status TEXT, reason TEXT, step INTEGER, version INTEGER, attempt INTEGER,
    samples INTEGER, reward REAL, spread REAL, tokens INTEGER, longest INTEGER, truncated INTEGER, forks INTEGER, replica TEXT,
    seconds REAL, admitted REAL, at REAL, changed INTEGER
) WITHOUT ROWID;
CREATE INDEX groups_step ON groups (step);
CREATE TABLE details (name TEXT PRIMARY KEY, record BLOB) WITHOUT ROWID;
CREATE TABLE spans (name TEXT, oldest INTEGER, newest INTEGER, PRIMARY KEY (name, oldest, newest)) WITHOUT ROWID;
CREATE TABLE told (name TEXT, sequence INTEGER, at REAL, event TEXT, what TEXT, PRIMARY KEY (name, sequence)) WITHOUT ROWID;
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

ORDERS = ("admitted", "reward", "spread", "tokens", "longest", "truncated", "attempt", "seconds")
"""The columns that lists are sorted by, besides ``changed``."""

INDEXES = "CREATE INDEX groups_changed ON groups (evaluation, changed, name);" + "".join(
    f"CREATE INDEX groups_{column} ON groups (evaluation, {column}, changed, name);" for column in ORDERS
)

_RECORD = TypeAdapter(GroupRecord)


def new_database(path: Path) -> sqlite3.Connection:
    """Returns a new database of these tables; it is scratch, and nothing in it is worth a sync of the disk."""
    database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    database.executescript(f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -{CACHE_KIB};{TABLES}{INDEXES}")
    return database


def empty(database: sqlite3.Connection) -> None:
    """Empties all tables that the ledger is folded into; where kept responses lie is told by other files."""
    for table in ("groups", "details", "spans", "told", "batches", "checkpoints", "evaluations"):
        database.execute(f"DELETE FROM {table}")


def group_row(group: GroupRecord) -> tuple[Any, ...]:
    """Returns the row of a group in ``groups``."""
    rewards, rollouts = group.rewards, group.rollouts
    return (
        group.group,
        group.dataset is not None,
        group.dataset,
        group.status,
        group.reason,
        group.step,
        group.version,
        group.attempt,
        len(rewards),
        group.reward,
        max(rewards) - min(rewards) if rewards else None,
        sum(group.tokens) if group.tokens else None,
        max(group.tokens, default=None),
        len(group.truncated),
        len(rollouts) - len(set(rollouts)),
        group.replica,
        group.seconds,
        group.admitted or None,
        group.at,
        group.changed,
    )


def span_rows(group: GroupRecord) -> set[tuple[str, int, int]]:
    """Returns the rows of a group in ``spans``: the versions of its samples."""
    return {(group.group, oldest, newest) for oldest, newest in zip(group.oldest, group.newest, strict=True)}


def encoded(group: GroupRecord) -> bytes:
    """Returns a group as ``details`` keeps it."""
    return _RECORD.dump_json(group)


def decoded(record: bytes) -> GroupRecord:
    """Returns the group that `encoded` made these bytes of."""
    return _RECORD.validate_json(record)
