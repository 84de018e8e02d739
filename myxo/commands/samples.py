"""``myxo samples RUN [GROUP[/INDEX]]``: the groups of a run from its ledger, and the samples of one from its store or its rollout files.

Where nothing but the rollout files is left of a run, they are the list, too.
"""

import argparse
import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from myxo.commands.command_arguments import add_json, add_run, count, number
from myxo.display.sample_list import ORDERS, SampleList, WantedGroups, table
from myxo.display.sample_page import Pieces, as_plain, page, responses, texts
from myxo.preflight.server_checks import given_servers
from myxo.run.group_history import STATUSES, GroupHistory, GroupProvenance, GroupRecord, kept_group
from myxo.run.run_access import Access, payloads, reach
from myxo.run.run_directory import RunDirectory, find
from shared.bus import stream_replay
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.data.rollout_files import DIRECTORY, EVALUATED, FAILED, RolloutReader, files
from shared.hub import hub_resolve
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError, PayloadMissing
from shared.schema import sample
from shared.schema.ledger import LedgerRecord, eval_group_parts, group_id
from shared.schema.sample import Sample
from shared.store.payload_store import Store

PATIENCE_SECONDS = 1.0
"""The time after which reading the ledger shows its progress."""

STORE_SECONDS = 15.0
"""The deadline for reading one blob from the store."""

WIDE = 160
"""Characters of a line where no terminal gives its width."""

_TARGET = re.compile(r"(?:g?([0-9]{1,12})|(eval\.[A-Za-z0-9_-]+\.[0-9]{1,12}\.[0-9]{1,12}))(?:/([0-9]{1,9}))?\Z", re.ASCII)

_LIST_OPTIONS = ("--group", "--limit", "--sort", "--status", "--step", "--min-reward", "--max-reward", "--version", "--dataset")


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_run(command)
    command.add_argument("group", metavar="GROUP", nargs="?", help="show this group; GROUP/INDEX: one sample of it in full")
    command.add_argument("--status", choices=STATUSES, help="only groups that are there now")
    command.add_argument("--step", type=count, metavar="K", help="only the batch of step K, with prompts and responses")
    command.add_argument("--eval", action="store_true", help="held-out prompts that came back, with their responses; not training groups")
    command.add_argument("--dataset", metavar="NAME", help="only the held-out set of that name; means --eval")
    command.add_argument("--responses", action="store_true", help="prompts and responses of the listed groups")
    command.add_argument("--min-reward", type=number, metavar="R", help="only groups whose samples' mean reward is at least R")
    command.add_argument("--max-reward", type=number, metavar="R", help="… at most R")
    command.add_argument("--group", dest="only", metavar="G", help="only this group, as a line of the list")
    command.add_argument("--version", type=count, metavar="V", help="only groups with tokens of weight version V; --eval: its evaluation")
    command.add_argument("--limit", type=count, metavar="N", help="the last N in order (default 20; 0: all)")
    command.add_argument("--sort", choices=tuple(ORDERS), help="what stands last: the newest (default), best, longest")
    add_json(command, "one JSON object a line, with all arrays")
    command.set_defaults(run_command=samples, take_rest=take_group)


def take_group(parsed: argparse.Namespace, rest: list[str]) -> list[str]:
    """Takes a GROUP that stands behind options, where argparse leaves it; returns the words that are left over."""
    if parsed.group is None and not rest[0].startswith("-"):
        parsed.group, rest = rest[0], rest[1:]
    return rest


def samples(parsed: argparse.Namespace, console: Console) -> int:
    """Prints a group or the list. Raises ConfigError where there is no such run, group or sample."""
    if parsed.group is not None:
        _refuse_list_options(parsed)
        return asyncio.run(_show(parsed, console, *target(parsed.group)))
    only = None if parsed.only is None else group_named(parsed.only)
    evaluation = parsed.eval or parsed.dataset is not None or parsed.status in (EVALUATED, FAILED) or (only or "").startswith("eval.")
    bounds = (parsed.min_reward, parsed.max_reward)
    wanted = WantedGroups(parsed.status, parsed.step, *bounds, only, parsed.version, evaluation, parsed.dataset)
    listing = SampleList(wanted, parsed.sort or "age", 20 if parsed.limit is None else parsed.limit)
    return asyncio.run(_browse(parsed, console, listing, with_texts=parsed.responses or parsed.step is not None or evaluation))


def _refuse_list_options(parsed: argparse.Namespace) -> None:
    values = {**vars(parsed), "group": parsed.only}
    given = [option for option in _LIST_OPTIONS if values[option.removeprefix("--").replace("-", "_")] is not None]
    given += [f"--{name}" for name in ("eval", "responses") if values[name]]
    if given:
        raise ConfigError("GROUP", parsed.group, f"{', '.join(given)} is for the list; leave it out, or leave GROUP out")


def target(text: str) -> tuple[str, int | None]:
    """Returns (group's id, index of a sample or None) for a typed target: ``g00000012``, ``g12``, ``12``, or a held-out prompt's
    ``eval.heldout.5.0``, each with ``/3`` or without. Raises ConfigError."""
    match = _TARGET.match(text)
    if match is None:
        expected = "expected a group's id (g00000012, or 12; eval.NAME.VERSION.ROW of a held-out prompt), with /3 for its sample 3"
        raise ConfigError("GROUP", text, expected)
    return match[2] or group_id(int(match[1])), int(match[3]) if match[3] else None


def group_named(text: str) -> str:
    """Returns a group's id as `target` does, for where a sample makes no sense. Raises ConfigError."""
    group, index = target(text)
    if index is not None:
        raise ConfigError("--group", text, f"lists whole groups; `myxo samples RUN {text}` shows that sample")
    return group


async def _browse(parsed: argparse.Namespace, console: Console, listing: SampleList, with_texts: bool) -> int:
    """Prints the groups that a listing asks for, newest (best, longest) last; ``with_texts``: their prompts and responses, too."""
    only_files = _only_rollouts(parsed.run, parsed.dir)
    if only_files is not None:
        name, found = only_files.root.name, _GroupSamples(only_files)
        for position, kept in enumerate(found.reader.records()):
            listing.add(kept_group(position, kept))
        found.tell_torn()
        rows, of = listing.rows()
        if with_texts:
            found.read_files(rows)
    else:
        async with reach(parsed.run, parsed.dir) as access:
            async for sequence, record in _ledger(access):
                listing.apply(sequence, record)
            rows, of = listing.rows()
            name, found = access.run, _GroupSamples(access.directory)
            if with_texts:
                found.read_files(rows)
                await found.ask_store(access, rows, listing.history)
    if not parsed.json:
        _widen(console)
        console.print(table(name, rows, of))
        if with_texts:
            console.print(responses(name, rows, found.samples, found.absent))
        return exit_codes.DONE
    for group in rows:
        more = {**texts(group, found.of(group)), "absent": found.absent.get(group.group)} if with_texts else {}
        _print_json(console, {**group.as_plain(), "durable": listing.history.durable(group), **more})
    return exit_codes.DONE


async def _show(parsed: argparse.Namespace, console: Console, group: str, index: int | None) -> int:
    """Prints a group or one sample of it."""
    only_files, life = _only_rollouts(parsed.run, parsed.dir), GroupProvenance(group)
    pieces: Pieces | None = None
    if only_files is not None:
        name, found = only_files.root.name, _GroupSamples(only_files)
        record = found.reader.groups([group]).get(group)
        found.tell_torn()
        if record is None:
            where = only_files.root / DIRECTORY
            raise ConfigError("GROUP", group, f"no such group in {where}/, which is all that is left of run {name}")
        life.record = kept_group(0, record)
        _check_index(life, index)
        shown, absent = record.decoded(), None if record.samples else "none were kept"
    else:
        async with reach(parsed.run, parsed.dir) as access:
            async for sequence, entry in _ledger(access):
                life.apply(sequence, entry)
            if life.record is None:
                raise _no_such_group(access.run, group, life.history.admitted)
            _check_index(life, index)
            name, found, pieces = access.run, _GroupSamples(access.directory), _pieces(access.config)
            shown, absent = await found.of_one(access, life.record, life.history)
    if parsed.json:
        _print_json(console, as_plain(name, life, shown, index, absent, pieces))
    else:
        _widen(console)
        console.print(page(name, life, shown, index, absent, console.width, pieces))
    return exit_codes.DONE


class _GroupSamples:
    """The samples of several groups, by id, and why there are none.

    Args:
        directory: the run's, whose rollout files hold kept responses.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.reader = RolloutReader(directory.root / DIRECTORY)
        self.samples: dict[str, list[Sample]] = {}
        self.absent: dict[str, str] = {}

    def of(self, group: GroupRecord) -> list[Sample]:
        return self.samples.get(group.group, [])

    def read_files(self, rows: Sequence[GroupRecord]) -> None:
        """Takes the samples that the rollout files have."""
        records = self.reader.groups([group.group for group in rows])
        self.tell_torn()
        self.samples |= {name: record.decoded() for name, record in records.items() if record.samples}

    async def ask_store(self, access: Access, rows: Sequence[GroupRecord], history: GroupHistory) -> ConfigError | None:
        """Takes the groups that are missing from the store, where it should have them. Returns why no store is within reach."""
        missing = [group for group in rows if group.group not in self.samples]
        self.absent |= {group.group: why for group in missing if (why := history.gone(group)) is not None}
        stored = [group for group in missing if group.group not in self.absent]
        if not stored:
            return None
        try:
            async with payloads(access) as store:
                for group in stored:
                    found, absent = await _stored(store, group)
                    if absent is None:
                        self.samples[group.group] = found
                    else:
                        self.absent[group.group] = absent
        except ConfigError as error:  # the list is useful without them
            self.absent |= {group.group: str(error) for group in stored if group.group not in self.samples}
            return error
        return None

    async def of_one(self, access: Access, group: GroupRecord, history: GroupHistory) -> tuple[list[Sample], str | None]:
        """Returns the samples of a group, whole ones of the store before those of the files, or none and why.

        Raises ConfigError where no store is within reach and the files do not have it.
        """
        unreachable = await self.ask_store(access, [group], history)
        if not self.of(group):
            self.read_files([group])
        if unreachable is not None and not self.of(group):
            raise unreachable
        return self.of(group), None if self.of(group) else self.absent.get(group.group)

    def tell_torn(self) -> None:
        """Says on the standard error how many lines could not be read."""
        if self.reader.torn:
            lines = "1 line" if self.reader.torn == 1 else f"{self.reader.torn} lines"
            Console(stderr=True).print(Text(f"{lines} of {DIRECTORY}/ cut off or damaged, and left out", style="yellow"))


async def _stored(store: Store, group: GroupRecord) -> tuple[list[Sample], str | None]:
    """Returns the samples that the store has of a group, or none and why."""
    if group.payload is None or not group.payload.keys:
        return [], "the ledger names no payload"
    try:
        found = sample.decode(await store.read(group.payload.keys, deadline=STORE_SECONDS))
    except PayloadMissing as error:  # freed since the ledger was read, or lost
        return [], str(error)
    if [entry.index for entry in found] != list(range(len(group.rewards))):
        return [], f"the store holds samples {[entry.index for entry in found]}, which are not those that the ledger names"
    return found, None


def _only_rollouts(run: str, directory: Path) -> RunDirectory | None:
    """Returns the directory of a run of which only the rollout files are left on this machine; None where there is more, or nothing."""
    if given_servers().nats_url is not None:
        return None
    _, there = find(run, directory)
    if there is None or there.is_held() or (there.nats / "jetstream").is_dir() or not files(there.root / DIRECTORY):
        return None
    return there


def _pieces(config: RunConfig) -> Pieces | None:
    """Returns what gives the text of single tokens by the run's tokenizer; None where this machine does not have it."""
    try:
        from shared.data.tokenizer import Tokenizer
    except ModuleNotFoundError:  # it comes with the extra `buffer`
        return None
    try:
        return Tokenizer(hub_resolve.local(config, ("model.hf_checkpoint",), weights=False).model.hf_checkpoint).pieces
    except ConfigError:  # the directory is elsewhere, or holds none: ids are shown all the same
        return None


def _check_index(life: GroupProvenance, index: int | None) -> None:
    size = len(life.record.rewards) if life.record else 0
    if index is not None and index >= size and (size or life.gone() is None):
        raise ConfigError("GROUP", f"{life.group}/{index}", f"the group has {size} samples; give 0 to {size - 1}")


async def _ledger(access: Access) -> AsyncIterator[tuple[int, LedgerRecord]]:
    """Yields the ledger as it stands, with a bar on the terminal where that takes long."""
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


def _widen(console: Console) -> None:
    if not console.is_terminal:
        console.width = WIDE


def _print_json(console: Console, value: dict[str, Any]) -> None:
    console.file.write(json.dumps(value, allow_nan=False) + "\n")
