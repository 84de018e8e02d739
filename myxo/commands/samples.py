"""``myxo samples RUN [GROUP[/INDEX]]``: the groups of a run from its ledger, and the samples of one from its store or its rollout files.

Where nothing but the rollout files is left of a run, they are the list, too.
"""

import argparse
import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from myxo.commands.command_arguments import add_json, add_run, count, number
from myxo.display import SafeConsole
from myxo.display.sample_page import Pieces, ShownGroup, as_plain, json_line, page, responses, row_as_plain, table
from myxo.run.run_access import Access, given_servers, payloads, reach
from myxo.run.run_directory import RunDirectory, find
from shared.bus import streams
from shared.bus.subjects import Subjects
from shared.data.rollout_files import DIRECTORY, EVALUATED, FAILED, files
from shared.data.rows import ReadProgress
from shared.hub.hub_resolve import local_tokenizer
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError
from shared.schema.ledger import LedgerRecord, eval_group_parts, group_id
from shared.schema.sample import Sample
from shared.view.group_history import STATUSES, GroupRecord, ProvenanceStep
from shared.view.group_index import GroupIndex, GroupQuery, KeptResponses, stored_samples

STORE_SECONDS = 15.0  # deadline for reading one blob from the store
WIDE = 160  # characters of a line where no terminal gives its width
_TARGET = re.compile(r"(?:g?([0-9]{1,12})|(eval\.[A-Za-z0-9_-]+\.[0-9]{1,12}\.[0-9]{1,12}))(?:/([0-9]{1,9}))?\Z", re.ASCII)
ORDERS = {"age": "changed", "reward": "reward", "tokens": "tokens"}  # The orders of a list, and what the index calls them
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
    if not console.is_terminal:
        console.width = WIDE
    if parsed.group is not None:
        values = {**vars(parsed), "group": parsed.only}
        given = [option for option in _LIST_OPTIONS if values[option.removeprefix("--").replace("-", "_")] is not None]
        given += [f"--{name}" for name in ("eval", "responses") if values[name]]
        if given:
            raise ConfigError("GROUP", parsed.group, f"{', '.join(given)} is for the list; leave it out, or leave GROUP out")
        return asyncio.run(_show(parsed, console, *target(parsed.group)))
    query = _query(parsed)
    return asyncio.run(_browse(parsed, console, query, with_texts=parsed.responses or parsed.step is not None or query.evaluation))


def _query(parsed: argparse.Namespace) -> GroupQuery:
    """Returns the wanted groups, the last in order first, however many a page of the console may have."""
    only = None if parsed.only is None else group_named(parsed.only)
    evaluation = parsed.eval or parsed.dataset is not None or parsed.status in (EVALUATED, FAILED) or (only or "").startswith("eval.")
    limit = 20 if parsed.limit is None else parsed.limit
    given = {name: getattr(parsed, name) for name in ("step", "min_reward", "max_reward", "version", "dataset")}
    given |= {"status": [] if parsed.status is None else [parsed.status], "sort": ORDERS[parsed.sort or "age"]}
    return GroupQuery.model_construct(**given, group=only, evaluation=evaluation, limit=-1 if only is not None else limit or -1)


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


async def _browse(parsed: argparse.Namespace, console: Console, query: GroupQuery, with_texts: bool) -> int:
    async with _opened(parsed.run, parsed.dir) as run:
        await run.read(kept=with_texts)
        rows, of = run.index.page(query)
        if query.group is not None:  # of held-out prompts the index takes the beginning as well
            rows = [row for row in rows if row.group == query.group]
            of = len(rows)
        rows.reverse()
        if with_texts:  # the list is useful without those that no store within reach has
            run.read_files(rows)
            await run.ask_store(rows)
    shown = [run.shown(group) for group in rows]
    if parsed.json:
        for group in shown:
            console.file.write(json_line(row_as_plain(group, with_texts)) + "\n")
        return exit_codes.DONE
    console.print(table(run.name, rows, of))
    if with_texts:
        console.print(responses(run.name, shown))
    return exit_codes.DONE


async def _show(parsed: argparse.Namespace, console: Console, group: str, index: int | None) -> int:
    """Prints a group or one sample of it."""
    async with _opened(parsed.run, parsed.dir) as run:
        shown = await run.look_up(group, index)
    pieces = run.pieces()
    if parsed.json:
        console.file.write(json_line(as_plain(shown, index, pieces)) + "\n")
    else:
        console.print(page(shown, index, console.width, pieces))
    return exit_codes.DONE


async def stored_sample(run: str, directory: Path, text: str) -> Sample:
    """Returns the sample GROUP/INDEX of a run. Raises ConfigError: there is none, or it is not kept."""
    group, index = target(text)
    if index is None:
        raise ConfigError("--sample", text, f"one sample of the group: {text}/0")
    async with _opened(run, directory) as there:
        found = await there.look_up(group)
    why = found.absent or f"the group has {len(found.samples)} samples"
    for one in found.samples:
        if one.index == index and len(one.prompt):
            return one
        why = "its text alone is" if one.index == index else why
    raise ConfigError("--sample", text, f"a sample whose tokens are kept ({why}); monitoring.keep_rollouts_tokens = true keeps them")


@dataclass
class _OpenRun:
    """A run's groups and their samples. access: None where only its kept responses are left; found: a group's samples by its id, or why
    there are none."""

    directory: RunDirectory
    index: GroupIndex
    access: Access | None = None
    found: dict[str, list[Sample] | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kept = KeptResponses(self.directory.root / DIRECTORY, self.index, directory_only=self.access is None)

    @property
    def name(self) -> str:
        return self.directory.root.name if self.access is None else self.access.run

    def shown(self, group: GroupRecord, steps: Sequence[ProvenanceStep] = ()) -> ShownGroup:
        """Returns a group with what was found of its samples."""
        found, durable = self.found.get(group.group, "none were kept"), self.index.history.durable(group)
        samples, absent = ([], found) if isinstance(found, str) else (found, None)
        return ShownGroup(self.name, group, samples, absent, durable, steps)

    async def look_up(self, name: str, index: int | None = None) -> ShownGroup:
        """Returns a group with its samples, whole ones of the store before those of the files. Raises ConfigError where it, or its sample
        ``index``, is not there, and where no store is within reach that has what the files have not."""
        await self.read(kept=True)
        if (group := self.index.group(name)) is None:
            raise self.no_such_group(name)
        size = len(group.rewards)
        if index is not None and index >= size and (size or self.index.history.gone(group) is None):
            raise ConfigError("GROUP", f"{name}/{index}", f"the group has {size} samples; give 0 to {size - 1}")
        unreachable = await self.ask_store([group])
        self.read_files([group])
        if unreachable is not None and self._missing([group]):
            raise unreachable
        return self.shown(group, self.index.provenance(group))

    async def read(self, *, kept: bool) -> None:
        """Takes the ledger. kept: and where the kept responses lie, which are all there is of a run without one."""
        if self.access is not None:
            bus, stream, records = self.access.bus, Subjects(self.access.run).ledger_stream, list[tuple[int, LedgerRecord]]()
            with ReadProgress("reading the ledger", await streams.last_sequence(bus, stream)) as reading:
                async for entry in streams.read(bus, stream, LedgerRecord):
                    records.append(entry)
                    if len(records) == streams.FETCH:
                        self.index.apply(records)
                        reading.at(entry[0])
                        records = []
            self.index.apply(records)
        if kept or self.access is None:
            self.kept.update()
            if torn := self.kept.torn + self.kept.cut:
                lines = "1 line" if torn == 1 else f"{torn} lines"
                SafeConsole(stderr=True).print(Text(f"{lines} of {DIRECTORY}/ cut off or damaged, and left out", style="yellow"))

    def _missing(self, groups: Sequence[GroupRecord]) -> list[GroupRecord]:
        return [group for group in groups if isinstance(self.found.get(group.group, ""), str)]

    def read_files(self, groups: Sequence[GroupRecord]) -> None:
        """Takes the kept samples of the groups of which there are none yet."""
        kept = {group.group: self.kept.record(group) for group in self._missing(groups)}
        self.found |= {name: record.decoded() for name, record in kept.items() if record is not None and record.samples}

    async def ask_store(self, groups: Sequence[GroupRecord]) -> ConfigError | None:
        """Takes the groups that are missing from the store, where it should have them. Returns why no store is within reach."""
        missing = self._missing(groups) if self.access is not None else []
        self.found |= {group.group: why for group in missing if (why := self.index.history.gone(group)) is not None}
        stored = [group for group in missing if group.group not in self.found]
        if self.access is None or not stored:
            return None
        try:
            async with payloads(self.access) as store:
                for group in stored:
                    self.found[group.group] = await stored_samples(store, group, STORE_SECONDS)
        except ConfigError as error:
            self.found |= {group.group: str(error) for group in stored if group.group not in self.found}
            return error
        return None

    def pieces(self) -> Pieces | None:
        """Returns what gives the text of single tokens by the run's tokenizer; None where this machine does not have it."""
        tokenizer = None if self.access is None else local_tokenizer(self.access.config)
        return None if tokenizer is None else tokenizer.pieces

    def no_such_group(self, group: str) -> ConfigError:
        """Returns the refusal of a group that is not there."""
        if self.access is None:
            where = self.directory.root / DIRECTORY
            return ConfigError("GROUP", group, f"no such group in {where}/, which is all that is left of run {self.name}")
        if eval_group_parts(group) is not None:
            listed = f"`myxo samples {self.name} --eval` lists them"
            return ConfigError("GROUP", group, f"no such held-out prompt has come back in run {self.name}; {listed}")
        admitted = self.index.history.admitted
        there = f"it has {group_id(0)} to {group_id(admitted - 1)}" if admitted else "it has admitted none yet"
        return ConfigError("GROUP", group, f"no such group in run {self.name}; {there}")


@contextlib.asynccontextmanager
async def _opened(run: str, directory: Path) -> AsyncIterator[_OpenRun]:
    there = find(run, directory)[1] if given_servers().nats_url is None else None
    with contextlib.closing(GroupIndex()) as index:
        if there is not None and there.at_rest_without_streams() and files(there.root / DIRECTORY):
            yield _OpenRun(there, index)
            return
        async with reach(run, directory) as access:
            yield _OpenRun(access.directory, index, access)
