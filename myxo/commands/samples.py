"""``myxo samples RUN [GROUP[/INDEX]]``: the groups of a run from its ledger, and the samples of one from its store or its rollout files.

Where nothing but the rollout files is left of a run, they are the list, too.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from myxo.display.sample_list import SampleList, table
from myxo.display.sample_page import Pieces, as_plain, page, responses, texts
from myxo.preflight.server_checks import given_servers
from myxo.run.group_history import GroupHistory, GroupLife, GroupRecord, facts_of
from myxo.run.run_access import Access, payloads, reach
from myxo.run.run_directory import RunDirectory, find
from shared.bus import stream_replay
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.data.rollout_files import DIRECTORY, RolloutReader, files
from shared.hub import hub_resolve
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError, PayloadMissing
from shared.schema import sample
from shared.schema.ledger import LedgerRecord, eval_group_parts, group_id
from shared.schema.sample import Sample
from shared.store.payload_store import Store

PATIENCE_SECONDS = 1.0
"""A ledger that takes longer to read shows how far it is."""

STORE_SECONDS = 15.0
"""How long the store has for one blob."""

WIDE = 160
"""Characters of a line where no terminal says how many it has."""

_TARGET = re.compile(r"(?:g?([0-9]{1,12})|(eval\.[A-Za-z0-9_-]+\.[0-9]{1,12}\.[0-9]{1,12}))(?:/([0-9]{1,9}))?\Z", re.ASCII)


def target(text: str) -> tuple[str, int | None]:
    """(group's id, index of a sample or None) for what a person typed: ``g00000012``, ``g12``, ``12``, or a held-out prompt's
    ``eval.heldout.5.0``, each with ``/3`` or without.

    Raises ConfigError.
    """
    match = _TARGET.match(text)
    if match is None:
        expected = "expected a group's id (g00000012, or 12; eval.NAME.VERSION.ROW of a held-out prompt), with /3 for its sample 3"
        raise ConfigError("GROUP", text, expected)
    return match[2] or group_id(int(match[1])), int(match[3]) if match[3] else None


def group_named(text: str) -> str:
    """A group's id as in `target`, for where a sample makes no sense. Raises ConfigError."""
    group, index = target(text)
    if index is not None:
        raise ConfigError("--group", text, f"lists whole groups; `myxo samples RUN {text}` shows that sample")
    return group


async def browse(run: str, directory: Path, console: Console, listing: SampleList, as_json: bool, with_texts: bool) -> int:
    """Prints the groups that a listing asks for, newest (best, longest) last. Raises ConfigError where there is no such run.

    Args:
        with_texts: their prompts and responses, too.
    """
    kept = _only_rollouts(run, directory)
    if kept is not None:
        name, reader = kept.root.name, RolloutReader(kept.root / DIRECTORY)
        for place, kept_group in enumerate(reader.records()):
            listing.add(facts_of(place, kept_group))
        _tell_torn(reader)
        found = _Found(reader)
        rows, of = listing.rows()
        if with_texts:
            found.read(rows)
    else:
        async with reach(run, directory) as access:
            async for sequence, record in _ledger(access):
                listing.see(sequence, record)
            rows, of = listing.rows()
            name, found = access.run, _Found(RolloutReader(access.directory.root / DIRECTORY))
            if with_texts:
                found.read(rows)
                await found.ask_store(access, rows, listing.trails)
    if not as_json:
        _widen(console)
        console.print(table(name, rows, of))
        if with_texts:
            console.print(responses(name, rows, found.samples, found.absent))
        return exit_codes.DONE
    for facts in rows:
        more = {**texts(facts, found.of(facts)), "absent": found.absent.get(facts.group)} if with_texts else {}
        _print_json(console, {**facts.as_plain(), "durable": listing.trails.durable(facts), **more})
    return exit_codes.DONE


async def show(run: str, directory: Path, console: Console, group: str, index: int | None, as_json: bool) -> int:
    """Prints a group or one sample of it. Raises ConfigError where there is no such run, group or sample."""
    kept, life = _only_rollouts(run, directory), GroupLife(group)
    pieces: Pieces | None = None
    if kept is not None:
        name, reader = kept.root.name, RolloutReader(kept.root / DIRECTORY)
        kept_group = reader.groups([group]).get(group)
        _tell_torn(reader)
        if kept_group is None:
            raise ConfigError("GROUP", group, f"no such group in {kept.root / DIRECTORY}/, which is all that is left of run {name}")
        life.facts = facts_of(0, kept_group)
        _check_index(life, index)
        samples, absent = kept_group.decoded(), None if kept_group.samples else "none were kept"
    else:
        async with reach(run, directory) as access:
            async for sequence, record in _ledger(access):
                life.see(sequence, record)
            if life.facts is None:
                raise _no_such_group(access.run, group, life.trails.admitted)
            _check_index(life, index)
            samples, absent = await _samples(access, life)
            name, pieces = access.run, _pieces(access.config)
    if as_json:
        _print_json(console, as_plain(name, life, samples, index, absent, pieces))
    else:
        _widen(console)
        console.print(page(name, life, samples, index, absent, console.width, pieces))
    return exit_codes.DONE


class _Found:
    """The samples of several groups, by id, and why there are none."""

    def __init__(self, reader: RolloutReader) -> None:
        self._reader = reader
        self.samples: dict[str, list[Sample]] = {}
        self.absent: dict[str, str] = {}

    def of(self, facts: GroupRecord) -> list[Sample]:
        return self.samples.get(facts.group, [])

    def read(self, rows: Sequence[GroupRecord]) -> None:
        """Takes what the rollout files have."""
        records = self._reader.groups([facts.group for facts in rows])
        _tell_torn(self._reader)
        self.samples = {name: record.decoded() for name, record in records.items() if record.samples}

    async def ask_store(self, access: Access, rows: Sequence[GroupRecord], trails: GroupHistory) -> None:
        """Takes the others from the store, where it should have them."""
        there = []
        for facts in rows:
            if facts.group not in self.samples:
                absent = trails.gone(facts)
                if absent is None:
                    there.append(facts)
                else:
                    self.absent[facts.group] = absent
        if not there:
            return
        try:
            async with payloads(access) as store:
                for facts in there:
                    found, absent = await _stored(store, facts)
                    if absent is None:
                        self.samples[facts.group] = found
                    else:
                        self.absent[facts.group] = absent
        except ConfigError as error:  # no store is within reach: the list is of use without
            self.absent |= {facts.group: str(error) for facts in there if facts.group not in self.samples}


async def _samples(access: Access, life: GroupLife) -> tuple[list[Sample], str | None]:
    """The group's samples, or none and why."""
    facts = life.facts
    assert facts is not None  # only asked for groups that were found
    reader = RolloutReader(access.directory.root / DIRECTORY)
    absent = life.gone()
    if absent is None:
        try:
            async with payloads(access) as store:
                found, absent = await _stored(store, facts)
        except ConfigError:
            if facts.group not in reader.groups([facts.group]):
                raise
            found, absent = [], "no store is within reach"
        if absent is None:
            return found, None
    kept = reader.groups([facts.group]).get(facts.group)
    _tell_torn(reader)
    if kept is None or not kept.samples:
        return [], absent
    return kept.decoded(), None


async def _stored(store: Store, facts: GroupRecord) -> tuple[list[Sample], str | None]:
    """The samples that the store has of a group, or none and why."""
    if not facts.keys:
        return [], "the ledger names no payload"
    try:
        found = sample.decode(await store.read(facts.keys, deadline=STORE_SECONDS))
    except PayloadMissing as error:  # freed since the ledger was read, or lost
        return [], str(error)
    if [entry.index for entry in found] != list(range(len(facts.rewards))):
        return [], f"the store holds samples {[entry.index for entry in found]}, which are not those that the ledger names"
    return found, None


def _only_rollouts(run: str, directory: Path) -> RunDirectory | None:
    """The directory of a run of which nothing but the rollout files is left on this machine; None where there is more, or nothing."""
    if given_servers().nats_url is not None:
        return None
    _, there = find(run, directory)
    if there is None or there.is_held() or (there.nats / "jetstream").is_dir() or not files(there.root / DIRECTORY):
        return None
    return there


def _pieces(config: RunConfig) -> Pieces | None:
    """The text of single tokens by the run's tokenizer; None where this machine does not have it."""
    try:
        from shared.data.tokenizer import Tokenizer
    except ModuleNotFoundError:  # it comes with the extra `buffer`
        return None
    try:
        return Tokenizer(hub_resolve.local(config, ("model.hf_checkpoint",), weights=False).model.hf_checkpoint).pieces
    except ConfigError:  # a directory that is elsewhere, or a file that is none: ids are shown all the same
        return None


def _check_index(life: GroupLife, index: int | None) -> None:
    count = len(life.facts.rewards) if life.facts else 0
    if index is not None and index >= count and (count or life.gone() is None):
        raise ConfigError("GROUP", f"{life.group}/{index}", f"the group has {count} samples; give 0 to {count - 1}")


async def _ledger(access: Access) -> AsyncIterator[tuple[int, LedgerRecord]]:
    """The ledger as it stands, with a bar on the terminal where that takes long."""
    stream = Subjects(access.run).ledger_stream
    terminal = Console(stderr=True)
    end, start = await stream_replay.last_sequence(access.bus, stream), time.monotonic()
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        task = bar.add_task("reading the ledger", total=end, visible=False)
        async for sequence, record in stream_replay.read(access.bus, stream, LedgerRecord):
            yield sequence, record
            if sequence % stream_replay.FETCH == 0 and time.monotonic() - start > PATIENCE_SECONDS:
                bar.update(task, completed=sequence, visible=True)


def _no_such_group(run: str, group: str, admitted: int) -> ConfigError:
    if eval_group_parts(group) is not None:
        return ConfigError("GROUP", group, f"no such held-out prompt has come back in run {run}; `myxo samples {run} --eval` lists them")
    there = f"it has {group_id(0)} to {group_id(admitted - 1)}" if admitted else "it has admitted none yet"
    return ConfigError("GROUP", group, f"no such group in run {run}; {there}")


def _tell_torn(reader: RolloutReader) -> None:
    """Says on the standard error how many lines could not be read."""
    if reader.torn:
        lines = "1 line" if reader.torn == 1 else f"{reader.torn} lines"
        Console(stderr=True).print(Text(f"{lines} of {DIRECTORY}/ cut off or damaged, and left out", style="yellow"))


def _widen(console: Console) -> None:
    if not console.is_terminal:
        console.width = WIDE


def _print_json(console: Console, value: dict[str, Any]) -> None:
    console.file.write(json.dumps(value, allow_nan=False) + "\n")
