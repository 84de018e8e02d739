"""Sends commands to an engine's receivers, one in each of its ranks: all at once, and each answers.

The other end is `services.rollout.engine.receiver.command_session`, in the engine's processes.
"""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from services.rollout.engine.transport import EngineError, EngineUnreachable
from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.schema.weight_messages import WeightsReceived

LINE_BYTES = 64 * 2**20
ANSWER_MARGIN = 5.0  # seconds that a receiver has for its answer beyond a command's deadline: its own error says best what was missing
ABORT_SECONDS = 10.0  # the deadline for the other ranks to end a command at which one of them has failed
CONNECT_SECONDS = 5.0  # the seconds to open the connections of the next command

# The deadline for telling ranks that are late to begin a command that it is called off: one that is frozen hears it when it continues.
LATE_SECONDS = 1.0

Fields = dict[str, Any]  # a command, or a rank's answer to it


class ReceiverError(EngineError):
    """A rank has refused a command or failed at it. ``touched``: parameters of the engine may have changed."""

    def __init__(self, where: str, reason: str, touched: bool = False) -> None:
        super().__init__(where, reason)
        self.touched = touched


class EngineGone(ReceiverError):
    """A rank, or the engine's server, has ended in the middle of a command: no other member of the channel can have caused that."""


class NotBegun(DeadlineExceeded):
    """Some ranks did not begin a command in time: their scheduler does not run. ``touched``: parameters of others may have changed."""

    touched = False


def rank_socket(engine: Path, rank: int) -> Path:
    """Returns the socket of a rank in an engine's private directory."""
    return engine / f"rank-{rank}.sock"


def report_of(answers: Sequence[Fields], where: str) -> WeightsReceived:
    """Returns what an engine has received, from its ranks' answers. Raises ReceiverError if they did not receive the same."""
    digests = {answer["digest"] for answer in answers}
    if len(digests) != 1:
        raise ReceiverError(where, f"its ranks have received different weights: digests {sorted(digests)}", touched=True)
    differences: Counter[str] = Counter()
    for answer in answers:
        differences.update(answer["differences"])
    slowest = max(answers, key=lambda answer: answer["marks"]["checked"])
    seconds = max(answer["seconds"] for answer in answers)
    return WeightsReceived(
        digest=digests.pop(), bytes=slowest["bytes"], seconds=seconds, differences=dict(differences), marks=slowest["marks"]
    )


class ReceiverClient:
    """The sockets of one engine. ``directory``: each rank listens there, as ``rank-<r>.sock``. ``ranks``: how many the engine
    has, tensor-parallel ones of all stages."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.directory, self.ranks = directory, ranks
        self._waking: asyncio.Future[Any] | None = None  # of the last command that was done
        self._asked_wakes = 0
        self._wakes: set[asyncio.Future[Any]] = set()  # on their way to the schedulers, or there
        self._spare: list[_Connection] = []  # open ahead: a rank takes milliseconds for a new connection while its scheduler computes
        self._connecting: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Closes what is open for the next command."""
        await _ended(list(self._wakes))
        if self._connecting is not None:
            await _ended([self._connecting])
        for connection in self._spare:
            connection.close()
        self._spare = []

    async def wait_open(self, deadline: float) -> None:
        """Returns once every rank answers. Raises DeadlineExceeded that names those which do not listen."""
        missing = list(range(self.ranks))
        try:
            async with asyncio.timeout(deadline):
                while missing := [rank for rank in missing if not rank_socket(self.directory, rank).exists()]:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            awaited_from = f"ranks {missing} of the engine"
            raise DeadlineExceeded(f"a socket in {self.directory}", awaited_from, deadline, "the engine cannot take weights") from None
        await self.ask({"verb": "state"}, deadline)

    async def ask(self, command: Fields, deadline: float) -> list[Fields]:
        """Returns the answers, by rank, to a command that is run at once, even while the engine is busy. Raises ReceiverError: a rank
        refused, or has died. DeadlineExceeded: one did not answer."""
        async with self._asked(command, deadline) as (_, answers):
            return answers

    async def have_done(
        self,
        command: Fields,
        deadline: float,
        wake: Callable[[], Awaitable[object]],
        begin: float | None = None,
        ready: Callable[[], Awaitable[object]] | None = None,
    ) -> list[Fields]:
        """Returns the answers, by rank, to a command that the schedulers run. When one rank fails, the others are told to abort.

        ``wake`` may still be on its way then: see `settled`.

        ``deadline``: seconds for all of it, which the ranks are told. ``wake``: has every rank's scheduler run its next command, once the
        command is queued at all of them. ``begin``: seconds for the schedulers to begin it; None: as long as for all of it. ``ready``: what
        has to be done before ``wake``; it begins as soon as the command has been sent, and is awaited in any case. `settled` in it waits
        for the command before this one. Raises ReceiverError: a rank or ``wake`` has failed. DeadlineExceeded: a rank did not accept the
        command, and none has begun it. NotBegun: a rank has not begun it."""
        begin = deadline if begin is None else min(begin, deadline)
        before, getting_ready = self._waking, asyncio.ensure_future(_after_others(ready))

        async def woken() -> None:
            await asyncio.shield(getting_ready)  # in which `settled` may be awaited: this command's wake is not to be seen there
            self._waking = on_its_way = self._wake(wake)
            await asyncio.shield(on_its_way)  # it cannot be taken back

        try:
            # each answers that it is queued
            fields = command | {"deadline": deadline, "wakes": self._asked_wakes, "unanswered_wakes": len(self._wakes)}
            async with self._asked(fields, begin, ahead=True) as (connections, _):
                ranks = [asyncio.create_task(connection.done()) for connection in connections]
                beginning = asyncio.create_task(self._begun(connections, begin))
                waking = asyncio.ensure_future(woken())
                return await self._outcome(ranks, beginning, waking, deadline + ANSWER_MARGIN)
        except BaseException as error:
            if self._waking is not before:  # it was waited for, as long as a failed command waits for anything
                self._waking = None
            called_off = LATE_SECONDS if isinstance(error, DeadlineExceeded) else ABORT_SECONDS
            with contextlib.suppress(MyxoError):
                await asyncio.shield(self.abort(called_off))
            await _raise_first(getting_ready, error)
            raise
        finally:
            self._connecting = asyncio.create_task(self._connect_ahead())

    async def settled(self) -> None:
        """Returns once the schedulers have been woken for the last command. Raises the error of that."""
        waking, self._waking = self._waking, None
        if waking is not None:
            await asyncio.shield(waking)

    def _wake(self, wake: Callable[[], Awaitable[object]]) -> asyncio.Future[Any]:
        """Begins to wake the schedulers. It continues whatever becomes of the command, and is known until it has ended."""
        self._asked_wakes += 1
        waking = asyncio.ensure_future(wake())
        self._wakes.add(waking)
        waking.add_done_callback(self._wakes.discard)
        waking.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # told by whoever still waits for it
        return waking

    async def _begun(self, connections: Sequence["_Connection"], seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                for connection in connections:
                    await connection.begun.wait()
        except TimeoutError:
            late = [rank for rank, connection in enumerate(connections) if not connection.begun.is_set()]
            awaited_from = f"ranks {late} of the engine, whose schedulers do not run"
            raise NotBegun("the beginning of a push", awaited_from, seconds, "this engine is left out of it") from None

    async def abort(self, deadline: float = ABORT_SECONDS) -> None:
        """Aborts the running command of every rank. Raises as `ask`."""
        await self.ask({"verb": "abort"}, deadline)

    @contextlib.asynccontextmanager
    async def _asked(
        self, command: Fields, deadline: float, *, ahead: bool = False
    ) -> AsyncIterator[tuple[list["_Connection"], list[Fields]]]:
        """Sends a command to every rank. Yields the connections, open in the body, and the first answer of each, by rank. ``ahead``: take
        those that were opened ahead."""
        connections = self._connections() if ahead else [_Connection(rank_socket(self.directory, rank), rank) for rank in range(self.ranks)]
        asking = [asyncio.create_task(connection.ask(command)) for connection in connections]
        try:
            try:
                async with asyncio.timeout(deadline):
                    answers = await asyncio.gather(*asking)
            except TimeoutError:
                awaited_from = f"ranks {[rank for rank, task in enumerate(asking) if task.cancelled()]} of the engine at {self.directory}"
                next_action = "the engine is not to be trusted with weights"
                raise DeadlineExceeded(f"the answer to {command['verb']}", awaited_from, deadline, next_action) from None
            yield connections, answers
        finally:
            await _ended(asking)
            for connection in connections:
                connection.close()

    def _connections(self) -> list["_Connection"]:
        spare, self._spare = self._spare, []
        if len(spare) == self.ranks and all(connection.usable for connection in spare):
            return spare
        for connection in spare:
            connection.close()
        return [_Connection(rank_socket(self.directory, rank), rank) for rank in range(self.ranks)]

    async def _connect_ahead(self) -> None:
        """Opens the connections of the next command. One that cannot be opened is missed, and named, by that one."""
        fresh = [_Connection(rank_socket(self.directory, rank), rank) for rank in range(self.ranks)]
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                for connection in fresh:
                    await connection.connect()
        except (TimeoutError, ReceiverError):
            pass
        finally:
            old, self._spare = self._spare, fresh
            for connection in old:
                connection.close()

    async def _outcome(
        self, ranks: Sequence[asyncio.Task[Fields]], beginning: asyncio.Task[None], waking: asyncio.Future[Any], deadline: float
    ) -> list[Fields]:
        everything: set[asyncio.Future[Any]] = {*ranks, beginning, waking}
        end, first, waiting = time.monotonic() + deadline, None, everything
        try:
            while first is None and not all(task.done() for task in ranks) and (left := end - time.monotonic()) > 0:
                done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                first = next((error for task in done if (error := task.exception()) is not None), None)
            if first is None and all(task.done() for task in ranks):
                everything.discard(waking)
                return [task.result() for task in ranks]
            seconds = LATE_SECONDS if isinstance(first, NotBegun) else ABORT_SECONDS
            heard = False
            with contextlib.suppress(MyxoError):
                await self.abort(seconds)
                heard = True
            await asyncio.wait(everything, timeout=seconds)
            raise self._failure(first, ranks, deadline, heard)
        finally:
            await _ended(everything)

    def _failure(self, first: BaseException | None, ranks: Sequence[asyncio.Task[Fields]], deadline: float, heard: bool) -> BaseException:
        """Returns the error to raise for a command that has failed. ``first``: the first error; None: the deadline has passed. ``heard``:
        whether all ranks have been called off."""
        silent = [rank for rank, task in enumerate(ranks) if not task.done()]
        if first is None:
            first = DeadlineExceeded("the answer", f"ranks {silent} of the engine", deadline, "it is fenced")
        if not isinstance(first, MyxoError):
            return first
        if isinstance(first, NotBegun):
            first.touched = not heard or not all(map(_was_called_off, ranks))
            return first
        failures = [task.exception() for task in ranks if task.done()]
        touched = bool(silent) or any(not isinstance(error, ReceiverError) or error.touched for error in failures)
        where, reason = (first.where, first.reason) if isinstance(first, ReceiverError) else (str(self.directory), str(first))
        kind = EngineGone if isinstance(first, EngineGone | EngineUnreachable) else ReceiverError
        failure = kind(where, reason, touched)
        failure.__cause__ = first
        return failure


def _was_called_off(rank: asyncio.Task[Fields]) -> bool:
    """Returns whether a rank has said that it did not begin its command: one that does not say so has begun since, or still may."""
    error = rank.exception() if rank.done() else None
    return isinstance(error, ReceiverError) and not error.touched


class _Connection:
    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = str(path), rank
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.begun = asyncio.Event()  # the rank's scheduler has begun the command

    async def ask(self, command: Fields) -> Fields:
        """Connects, sends the command, and returns the first answer. Raises ReceiverError."""
        if self._streams is None:
            await self.connect()
        assert self._streams is not None
        self._streams[1].write(json.dumps(command).encode() + b"\n")
        return await self.answer()

    async def connect(self) -> None:
        """Raises ReceiverError."""
        try:
            self._streams = await asyncio.open_unix_connection(self._path, limit=LINE_BYTES)
        except OSError as error:
            raise ReceiverError(self._path, f"rank {self._rank} cannot be reached: {error}") from error
        self._loop = asyncio.get_running_loop()

    @property
    def usable(self) -> bool:
        """Returns whether it is open, in this event loop."""
        streams = self._streams
        return streams is not None and self._loop is asyncio.get_running_loop() and not (streams[0].at_eof() or streams[1].is_closing())

    async def done(self) -> Fields:
        """Returns the answer to a command that a scheduler runs, once it is done. Raises ReceiverError."""
        fields = await self.answer()
        if fields.get("begun"):
            self.begun.set()
            fields = await self.answer()
        self.begun.set()
        return fields

    async def answer(self) -> Fields:
        """Returns the next line. Raises ReceiverError where it reports a failure, or the connection has ended."""
        assert self._streams is not None  # by `ask`
        try:
            fields: Fields = json.loads(await self._streams[0].readline())
        except (OSError, ValueError) as error:
            raise EngineGone(self._path, f"rank {self._rank} has hung up without an answer", touched=True) from error
        if not any(fields.get(word) for word in ("ok", "queued", "begun")):
            raise ReceiverError(self._path, f"rank {self._rank}: {fields.get('error')}", bool(fields.get("touched")))
        return fields

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def _after_others(work: Callable[[], Awaitable[object]] | None) -> None:
    """Does some work once the tasks that are to begin now have begun."""
    await asyncio.sleep(0)
    if work is not None:
        await work()


async def _raise_first(work: asyncio.Future[Any], error: BaseException) -> None:
    """Waits for work that has a deadline of its own, so that nothing that follows overtakes it. Raises its error instead of ``error``."""
    if not isinstance(error, Exception):
        work.cancel()
    await asyncio.wait([work])
    if isinstance(error, Exception) and not work.cancelled() and (own := work.exception()) is not None:
        raise own from None


async def _ended(tasks: Iterable[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
