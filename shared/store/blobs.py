"""Blobs to and from the store at the pace of its socket: commands are gathered into one write, answers read into one buffer.

A blob is written where there is none and never over another (SETNX), and read no further than its reference says (GETRANGE). The client
library copies a value several times, which costs twice to four times the CPU for blobs of a few hundred kB (docs/dependencies.md). It still
makes the connection (address, certificates, credentials), and hiredis parses the answers; the code here only writes these two commands on
the socket and reads from it. Errors are the library's own (`redis.exceptions`), so that callers know one kind.
"""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import hiredis
import redis
from redis.exceptions import AuthenticationError, BusyLoadingError, NoPermissionError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.runtime import addresses

WINDOW_BYTES = 4 << 20  # The approximate bytes that may be asked for before they are read
WINDOW_BLOBS = 64  # The most blobs that may be asked for before they are read
SOCKET_SECONDS = 10.0  # The seconds for connecting, and after which a connection on which nothing comes or goes is given up
BUFFER_BYTES = 1 << 20
_WRITE_PARTS = 512  # The most buffers that one system call gets; Linux allows 1024

_ERRORS: dict[str, type[Exception]] = {
    "NOAUTH": AuthenticationError,
    "WRONGPASS": AuthenticationError,
    "NOPERM": NoPermissionError,
    "LOADING": BusyLoadingError,
}
DEMOTED = ("READONLY", "MASTERDOWN")  # what a server says that another one has replaced as the primary: a new connection reaches that one

# The answer to one command: what lies at a key, empty where nothing does; whether a blob was written; or the server's error
Answer = bytes | int | Exception
_INCOMPLETE: Any = object()  # What the parser returns where no whole answer has come yet


def options(url: str) -> dict[str, Any]:
    """Returns a client's options besides ``url``: for ``rediss://`` the authorities to trust. Raises ConfigError."""
    if not url.startswith("rediss:"):
        return {}
    authorities = addresses.authorities()
    return {"ssl_check_hostname": True} | ({"ssl_ca_certs": authorities} if authorities else {})


def connection(url: str) -> tuple[Any, socket.socket]:
    """Returns a connection that the library has made, with its socket. Close the connection; it closes the socket.

    Raises what the library raises.
    """
    timeouts = {"socket_timeout": SOCKET_SECONDS, "socket_connect_timeout": SOCKET_SECONDS}
    opened: Any = redis.ConnectionPool.from_url(url, protocol=2, **timeouts, **options(url)).make_connection()
    opened.connect()
    return opened, opened._sock


def set_command(key: str, blob: bytes) -> tuple[bytes, bytes, bytes]:
    """Returns SETNX as buffers to be written one after the other; the blob itself is not copied."""
    name = key.encode()
    return b"*3\r\n$5\r\nSETNX\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(blob)), blob, b"\r\n"


def get_command(key: str, most: int) -> bytes:
    """Returns the command that reads up to ``most`` bytes, and one more where the blob is larger."""
    name, end = key.encode(), b"%d" % most
    return b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n$1\r\n0\r\n$%d\r\n%b\r\n" % (len(name), name, len(end), end)


class Answers:
    """Parses the server's answers with hiredis, from a buffer that is used again and again.

    Fill ``buffer`` from its beginning, say how much with `filled`, then iterate over the answers that are complete.
    """

    def __init__(self) -> None:
        self.buffer = bytearray(BUFFER_BYTES)
        self._parser = hiredis.Reader(protocolError=RedisConnectionError, replyError=_refusal, notEnoughData=_INCOMPLETE)

    def filled(self, count: int) -> None:
        self._parser.feed(self.buffer, 0, count)  # type: ignore[arg-type]  # it takes any buffer

    def __iter__(self) -> Iterator[Answer]:
        while (answer := self._parser.gets()) is not _INCOMPLETE:
            yield answer


def _refusal(text: str) -> Exception:
    if (kind := text.split(" ", 1)[0]) in DEMOTED:
        raise RedisConnectionError(text)  # of no use any more
    return _ERRORS.get(kind, ResponseError)(text)


class Reader:
    """Reads blobs in the order asked for from a blocking socket; the next ones are on their way while one is used."""

    def __init__(self, url: str) -> None:
        self._connection, self._socket = connection(url)
        self._answers = Answers()
        self._blob_bytes = WINDOW_BYTES // 8  # the largest lately, until then a guess

    def get(self, wanted: Sequence[tuple[str, int]]) -> Iterator[Answer]:
        """Yields the answer to each key, which comes with the most bytes to read of it.

        A reader whose iteration was not finished is used up: close it.
        """
        asked = 0
        for read in range(len(wanted)):
            window = max(1, min(WINDOW_BLOBS, WINDOW_BYTES // self._blob_bytes))
            if asked - read <= window // 2:
                self._socket.sendall(b"".join([get_command(key, most) for key, most in wanted[asked : read + window]]))
                asked = min(len(wanted), read + window)
            answer = self._next()
            self._blob_bytes = max(len(answer) if isinstance(answer, bytes) else 0, self._blob_bytes * 7 // 8, 1)
            yield answer

    def _next(self) -> Answer:
        while True:
            for answer in self._answers:
                return answer
            count = self._socket.recv_into(self._answers.buffer)
            if not count:
                raise RedisConnectionError("the store closed the connection")
            self._answers.filled(count)

    def close(self) -> None:
        self._connection.disconnect()


class BlobConnection:
    """Writes and reads blobs from an event loop, many at a time: the commands of one pass of the loop go out in one write.

    It is not for TLS, whose sockets take no gathered writes. It is given up after `SOCKET_SECONDS` without a byte written or read.
    """

    def __init__(self, connection: Any, plain: socket.socket) -> None:
        self._connection, self._socket = connection, plain
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[bytes | memoryview] = deque()
        self._writing = False
        self._last_progress = time.monotonic()
        self._answers = Answers()
        self._awaited: deque[tuple[int, list[Answer], asyncio.Future[list[Answer]]]] = deque()
        self.closed = False
        plain.setblocking(False)
        self._loop.add_reader(plain, self._read)

    @classmethod
    async def open(cls, url: str) -> "BlobConnection":
        """Connects, in a thread. Raises what the library raises."""
        return cls(*await asyncio.to_thread(connection, url))

    async def set(self, blobs: Mapping[str, bytes]) -> list[Answer]:
        """Writes blobs; returns the answer to each."""
        return await self._ask([part for key, blob in blobs.items() for part in set_command(key, blob)], len(blobs))

    async def get(self, wanted: Sequence[tuple[str, int]]) -> list[Answer]:
        """Returns the answer to each key, which comes with the most bytes to read of it."""
        return await self._ask([b"".join([get_command(key, most) for key, most in wanted])], len(wanted))

    def close(self, reason: Exception | None = None) -> None:
        """Closes the connection; answers that are awaited on it fail with ``reason``."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._connection.disconnect()
        for _, _, answered in self._awaited:
            if not answered.done():
                answered.set_exception(reason or RedisConnectionError("the connection was closed"))
                answered.exception()  # whoever asked may have been cancelled
        self._awaited.clear()
        self._unsent.clear()

    async def _ask(self, parts: Sequence[bytes], answers: int) -> list[Answer]:
        if self.closed:
            raise RedisConnectionError("the connection was closed")
        answered: asyncio.Future[list[Answer]] = self._loop.create_future()
        if not self._awaited:
            self._last_progress = time.monotonic()
        self._awaited.append((answers, [], answered))
        self._unsent.extend(parts)
        if not self._writing:
            self._writing = True
            self._loop.call_soon(self._write)
        while not answered.done():
            left = self._last_progress + SOCKET_SECONDS - time.monotonic()
            if left <= 0:
                self.close(RedisTimeoutError(f"nothing came or went for {SOCKET_SECONDS:g} s"))
                break
            await asyncio.wait([answered], timeout=left)
        return answered.result()

    def _write(self) -> None:
        if self.closed:
            return
        try:
            while self._unsent:
                parts = [self._unsent.popleft() for _ in range(min(_WRITE_PARTS, len(self._unsent)))]
                try:
                    sent = self._socket.sendmsg(parts)
                except (BlockingIOError, InterruptedError):
                    sent = 0
                self._last_progress = time.monotonic() if sent else self._last_progress
                for index, part in enumerate(parts):
                    if sent < len(part):
                        self._unsent.extendleft(reversed([memoryview(part)[sent:], *parts[index + 1 :]]))
                        self._loop.add_writer(self._socket, self._write)
                        return
                    sent -= len(part)
        except OSError as error:
            self.close(RedisConnectionError(str(error)))
            return
        self._writing = False
        self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            count = self._socket.recv_into(self._answers.buffer)
            if not count:
                raise RedisConnectionError("the store closed the connection")
            self._last_progress = time.monotonic()
            self._answers.filled(count)
            for answer in self._answers:
                if not self._awaited:
                    raise RedisConnectionError("an answer without a request")
                wanted, answers, answered = self._awaited[0]
                answers.append(answer)
                if len(answers) == wanted:
                    self._awaited.popleft()
                    if not answered.done():
                        answered.set_result(answers)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.close(RedisConnectionError(str(error)))
        except RedisConnectionError as error:
            self.close(error)
