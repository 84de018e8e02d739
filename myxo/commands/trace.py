"""``myxo trace RUN``: writes the timeline of a run for Perfetto."""

import argparse
import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from myxo.commands.command_arguments import add_run
from myxo.run.run_access import Access, reach
from shared.bus import streams
from shared.bus.streams import Entry
from shared.bus.subjects import Subjects
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import replacement
from shared.runtime.safe_text import say
from shared.schema.ledger import LedgerRecord
from shared.schema.messages import Trained
from shared.schema.service_messages import ServiceEvent
from shared.schema.weight_messages import WeightsLive
from shared.view.timeline import Timeline, TraceEvent


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_run(command)
    command.add_argument("-o", "--output", type=Path, help="the file, compressed where it ends in .gz (default: trace.json.gz of the run)")
    command.set_defaults(run_command=lambda parsed, console: asyncio.run(trace(parsed.run, parsed.dir, parsed.output, console)))


async def trace(run: str, directory: Path, output: Path | None, console: Console) -> int:
    """Writes the file, whole or not at all. Raises ConfigError where there is no such run, or the file cannot be written."""
    async with reach(run, directory) as access:
        path = output or access.directory.root / "trace.json.gz"
        try:
            with replacement(path) as file:
                compressed = path.suffix == ".gz"
                count = 0
                with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=5) if compressed else nullcontext(file) as out:
                    out.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
                    async for event in _events(access):
                        out.write((b",\n" if count else b"\n") + json.dumps(event).encode())
                        count += 1
                    out.write(b"\n]}\n")
        except OSError as error:
            raise ConfigError("--output", str(path), f"a file that can be written: {error.strerror or error}") from error
    say(f"{path}: {count} events; open it at https://ui.perfetto.dev")
    return exit_codes.DONE


async def _events(access: Access) -> AsyncIterator[TraceEvent]:
    names, timeline = Subjects(access.run), Timeline()
    async for live in _told(access, WeightsLive, names.event("weights", "live")):
        for event in timeline.push(live):
            yield event
    async for told in _told(access, ServiceEvent, names.event("service", "*")):
        for event in timeline.service_event(told):
            yield event
    async for step in _told(access, Trained, names.event("trainer", "step")):
        timeline.step(step)
    async for _, record in streams.read(access.bus, names.ledger_stream, LedgerRecord):
        for event in timeline.apply(record):
            yield event
    for event in timeline.end():
        yield event


async def _told(access: Access, model: type[Entry], subject: str) -> AsyncIterator[Entry]:
    async for _, message in streams.read(access.bus, Subjects(access.run).events_stream, model, subject, strict=False):
        yield message
