"""``myxo samples RUN [GROUP[/INDEX]]``: the groups of a run from its ledger, and the samples of one from its store."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from shared import replay, sample
from shared.cli import exits
from shared.cli.access import Access, payloads, reach
from shared.cli.listing import Listing, table
from shared.cli.sample_page import as_plain, page
from shared.cli.trails import Life
from shared.errors import ConfigError, PayloadMissing
from shared.ledger import LedgerRecord, group_id
from shared.sample import Sample
from shared.subjects import Subjects

PATIENCE_SECONDS = 1.0
"""A ledger that takes longer to read shows how far it is."""

STORE_SECONDS = 15.0
"""How long the store has for one blob."""

WIDE = 160
"""Characters of a line where no terminal says how many it has."""

_TARGET = re.compile(r"g?([0-9]{1,12})(?:/([0-9]{1,9}))?\Z")


def target(text: str) -> tuple[str, int | None]:
    """(group's id, index of a sample or None) for what a person typed: ``g00000012``, ``g12``, ``12``, each with ``/3`` or without.

    Raises ConfigError.
    """
    match = _TARGET.match(text)
    if match is None:
        expected = "expected a training group's id (g00000012, or 12), with /3 for its sample 3"
        kept = "; those of held-out prompts are not kept" if text.startswith("eval.") else ""
        raise ConfigError("GROUP", text, expected + kept)
    return group_id(int(match[1])), int(match[2]) if match[2] else None


def group_named(text: str) -> str:
    """A group's id as in `target`, for where a sample makes no sense. Raises ConfigError."""
    group, index = target(text)
    if index is not None:
        raise ConfigError("--group", text, f"lists whole groups; `myxo samples RUN {text}` shows that sample")
    return group


async def browse(run: str, directory: Path, console: Console, listing: Listing, as_json: bool) -> int:
    """Prints the groups that a listing asks for, newest (best, longest) last. Raises ConfigError where there is no such run."""
    async with reach(run, directory) as access:
        async for sequence, record in _ledger(access):
            listing.see(sequence, record)
    rows, of = listing.rows()
    if not as_json:
        _widen(console)
        console.print(table(access.run, rows, of))
        return exits.DONE
    for facts in rows:
        _print_json(console, {**facts.as_plain(), "durable": listing.trails.durable(facts)})
    return exits.DONE


async def show(run: str, directory: Path, console: Console, group: str, index: int | None, as_json: bool) -> int:
    """Prints a group or one sample of it. Raises ConfigError where there is no such run, group or sample."""
    async with reach(run, directory) as access:
        life = Life(group)
        async for sequence, record in _ledger(access):
            life.see(sequence, record)
        if life.facts is None:
            raise _no_such_group(access.run, group, life.trails.admitted)
        count = len(life.facts.rewards)
        if index is not None and index >= count and (count or life.gone() is None):
            raise ConfigError("GROUP", f"{group}/{index}", f"the group has {count} samples; give 0 to {count - 1}")
        samples, absent = await _samples(access, life)
    if as_json:
        _print_json(console, as_plain(access.run, life, samples, index, absent))
    else:
        _widen(console)
        console.print(page(access.run, life, samples, index, absent, console.width))
    return exits.DONE


async def _samples(access: Access, life: Life) -> tuple[list[Sample], str | None]:
    """The group's samples, or none and why."""
    absent = life.gone()
    if absent is not None or life.payload is None:
        return [], absent or "the ledger names no payload"
    async with payloads(access) as store:
        try:
            found = sample.decode(await store.read(life.payload.keys, deadline=STORE_SECONDS))
        except PayloadMissing as error:  # freed since the ledger was read, or lost
            return [], str(error)
    if [entry.index for entry in found] != list(range(len(life.facts.rewards if life.facts else ()))):
        return [], f"the store holds samples {[entry.index for entry in found]}, which are not those that the ledger names"
    return found, None


async def _ledger(access: Access) -> AsyncIterator[tuple[int, LedgerRecord]]:
    """The ledger as it stands, with a bar on the terminal where that takes long."""
    stream = Subjects(access.run).ledger_stream
    terminal = Console(stderr=True)
    end, start = await replay.last_sequence(access.bus, stream), time.monotonic()
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        task = bar.add_task("reading the ledger", total=end, visible=False)
        async for sequence, record in replay.read(access.bus, stream, LedgerRecord):
            yield sequence, record
            if sequence % replay.FETCH == 0 and time.monotonic() - start > PATIENCE_SECONDS:
                bar.update(task, completed=sequence, visible=True)


def _no_such_group(run: str, group: str, admitted: int) -> ConfigError:
    there = f"it has {group_id(0)} to {group_id(admitted - 1)}" if admitted else "it has admitted none yet"
    return ConfigError("GROUP", group, f"no such group in run {run}; {there}")


def _widen(console: Console) -> None:
    if not console.is_terminal:
        console.width = WIDE


def _print_json(console: Console, value: dict[str, Any]) -> None:
    console.file.write(json.dumps(value, allow_nan=False) + "\n")
