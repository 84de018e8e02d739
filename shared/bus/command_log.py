"""The log of commands from outside on JetStream: each key once, in one order for all readers, and its replay as an audit."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import TypeVar

import xxhash

from shared.bus import streams
from shared.bus.bus_errors import TRANSIENT
from shared.bus.connection import Bus, WrongSequence
from shared.bus.subjects import Subjects
from shared.runtime.errors import MyxoError
from shared.schema.digests import reference
from shared.schema.messages import TRAINED, Command, CommandOutcome, LogEntry
from shared.store.payload_store import Store

Entry = TypeVar("Entry", bound=LogEntry)
KEPT_SECONDS = 24 * 3600  # the time that a result is kept for its client
LOOK_SECONDS = 1.0  # the longest time until a new entry is read where its announcement was lost


class CommandLog:
    """One process's access to the log of a run."""

    def __init__(self, bus: Bus, run: str) -> None:
        self._bus, self._names = bus, Subjects(run)

    async def append(self, entry: Entry) -> Entry:
        """Appends an entry unless its key is there. Returns what the log has under the key: this one, or an earlier one.

        Raises DeadlineExceeded, StreamFull.
        """
        subject = self._names.command("outcome" if isinstance(entry, CommandOutcome) else "command", entry.client, entry.number)
        try:
            await self._bus.publish(subject, entry, once=True)
            return entry
        except WrongSequence:  # also where an attempt of this call went through and its confirmation was lost
            js, stream = self._bus.js, self._names.commands_stream
            stored = await self._bus.retry(lambda: js.get_last_msg(stream, subject), f"what {subject} holds", deadline=60.0)
            return type(entry).decode(stored.data or b"")

    async def with_payload(self, entry: Entry, blob: bytes, store: Store, name: str = "", seconds: int = KEPT_SECONDS) -> Entry:
        """Returns an entry with the rest of it, which is in the store for so many ``seconds`` then; 0: until it is freed. ``name``: of this
        content; empty: a result, which a death may have had computed before, otherwise."""
        key = self._names.command_key(entry.client, entry.number, name or f"result-{xxhash.xxh3_128_hexdigest(blob)}")
        await store.write({key: blob})
        if seconds:
            await store.commands("the expiry of a result", [("EXPIRE", key, seconds)])
        return entry.model_copy(update={"payload": reference(self._names.run, {key: blob})})

    async def follow(self) -> AsyncIterator[LogEntry | None]:
        """Yields all entries, oldest first, and new ones as they come; a None whenever all that was there has been yielded."""
        last, came = 0, asyncio.Event()

        async def announced(_: object) -> None:
            came.set()

        heard = await self._bus.connection.subscribe(self._names.command(">"), cb=announced)
        try:
            while True:
                came.clear()
                async for place, entry in streams.read(self._bus, self._names.commands_stream, LogEntry, after=last):
                    last = place
                    yield entry
                yield None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await came.wait()
        finally:
            with contextlib.suppress(MyxoError, *TRANSIENT):
                await heard.unsubscribe()


class CommandAudit:
    """Replays a log: every outcome has one command before it, training clients' commands are carried out in order and without a gap, and
    each optimizer step counts once."""

    def __init__(self) -> None:
        self.commands, self.violations = dict[tuple[str, int], Command](), list[str]()
        self.counts: Counter[str] = Counter()
        self._next, self._updates = dict[str, int](), dict[str, int]()

    def see(self, entry: LogEntry) -> None:
        """Takes the next entry."""
        name = f"{entry.client} {entry.number}"
        if isinstance(entry, Command):
            if entry.key in self.commands:
                self.violations.append(f"{name} was accepted twice")
            self.commands[entry.key] = entry
            self.counts["commands"] += 1
        elif isinstance(entry, CommandOutcome):
            command = self.commands.get(entry.key)
            self.counts["failed" if entry.error else "carried out"] += 1
            if command is None:
                self.violations.append(f"{name} has an outcome and no command")
            elif ":train:" in entry.client:
                self._see_trained(name, command, entry)

    def _see_trained(self, name: str, command: Command, outcome: CommandOutcome) -> None:
        client, wanted = command.client, self._next.get(command.client, 0)
        if command.number != wanted:
            self.violations.append(f"{name} was carried out where {wanted} was next")
        self._next[client] = command.number + 1
        if command.refused and not outcome.error:
            self.violations.append(f"{name} was refused and carried out all the same")
        if outcome.error or command.verb not in TRAINED:
            return
        found = int(outcome.figures.get("updates", -1))
        if command.verb == "optim_step" and found != self._updates.get(client, 0) + 1:
            self.violations.append(f"{name} was update {found} where {self._updates.get(client, 0) + 1} was next")
        self._updates[client] = found if found >= 0 else self._updates.get(client, 0)
