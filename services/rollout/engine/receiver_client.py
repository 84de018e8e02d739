"""Sends commands to an engine's receivers, one in each of its tensor-parallel ranks: all at once, and each answers.

The other end is `services.rollout.engine.receiver.command_session`, in the engine's processes.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from services.rollout.engine.engine_errors import EngineError
from shared.runtime.errors import DeadlineExceeded, MyxoError

LINE_BYTES = 64 * 2**20

ANSWER_MARGIN = 5.0
"""Seconds that a receiver has for its answer beyond a command's deadline: its own error says best what was missing."""

ABORT_SECONDS = 10.0
"""The deadline for the other ranks to end a command at which one of them has failed."""


class ReceiverError(EngineError):
    """A rank has refused a command or failed at it. ``touched``: parameters of the engine may have changed."""

    def __init__(self, where: str, reason: str, touched: bool = False) -> None:
        super().__init__(where, reason)
        self.touched = touched


@dataclass(frozen=True)
class ReceiveReport:
    """A push that an engine has received. ``digest``: of the version. ``seconds``: of the slowest rank. ``differences``: of a check."""

    digest: str
    bytes: int
    seconds: float
    differences: dict[str, int]

    @classmethod
    def of(cls, answers: Sequence[dict[str, Any]], where: str) -> "ReceiveReport":
        """Returns the report of the ranks' answers. Raises ReceiverError if they did not receive the same."""
        digests = {answer["digest"] for answer in answers}
        if len(digests) != 1:
            raise ReceiverError(where, f"its ranks have received different weights: digests {sorted(digests)}", touched=True)
        differences: Counter[str] = Counter()
        for answer in answers:
            differences.update(answer["differences"])
        return cls(digests.pop(), answers[0]["bytes"], max(answer["seconds"] for answer in answers), dict(differences))


@dataclass(frozen=True)
class WeightsState:
    """An engine's record of its weights: ``version`` is -1 and ``digest`` empty where it does not know every tensor's digest."""

    version: int
    digest: str
    channels: frozenset[str]

    @classmethod
    def of(cls, answers: Sequence[dict[str, Any]]) -> "WeightsState":
        """Returns the state that the ranks answered; where they do not agree, the weights are unknown."""
        agree = len({(answer["version"], answer["digest"]) for answer in answers}) == 1
        version, digest = (answers[0]["version"], answers[0]["digest"]) if agree else (-1, "")
        return cls(version, digest, frozenset(answers[0]["channels"]))


class ReceiverClient:
    """The sockets of one engine.

    Args:
        directory: each rank listens there, as ``rank-<r>.sock``. ranks: the engine's tensor-parallel size.
    """

    def __init__(self, directory: Path, ranks: int) -> None:
        self.directory, self.ranks = directory, ranks

    async def wait_open(self, deadline: float) -> None:
        """Returns once every rank answers. Raises DeadlineExceeded that names those which do not listen."""
        missing = list(range(self.ranks))
        try:
            async with asyncio.timeout(deadline):
                while missing := [rank for rank in missing if not self._path(rank).exists()]:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            awaited_from = f"ranks {missing} of the engine"
            raise DeadlineExceeded(f"a socket in {self.directory}", awaited_from, deadline, "the engine cannot take weights") from None
        await self.ask({"verb": "state"}, deadline)

    async def ask(self, command: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
        """Returns the answers, by rank, to a command that is run at once, even while the engine is busy.

        Raises:
            ReceiverError: a rank refused, or has died. DeadlineExceeded: one did not answer.
        """

        async def converse(rank: int) -> dict[str, Any]:
            connection = await _Connection.open(self._path(rank), rank)
            try:
                await connection.say(command)
                return await connection.answer()
            finally:
                connection.close()

        return await self._all((converse(rank) for rank in range(self.ranks)), str(command["verb"]), deadline)

    async def have_done(self, command: dict[str, Any], deadline: float, wake: Callable[[], Awaitable[object]]) -> list[dict[str, Any]]:
        """Returns the answers, by rank, to a command that the schedulers run. When one rank fails, the others are told to abort.

        Args:
            deadline: seconds for all of it, which the ranks are told. wake: has every rank's scheduler run its next command, once the
                command is queued at all of them.

        Raises:
            ReceiverError: a rank or ``wake`` has failed. DeadlineExceeded: a rank did not accept the command, and none has begun it.
        """
        command = command | {"deadline": deadline}
        connections: list[_Connection] = []
        try:
            await self._all((self._queued(rank, command, connections) for rank in range(self.ranks)), str(command["verb"]), deadline)
            return await self._outcome([connection.answer() for connection in connections], wake, deadline + ANSWER_MARGIN)
        except BaseException:
            with contextlib.suppress(MyxoError):
                await asyncio.shield(self.abort())
            raise
        finally:
            for connection in connections:
                connection.close()

    async def abort(self, deadline: float = ABORT_SECONDS) -> None:
        """Aborts the running command of every rank. Raises as `ask`."""
        await self.ask({"verb": "abort"}, deadline)

    async def _queued(self, rank: int, command: dict[str, Any], connections: "list[_Connection]") -> None:
        connection = await _Connection.open(self._path(rank), rank)
        connections.append(connection)
        await connection.say(command)
        await connection.answer()  # the rank has answered that it is queued

    async def _outcome(
        self, answers: list[Coroutine[Any, Any, dict[str, Any]]], wake: Callable[[], Awaitable[object]], deadline: float
    ) -> list[dict[str, Any]]:
        ranks = [asyncio.create_task(answer) for answer in answers]
        waking = asyncio.ensure_future(wake())
        everything: set[asyncio.Future[Any]] = {*ranks, waking}
        try:
            done, pending = await asyncio.wait(everything, timeout=deadline, return_when=asyncio.FIRST_EXCEPTION)
            if not pending and all(task.exception() is None for task in done):
                return [task.result() for task in ranks]
            first = next((error for task in done if (error := task.exception()) is not None), None)
            with contextlib.suppress(MyxoError):
                await self.abort()
            await asyncio.wait(everything, timeout=ABORT_SECONDS)
            raise self._failure(first, ranks, deadline)
        finally:
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)

    def _failure(self, first: BaseException | None, ranks: Sequence[asyncio.Task[Any]], deadline: float) -> BaseException:
        """Returns the error to raise for a command that has failed. ``first``: the first error; None: the deadline has passed."""
        silent = [rank for rank, task in enumerate(ranks) if not task.done()]
        if first is None:
            first = DeadlineExceeded("the answer", f"ranks {silent} of the engine", deadline, "it is fenced")
        if not isinstance(first, MyxoError):
            return first
        failures = [task.exception() for task in ranks if task.done()]
        touched = bool(silent) or any(not isinstance(error, ReceiverError) or error.touched for error in failures)
        where, reason = (first.where, first.reason) if isinstance(first, ReceiverError) else (str(self.directory), str(first))
        failure = ReceiverError(where, reason, touched)
        failure.__cause__ = first
        return failure

    async def _all(self, work: Iterable[Coroutine[Any, Any, Any]], verb: str, deadline: float) -> list[Any]:
        tasks = [asyncio.create_task(coroutine) for coroutine in work]
        try:
            async with asyncio.timeout(deadline):
                return await asyncio.gather(*tasks)
        except TimeoutError:
            silent = [rank for rank, task in enumerate(tasks) if task.cancelled() or not task.done()]
            awaited_from = f"ranks {silent} of the engine at {self.directory}"
            raise DeadlineExceeded(
                f"the answer to {verb}", awaited_from, deadline, "the engine is not to be trusted with weights"
            ) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _path(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.sock"


class _Connection:
    """One command's connection to one rank."""

    def __init__(self, rank: int, where: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._rank, self._where, self._reader, self._writer = rank, where, reader, writer

    @classmethod
    async def open(cls, path: Path, rank: int) -> "_Connection":
        try:
            reader, writer = await asyncio.open_unix_connection(str(path), limit=LINE_BYTES)
        except OSError as error:
            raise ReceiverError(str(path), f"rank {rank} cannot be reached: {error}") from error
        return cls(rank, str(path), reader, writer)

    async def say(self, command: dict[str, Any]) -> None:
        self._writer.write(orjson.dumps(command) + b"\n")
        try:
            await self._writer.drain()
        except OSError as error:
            raise ReceiverError(self._where, f"rank {self._rank} has hung up: {error}", touched=True) from error

    async def answer(self) -> dict[str, Any]:
        """Returns the next line. Raises ReceiverError where it reports a failure, or the connection has ended."""
        try:
            line = await self._reader.readline()
            fields: dict[str, Any] = orjson.loads(line)
        except (OSError, ValueError) as error:
            raise ReceiverError(self._where, f"rank {self._rank} has hung up without an answer", touched=True) from error
        if not fields.get("ok") and not fields.get("queued"):
            raise ReceiverError(self._where, f"rank {self._rank}: {fields.get('error')}", bool(fields.get("touched")))
        return fields

    def close(self) -> None:
        self._writer.close()
